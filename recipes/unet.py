"""Trains, prunes, quantizes and exports a small U-Net on masks of real handwritten digits.

    python recipes/unet.py
    python recipes/unet.py --quick
    python recipes/unet.py --full

The model gives each pixel one of 11 classes: paper, or the ink of one of the ten digits.
The run takes about 2 minutes on two CPU cores (benchmarks/results/unet.json). Mean IoU on the 360 held-out digits:
float32 98.37%, pruned to 50% zeros 99.34%, int8 99.34% in 0.29 of the bytes.

The full form trains the U-Net of Ronneberger et al. 2015 (arXiv:1505.04597), with padding and batch normalization, on
the 7,349 images of the Oxford-IIIT pets at 256x256 pixels. It needs images.tar.gz and annotations.tar.gz of
https://www.robots.ox.ac.uk/~vgg/data/pets, unpacked as oxford_pets/images and oxford_pets/annotations. One fifth of the
images is for testing. It has not been run: it needs a GPU and the data.

The script accepts the flags of `tfopt run unet`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "unet", *sys.argv[1:]]))
