"""Trains, prunes, quantizes and exports the classic small CNN on real handwritten digits.

    python recipes/digits_cnn.py
    python recipes/digits_cnn.py --quick
    python recipes/digits_cnn.py --full
    python recipes/digits_cnn.py --target-sparsity 0.9 --export-dir saved_models/sparse_digits

The run takes about a minute on two CPU cores (benchmarks/results/digits_cnn.json). Accuracy on the 360 held-out digits,
the median of 5 seeds: float32 99.17%, pruned to 75% zeros 99.17%, int8 99.17% in 0.30 of the bytes.

The full form trains on MNIST, which is downloaded. It has not been run: it needs a network.

The script accepts the flags of `tfopt run digits_cnn`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "digits_cnn", *sys.argv[1:]]))
