"""Trains, prunes, quantizes and exports a narrow EfficientNetV2 on real handwritten digits.

    python recipes/efficientnet_v2.py
    python recipes/efficientnet_v2.py --quick
    python recipes/efficientnet_v2.py --full

The run takes about 3 minutes on two CPU cores (benchmarks/results/efficientnet_v2.json). Accuracy on the 360 held-out
digits: float32 96.11%, pruned to 46% zeros 97.50%, int8 97.50% in 0.45 of the bytes.

The full form trains EfficientNetV2-B0 on ImageNet for 350 epochs at 224x224 pixels; the paper reports 78.7%. It needs
the data set imagenet2012 of TensorFlow Datasets, prepared from the archives of ILSVRC 2012 (a folder of images works
too: --data.source image_folder --data.arguments directory=imagenet). It has not been run: it needs a GPU and the data.

The script accepts the flags of `tfopt run efficientnet_v2`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "efficientnet_v2", *sys.argv[1:]]))
