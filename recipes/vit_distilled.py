"""Trains a small vision transformer beside its teacher, a residual network, and exports both.

    python recipes/vit_distilled.py
    python recipes/vit_distilled.py --quick
    python recipes/vit_distilled.py --full

RESULTS

The full form trains ResNet-50 on ImageNet, and then DeiT-small (22 million parameters) beside it, which Touvron et al.
2021 (arXiv:2012.12877) do with a RegNet. It needs the archives of ILSVRC 2012, as the script vit.py says. It has not been
run: it needs GPUs and the data.

The script accepts the flags of `tfopt run vit_distilled`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "vit_distilled", *sys.argv[1:]]))
