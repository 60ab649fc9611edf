"""Trains, prunes, quantizes and exports dense layers on 442 real records of diabetes patients: a regression.

    python recipes/mlp.py
    python recipes/mlp.py --quick
    python recipes/mlp.py --full --data.arguments path=rows.csv target=price

The run takes about 20 seconds on two CPU cores (benchmarks/results/mlp.json). Mean absolute error on the 89 held-out
records: float32 0.5813, pruned to 50% zeros 0.5768, int8 0.5767 in 0.70 of the bytes. The targets have a standard
deviation of 1. Ridge regression reaches 0.60 on the 89 held-out records.

The full form reads any table: a CSV file whose first line holds the names of the columns. All columns but the target
are inputs; bring them to mean 0 and standard deviation 1 first. It needs pip install 'tfopt[tables]'. It has not been
run on a large table.

The script accepts the flags of `tfopt run mlp`; --help lists them.
"""

import sys

from tfopt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "mlp", *sys.argv[1:]]))
