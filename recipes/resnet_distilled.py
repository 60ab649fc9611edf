"""Trains a residual network of 8 layers beside its teacher, a network of 14 layers, and exports both.

    python recipes/resnet_distilled.py
    python recipes/resnet_distilled.py --quick
    python recipes/resnet_distilled.py --full

The student has a ninth of the teacher's parameters. The run took 8 minutes on two CPU cores of an Intel Xeon that many
other programs used (benchmarks/results/resnet_distilled.json). Accuracy on the 360 held-out digits, the median of 3
seeds: teacher 99.72%, student 98.89% in float32 and 98.89% in int8. The same student without a teacher
(--no-distillation) reached 98.89%.

The full form trains ResNet-20 and then a student of 8 layers on CIFAR-10, which is downloaded, for 200 epochs each. It
has not been run: it needs a GPU and a network.

The script accepts the flags of `tfopt run resnet_distilled`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "resnet_distilled", *sys.argv[1:]]))
