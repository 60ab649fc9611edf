"""Trains, prunes, quantizes and exports a small vision transformer on real handwritten digits.

    python recipes/vit.py
    python recipes/vit.py --quick
    python recipes/vit.py --full

The model has the width and the heads of ViT-tiny, but 4 blocks. It reads the images of 32x32 pixels as 64 patches.
The run takes about 3 minutes on two CPU cores (benchmarks/results/vit.json). Accuracy on the 360 held-out digits, the
median of 3 seeds: float32 97.78%, pruned to 50% zeros 97.50%, int8 97.22% in 0.28 of the bytes.

The full form trains DeiT-small (22 million parameters) on ImageNet for 300 epochs at 224x224 pixels, with the settings
of Touvron et al. 2021 (arXiv:2012.12877), who reach 79.9% there; repeated augmentation, random erasing and random
resized crops are missing. It needs the archives of ILSVRC 2012, unpacked into a folder for each class:
imagenet/train/CLASS/*.JPEG, and the validation images as imagenet/test/CLASS/*.JPEG. It has not been run: it needs GPUs
and the data.

The script accepts the flags of `tfopt run vit`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "vit", *sys.argv[1:]]))
