"""`python -m farspark`, the same as the command `farspark`."""

import sys

from farspark.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
