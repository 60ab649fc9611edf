"""Trains, prunes, quantizes and exports a temporal convolutional network on the rows of real handwritten digits.

    python recipes/tcn.py
    python recipes/tcn.py --quick
    python recipes/tcn.py --full

The run takes about a minute on two CPU cores (benchmarks/results/tcn.json). Accuracy on the 360 held-out digits:
float32 98.61%, pruned to 75% zeros 98.89%, int8 98.89% in 0.33 of the bytes.

The full form trains the network of Bai et al. (2018) on sequential MNIST, where each of the 784 pixels is a step; the
paper reports 99.0%. It has not been run: it needs a GPU and the data.

The script accepts the flags of `tfopt run tcn`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "tcn", *sys.argv[1:]]))
