"""Trains a residual network of 14 layers on real handwritten digits, halves its multiply-adds, exports it.

    python recipes/resnet_shrunk.py
    python recipes/resnet_shrunk.py --quick
    python recipes/resnet_shrunk.py --full

The run takes about a minute on two CPU cores (benchmarks/results/resnet_shrunk.json). Accuracy on the 360 held-out
digits, the median of 5 seeds: float32 99.72%, shrunk 99.44%, int8 99.44%. The shrunk file is half as large. A network
this small spends its time on calls, so it is hardly faster; docs/pruning_measurements.md has the speeds of larger ones.

The full form trains ResNet-20 on CIFAR-10, which is downloaded, for 200 epochs. It has not been run: it needs a GPU and
a network.

The script accepts the flags of `tfopt run resnet_shrunk`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "resnet_shrunk", *sys.argv[1:]]))
