"""`python -m farspark.native [NAME [FILE]]` builds the native libraries."""

import sys

from farspark.native.build import main

sys.exit(main(sys.argv[1:]))
