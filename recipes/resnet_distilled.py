"""Trains a residual network of 8 layers beside its teacher, a network of 14 layers, and exports both.

    python recipes/resnet_distilled.py
    python recipes/resnet_distilled.py --quick
    python recipes/resnet_distilled.py --full

RESULTS

The full form trains ResNet-20 and then a student of 8 layers on CIFAR-10, which is downloaded, for 200 epochs each. It
has not been run: it needs a GPU and a network.

The script accepts the flags of `tfopt run resnet_distilled`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "resnet_distilled", *sys.argv[1:]]))
