"""One worker that reads an epoch of each source, and writes the numbers of the examples that it got.

The request (JSON) names the directory of the results and of the files, and the number of batches to skip.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from tfopt.data import SOURCES, Examples
from tfopt.training import TrainingConfig, plan

BATCH, EPOCH = 8, 2


def made(directory):
    """Returns examples of several sources. The first input of an example is its number."""
    rows = tf.data.Dataset.range(61)
    numbers = SOURCES["numpy"](
        **{f"{name}{part}": str(directory / f"{name}.npy") for name in "xy" for part in ("", "_test")}
    )
    files = SOURCES["tfrecord"](directory=str(directory / "records"))
    memory = Examples(name="memory", train=rows, test=rows, outputs=1, decode=lambda n: (tf.fill([2], n), n))
    lengths = Examples(
        name="lengths",
        train=rows,
        test=rows,
        outputs=1,
        decode=lambda n: (tf.fill([1 + n % 7], n), n),
        padding=(0, 0),
    )
    return {"memory": memory, "numpy": numbers, "tfrecord": files, "lengths": lengths}


def noisy(example, seed):
    """An augmentation that leaves the numbers as they are."""
    inputs, *others = example
    return inputs + tf.cast(tf.random.stateless_uniform((), seed) * 0, inputs.dtype), *others


def numbers_of(batches, strategy):
    found = []
    for batch in batches:
        for part in strategy.experimental_local_results(batch):
            found.append([int(number) for number in np.asarray(part[1]).ravel()])
    return found


def main():
    request = json.loads(sys.argv[1])
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    decided = plan(TrainingConfig(strategy="multi_worker", global_batch_size=BATCH, precision="float32"))
    results = {}
    for name, examples in made(Path(request["files"])).items():
        for cache in ("off", "memory"):
            # Buckets only here: what the workers share must not depend on the cache.
            settings = {"bucket_boundaries": (3, 5)} if (name, cache) == ("lengths", "memory") else {}
            batches = decided.pipeline(examples, cache=cache, augment=noisy, **settings)
            shared = decided.strategy.experimental_distribute_dataset(batches)
            decided.epoch.assign(EPOCH)
            epoch = numbers_of(shared, decided.strategy)
            later = iter(shared)
            for _ in range(request["skip"]):
                next(later)
            results[f"{name} {cache}"] = {"epoch": epoch, "rest": numbers_of(later, decided.strategy)}
    Path(request["results"], f"{worker}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
