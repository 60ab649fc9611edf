"""Trains, prunes, quantizes and exports the classic small CNN on real handwritten digits.

    python recipes/digits_cnn.py
    python recipes/digits_cnn.py --quick
    python recipes/digits_cnn.py --target-sparsity 0.9 --export-dir saved_models/sparse_digits

It takes about 30 seconds on two CPU cores (benchmarks/results/digits_cnn.json) and reached, on the 360 digits held out:
float32 99.44%, pruned to 75% zeros 99.44%, int8 99.44% in 0.32 of the bytes.

It takes the flags of `tfopt run digits_cnn`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "digits_cnn", *sys.argv[1:]]))
