"""Trains, prunes, quantizes and exports a narrow MobileNetV2 on real handwritten digits.

    python recipes/mobilenet_v2.py
    python recipes/mobilenet_v2.py --quick
    python recipes/mobilenet_v2.py --full

The run takes about 2 minutes on two CPU cores (benchmarks/results/mobilenet_v2.json). Accuracy on the 360 held-out
digits: float32 97.78%, pruned to 47% zeros 98.33%, int8 98.06% in 0.35 of the bytes.

The full form trains MobileNetV2 on ImageNet for 150 epochs at 224x224 pixels; the paper reports 72%. It needs the data
set imagenet2012 of TensorFlow Datasets, prepared from the archives of ILSVRC 2012 (a folder of images works too:
--data.source image_folder --data.arguments directory=imagenet). It has not been run: it needs a GPU and the data.

The script accepts the flags of `tfopt run mobilenet_v2`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "mobilenet_v2", *sys.argv[1:]]))
