"""Trains a small vision transformer beside its teacher, a residual network, and exports both.

    python recipes/vit_distilled.py
    python recipes/vit_distilled.py --quick
    python recipes/vit_distilled.py --full

The student has a fifth of the teacher's parameters. The run took 20 minutes on two CPU cores of an Intel Xeon that many
other programs used (benchmarks/results/vit_distilled.json). Accuracy on the 360 held-out digits, one seed: teacher
99.72%, student 95.00% in float32 and 95.00% in int8. The same student without a teacher (--no-distillation) reached
93.61%.

The full form trains ResNet-50 on ImageNet, and then DeiT-small (22 million parameters) beside it, which Touvron et al.
2021 (arXiv:2012.12877) do with a RegNet. It needs the data set imagenet2012 of TensorFlow Datasets, as the script
resnet50.py says. It has not been run: it needs GPUs and the data.

The script accepts the flags of `tfopt run vit_distilled`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "vit_distilled", *sys.argv[1:]]))
