"""`python -m farspark.native [FILE]` builds the native helper."""

import sys

from farspark.native.build import main

sys.exit(main(sys.argv[1:]))
