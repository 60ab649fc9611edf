"""Trains, prunes, quantizes and exports a narrow MobileNetV3 on real handwritten digits.

    python recipes/mobilenet_v3.py
    python recipes/mobilenet_v3.py --quick
    python recipes/mobilenet_v3.py --full

The run takes about 2 minutes on two CPU cores (benchmarks/results/mobilenet_v3.json). Accuracy on the 360 held-out
digits, the median of 3 seeds: float32 98.89%, pruned to 47% zeros 98.06%, int8 98.06% in 0.34 of the bytes.

The full form trains MobileNetV3-Large on ImageNet for 300 epochs at 224x224 pixels; the paper reports 75.2%. It needs
the data set imagenet2012 of TensorFlow Datasets, prepared from the archives of ILSVRC 2012 (a folder of images works
too: --data.source image_folder --data.arguments directory=imagenet). It has not been run: it needs a GPU and the data.

The script accepts the flags of `tfopt run mobilenet_v3`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "mobilenet_v3", *sys.argv[1:]]))
