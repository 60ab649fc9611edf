"""Trains, prunes and exports an LSTM that reads real handwritten digits row by row.

    python recipes/lstm.py
    python recipes/lstm.py --quick
    tfopt export saved_models/lstm/pruned saved_models/lstm/int8_weight_only --precision int8_weight_only

The run takes about 40 seconds on two CPU cores (benchmarks/results/lstm.json). Accuracy on the 360 held-out digits:
float32 98.06%, pruned to 50% zeros 97.78%.

There is no int8 stage: the products of an LSTM lie inside a loop, where int8 kernels do not run. Weights in int8 pay:
the last command stores them in about a third of the bytes and computes in float32.

The full form trains a bidirectional LSTM on the film reviews of IMDB. It downloads the data, or reads them with
--data.arguments path=aclImdb_v1.tar.gz. It has not been run: it needs a GPU and the data.

The script accepts the flags of `tfopt run lstm`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "lstm", *sys.argv[1:]]))
