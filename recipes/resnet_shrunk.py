"""Trains a residual network of 14 layers on real handwritten digits, halves its multiply-adds, exports it.

    python recipes/resnet_shrunk.py
    python recipes/resnet_shrunk.py --quick
    python recipes/resnet_shrunk.py --full

PLACEHOLDER

The full form trains ResNet-20 on CIFAR-10, which is downloaded, for 200 epochs. It has not been run: it needs a GPU and
a network.

The script accepts the flags of `tfopt run resnet_shrunk`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "resnet_shrunk", *sys.argv[1:]]))
