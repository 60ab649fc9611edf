"""Trains, prunes, quantizes and exports a small text encoder that tells the package of a piece of source code.

    python recipes/text_encoder.py
    python recipes/text_encoder.py --quick
    python recipes/text_encoder.py --full

The examples are pieces of 256 tokens from the source files of Python's standard library; the classes are its packages
with at least four files, 22 in Python 3.11. The test files are held out as a whole.

The run takes about 4 minutes on two CPU cores (benchmarks/results/text_encoder.json). Accuracy on held-out pieces of
files, the median of 3 seeds: float32 80.97%, pruned to 50% zeros 80.77%, int8 80.77% in 0.27 of the bytes. TF-IDF with
logistic regression reaches 80.11% on the same pieces (benchmarks/results/text_baselines.json); docs/recipes.md compares
both on other splits of the files, and on whole files.

The full form trains BERT-base from random weights on the film reviews of IMDB. It downloads the data, or reads them
with --data.arguments path=aclImdb_v1.tar.gz. It has not been run: it needs a GPU and the data.

The script accepts the flags of `tfopt run text_encoder`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "text_encoder", *sys.argv[1:]]))
