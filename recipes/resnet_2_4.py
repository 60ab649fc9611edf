"""Trains a residual network of 14 layers on real handwritten digits, prunes two of four weights, exports it.

    python recipes/resnet_2_4.py
    python recipes/resnet_2_4.py --quick
    python recipes/resnet_2_4.py --full

The run takes about a minute on two CPU cores (benchmarks/results/resnet_2_4.json). Accuracy on the 360 held-out digits,
the median of 5 seeds: float32 99.72%, pruned in the pattern 2:4 99.72%, int8 99.72%. The first layer stays dense.

The full form trains ResNet-20 on CIFAR-10, which is downloaded, for 200 epochs. It has not been run: it needs a GPU and
a network.

The script accepts the flags of `tfopt run resnet_2_4`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "resnet_2_4", *sys.argv[1:]]))
