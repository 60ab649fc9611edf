"""Do the parts of a step add up, and is each where it was put?

    python benchmarks/breakdown.py

Six training runs have known waits: in the input, in a callback, in the computation, two of them at once, all three at
once, and in the computation of two replicas. Two more have none, so that their steps are short: one device, and two
replicas that exchange gradients. Each is watched in a fresh process. `sum_over_step` is the sum of input, host, compute
and communication over the measured time of a step; each part is measured by itself. `found_ms` is what was found of
each known wait. Results go to benchmarks/results/breakdown.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

RESULTS = Path(__file__).parent / "results"
EXAMPLES, BATCH, WIDTH = 3200, 32, 64
STEPS = 300


@dataclass(frozen=True, kw_only=True)
class Options:
    only: tuple[str, ...] = ()
    """Names of runs; empty for all."""
    out: Path = RESULTS / "breakdown.json"
    """Path of the results file."""


def main(options: Options) -> dict[str, Any]:
    import keras
    import tensorflow as tf

    from tfopt.atomic.files import write_text
    from tfopt.hardware import detect

    hardware = detect()
    runs = {name: _process(name) for name in RUNS if not options.only or name in options.only}
    for name, found in runs.items():
        print(f"{name:18} sum over step {found['sum_over_step']:.3f}  {found['parts']}", flush=True)
    results = {
        "what": "parts of a training step with known waits, each measured by itself, in ms per step",
        "device": f"{hardware.processor}, {hardware.logical_cores} cores",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "load_average_before": round(os.getloadavg()[0], 2),
        "largest_difference": _largest(found for found in runs.values() if found["known_ms"]),
        "largest_difference_without_a_wait": _largest(found for found in runs.values() if not found["known_ms"]),
        "runs": runs,
    }
    write_text(options.out, json.dumps(results, indent=2) + "\n")
    return results


def _largest(runs: Iterable[dict[str, Any]]) -> float:
    return max((abs(found["sum_over_step"] - 1) for found in runs), default=0.0)


def _process(name: str) -> dict[str, Any]:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, __file__, "--part", name]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{name}: {ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _part(name: str) -> dict[str, Any]:
    import tfopt

    model, data, options, known = RUNS[name]()
    found = tfopt.diagnose(model, data, steps=STEPS, epochs=3, **options).breakdown
    return {
        "step_ms": found.step_ms,
        "parts": {part: round(ms, 3) for part, ms in found.parts.items()},
        "sum_over_step": sum(found.parts.values()) / found.step_ms,
        "known_ms": known,
        "found_ms": {part: found.parts[part] for part in known},
    }


def _network(layers: list[Any], **options: Any) -> Any:
    import keras

    body = [keras.layers.Dense(512, "relu"), keras.layers.Dense(512, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, *body])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, **{"jit_compile": False, **options})
    return model


def _data(wait_s: float = 0.0) -> Any:
    import numpy as np
    import tensorflow as tf

    def pause(value: Any) -> Any:
        time.sleep(wait_s)
        return value

    def slowly(x: Any, y: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(pause, [x], tf.float32), (None, WIDTH)), y

    examples = np.random.default_rng(0).random((EXAMPLES, WIDTH), dtype=np.float32), np.arange(EXAMPLES) % 10
    batches = tf.data.Dataset.from_tensor_slices(examples).batch(BATCH)
    if not wait_s:
        return batches.cache().prefetch(4)
    no_hidden_prefetch = tf.data.Options()
    no_hidden_prefetch.experimental_optimization.inject_prefetch = False
    return batches.map(slowly).with_options(no_hidden_prefetch)


def _callback(wait_s: float) -> Any:
    import keras

    class Sleep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(wait_s)

    return Sleep()


def _sleeping(wait_s: float) -> Any:
    import keras
    import tensorflow as tf

    class Sleeping(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            def pause(value: Any) -> Any:
                time.sleep(wait_s)
                return value

            return inputs + 0 * tf.stop_gradient(
                tf.ensure_shape(tf.numpy_function(pause, [inputs], tf.float32), (None, WIDTH))
            )

    return Sleeping()


def _replicas(wait_s: float = 0.0) -> Any:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = _network([_sleeping(wait_s)] if wait_s else [])
    # TensorFlow calls Python for one replica after the other.
    return model, _data(), {}, {"compute": 2 * 1e3 * wait_s} if wait_s else {}


RUNS: dict[str, Callable[[], Any]] = {
    "input": lambda: (_network([]), _data(0.01), {}, {"input": 10.0}),
    "host": lambda: (_network([]), _data(), {"callbacks": [_callback(0.01)]}, {"host": 10.0}),
    "compute": lambda: (_network([_sleeping(0.01)]), _data(), {}, {"compute": 10.0}),
    "input_and_host": lambda: (
        _network([]), _data(0.006), {"callbacks": [_callback(0.004)]}, {"input": 6.0, "host": 4.0}
    ),
    "input_host_and_compute": lambda: (
        _network([_sleeping(0.005)]),
        _data(0.004),
        {"callbacks": [_callback(0.003)]},
        {"input": 4.0, "host": 3.0, "compute": 5.0},
    ),
    "two_replicas_compute": lambda: _replicas(0.01),
    "no_wait": lambda: (_network([]), _data(), {}, {}),
    "two_replicas": _replicas,
}  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        print(json.dumps(_part(sys.argv[2])))
    else:
        main(tyro.cli(Options))
