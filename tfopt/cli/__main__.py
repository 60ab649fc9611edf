"""`python -m tfopt.cli` is the command `tfopt`."""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main())
