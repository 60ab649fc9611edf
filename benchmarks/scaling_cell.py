"""Measures the step of one model on one number of replicas, for scaling.py, which starts it.

    python benchmarks/scaling_cell.py MODEL DEVICES FILE
    tfopt launch --workers 2 benchmarks/scaling_cell.py MODEL 1 FILE

It writes the median time of a step in `fit`, and the times in which the replicas sum one small and one large vector.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tfopt
from tfopt.atomic.files import write_text

EPOCHS = 14
STEPS = 5
SMALL, LARGE = 256, 2**23  # float32 values: 1 kB and 34 MB
MODELS: dict[str, tuple[Any, tuple[int, ...], int]] = {
    "mlp": (lambda: tfopt.models.mlp((1024,), 10, units=(2048, 2048)), (1024,), 256),
    "resnet_cifar": (lambda: tfopt.models.resnet_cifar((32, 32, 3), 10), (32, 32, 3), 32),
}


class Timer(keras.callbacks.Callback):
    """Times epochs of STEPS steps, but the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch > 1:
            self.seconds.append(time.perf_counter() - self._start)


def main(name: str, devices: int, file: Path) -> None:
    is_worker = "TF_CONFIG" in os.environ
    if devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    strategy = "multi_worker" if is_worker else "mirrored" if devices > 1 else "none"
    replicas = 2 if is_worker else devices
    build, shape, per_replica = MODELS[name]
    size = per_replica * replicas
    plan = tfopt.plan(
        tfopt.TrainingConfig(
            global_batch_size=size, strategy=strategy, precision="float32", steps_per_execution=STEPS, auto_shard="off"
        )
    )
    with plan.scope():
        model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tfopt.compile(model, plan, optimizer="sgd", loss=loss)
    batch = np.zeros((size, *shape), "float32"), np.zeros((size,), "int32")
    timer = Timer()
    # Workers must run the same number of steps, so no clock ends the training.
    epochs = 2 + EPOCHS
    data = tf.data.Dataset.from_tensors(batch).repeat()
    if plan.strategy is not None:
        data = tf.data.Dataset.from_tensor_slices(batch).batch(size).repeat()
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        data = data.with_options(options)
    model.fit(data, steps_per_epoch=STEPS, epochs=epochs, verbose=0, shuffle=False, callbacks=[timer])
    result = {
        "replicas": replicas,
        "step_ms": 1e3 * statistics.median(timer.seconds) / STEPS,
        "gradient_bytes": sum(4 * int(np.prod(weight.shape)) for weight in model.trainable_weights),
        "examples": per_replica,
    }
    if plan.strategy is not None:
        result["small_s"], result["large_s"] = (sum_seconds(plan.strategy, values) for values in (SMALL, LARGE))
        result["small_bytes"], result["large_bytes"] = 4 * SMALL, 4 * LARGE
    if plan.is_chief:
        write_text(file, json.dumps(result))


def sum_seconds(strategy: tf.distribute.Strategy, values: int) -> float:
    """Returns the median time in which the replicas sum a vector, several times in one function."""
    repeats = 8

    @tf.function
    def sums() -> Any:
        def on_replica() -> Any:
            value = tf.ones(values)
            for _ in range(repeats):
                value = tf.distribute.get_replica_context().all_reduce("SUM", value * 0.5)
            return value[0]

        return strategy.run(on_replica)

    sums()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        sums()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / repeats


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
