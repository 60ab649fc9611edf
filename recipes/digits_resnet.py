"""Trains, prunes, quantizes and exports a residual network of 14 layers on real handwritten digits.

    python recipes/digits_resnet.py
    python recipes/digits_resnet.py --quick
    python recipes/digits_resnet.py --model.arguments depth=20 width=32

It takes the flags of `tfopt run digits_resnet`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "digits_resnet", *sys.argv[1:]]))
