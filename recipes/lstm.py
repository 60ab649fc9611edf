"""Trains, prunes, quantizes and exports an LSTM that reads real handwritten digits row by row.

    python recipes/lstm.py
    python recipes/lstm.py --quick
    python recipes/lstm.py --full

The run takes about 40 seconds on two CPU cores (benchmarks/results/lstm.json). Accuracy on the 360 held-out digits:
float32 98.06%, pruned to 50% zeros 97.78%, int8 97.78% in 0.35 of the bytes.

The products of an LSTM lie inside a loop, where int8 kernels do not run. So the int8 artifact stores the weights in
int8 and computes in float32.

The full form trains a bidirectional LSTM on the film reviews of IMDB. It downloads the data, or reads them with
--data.arguments path=aclImdb_v1.tar.gz. It has not been run: it needs a GPU and the data.

The script accepts the flags of `tfopt run lstm`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "lstm", *sys.argv[1:]]))
