"""Trains a residual network of 14 layers on real handwritten digits, prunes it to 90% zeros, quantizes and exports it.

    python recipes/resnet_sparse.py
    python recipes/resnet_sparse.py --quick
    python recipes/resnet_sparse.py --full

The run takes about a minute on two CPU cores (benchmarks/results/resnet_sparse.json). Accuracy on the 360 held-out
digits, the median of 5 seeds: float32 99.72%, pruned to 90% zeros 99.44%, int8 99.44%. All weights are ranked together,
so layers that need their weights keep more of them.

The full form trains ResNet-20 on CIFAR-10, which is downloaded, for 200 epochs. It has not been run: it needs a GPU and
a network.

The script accepts the flags of `tfopt run resnet_sparse`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "resnet_sparse", *sys.argv[1:]]))
