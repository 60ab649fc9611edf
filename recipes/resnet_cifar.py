"""Trains, prunes, quantizes and exports a residual network of 14 layers on real handwritten digits.

    python recipes/resnet_cifar.py
    python recipes/resnet_cifar.py --quick
    python recipes/resnet_cifar.py --full
    python recipes/resnet_cifar.py --model.arguments depth=20 width=32

The run takes about a minute on two CPU cores (benchmarks/results/resnet_cifar.json). Accuracy on the 360 held-out
digits, the median of 5 seeds: float32 99.72%, pruned to 75% zeros 99.44%, int8 99.44% in 0.31 of the bytes.

The full form trains ResNet-20 on CIFAR-10, which is downloaded, for 200 epochs; He et al. 2016 report 91.25%. It has
not been run: it needs a GPU and a network.

The script accepts the flags of `tfopt run resnet_cifar`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "resnet_cifar", *sys.argv[1:]]))
