"""Trains, prunes, quantizes and exports a small residual network of bottleneck blocks on real handwritten digits.

    python recipes/resnet50.py
    python recipes/resnet50.py --quick
    python recipes/resnet50.py --full

The run takes about a minute on two CPU cores (benchmarks/results/resnet50.json). Accuracy on the 360 held-out digits:
float32 99.72%, pruned to 50% zeros 99.44%, int8 99.44% in 0.33 of the bytes.

The full form trains ResNet-50 v1.5 on ImageNet for 90 epochs at 224x224 pixels, with the settings of Goyal et al. 2017
(arXiv:1706.02677), which reach 76% there. It needs the data set imagenet2012 of TensorFlow Datasets, prepared from the
archives of ILSVRC 2012 (a folder of images works too: --data.source image_folder --data.arguments directory=imagenet).
It has not been run: it needs a GPU and the data.

The script accepts the flags of `tfopt run resnet50`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "resnet50", *sys.argv[1:]]))
