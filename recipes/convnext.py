"""Trains, prunes, quantizes and exports a small ConvNeXt on real handwritten digits.

    python recipes/convnext.py
    python recipes/convnext.py --quick
    python recipes/convnext.py --full

The run takes about 2 minutes on two CPU cores (benchmarks/results/convnext.json). Accuracy on the 360 held-out digits:
float32 98.33%, pruned to 48% zeros 98.61%, int8 98.61% in 0.30 of the bytes.

The full form trains ConvNeXt-tiny (28.6 million parameters) on ImageNet for 300 epochs at 224x224 pixels, with the
settings of Liu et al. 2022 (arXiv:2201.03545), who reach 82.1% there; random erasing and random resized crops are
missing. It needs the archives of ILSVRC 2012, unpacked into a folder for each class: imagenet/train/CLASS/*.JPEG, and
the validation images as imagenet/test/CLASS/*.JPEG. It has not been run: it needs GPUs and the data.

The script accepts the flags of `tfopt run convnext`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "convnext", *sys.argv[1:]]))
