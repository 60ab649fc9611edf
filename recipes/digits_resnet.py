"""Trains, prunes, quantizes and exports a residual network of 14 layers on real handwritten digits.

    python recipes/digits_resnet.py
    python recipes/digits_resnet.py --quick
    python recipes/digits_resnet.py --model.arguments depth=20 width=32

The run takes about 80 seconds on two CPU cores (benchmarks/results/digits_resnet.json). Accuracy on the 360 held-out
digits: float32 100.00%, pruned to 75% zeros 94.44%, int8 93.89% in 0.30 of the bytes.

The script accepts the flags of `tfopt run digits_resnet`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "digits_resnet", *sys.argv[1:]]))
