"""Over an epoch two workers see every example once, and a restored position goes on with the next batch."""

import json
from pathlib import Path

import numpy as np
import pytest

from tfopt.data import SOURCES, convert

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "two_workers_read.py"
LAUNCH = "import sys; from tfopt.cli import main; sys.exit(main(sys.argv[1:]))"
COUNT, SKIP = 61, 3


@pytest.fixture(scope="module")
def read(tmp_path_factory, fresh_python):
    """Returns what each worker read, by the source."""
    directory = tmp_path_factory.mktemp("files")
    np.save(directory / "x.npy", np.repeat(np.arange(COUNT, dtype="float32")[:, None], 3, axis=1))
    np.save(directory / "y.npy", np.arange(COUNT, dtype="float32"))
    x, y = (str(directory / f"{name}.npy") for name in "xy")
    convert(SOURCES["numpy"](x=x, y=y, x_test=x, y_test=y), directory / "records", shards=3)
    request = json.dumps({"results": str(directory), "files": str(directory), "skip": SKIP})
    fresh_python("-c", LAUNCH, "launch", "--workers", "2", SCRIPT, request, check=True)
    return [json.loads((directory / f"{worker}.json").read_text()) for worker in range(2)]


@pytest.mark.parametrize("cache", ["off", "memory"])
@pytest.mark.parametrize("source", ["memory", "numpy", "tfrecord", "lengths"])
def test_every_example_comes_to_one_worker(read, source, cache):
    parts = [worker[f"{source} {cache}"] for worker in read]
    seen = sorted(number for part in parts for batch in part["epoch"] for number in batch)
    assert seen == list(range(COUNT))
    for part in parts:
        assert part["rest"] == part["epoch"][SKIP:]
    assert len(parts[0]["epoch"]) == len(parts[1]["epoch"])  # a worker must not wait for the other at the end
