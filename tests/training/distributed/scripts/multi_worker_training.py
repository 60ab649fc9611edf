"""One worker of a training in several processes: trains each case of a request (JSON) and writes the results.

The request names the directory of the results, and the settings of each case by its name.
"""

import json
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from tfopt.errors import TfoptWarning
from tfopt.pruning import PruningConfig, PruningSchedule
from tfopt.training import TrainingConfig, compile, plan

EXAMPLES, BATCH = 101, 16  # the last batch has five examples, which workers cannot share alike
VALIDATION = 33  # and the last of these one, which leaves a worker without


def examples():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 6)).astype("float32")
    weights = rng.uniform(0.5, 2.0, size=EXAMPLES).astype("float32")
    return x, (x[:, 0] * x[:, 1] > 0.3).astype("int32"), weights  # so few that the last bias moves


def build(*, norm):
    layers = [keras.layers.BatchNormalization(momentum=0.8), keras.layers.Dropout(0.3)] if norm else []
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-3)),
            *layers,
            keras.layers.Dense(2, dtype="float32"),
        ]
    )
    return model, keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5)


class Zeros(keras.callbacks.Callback):
    """Checks after every step that the weights outside the masks are zero. Logs the number of zeros of each kernel."""

    def on_train_batch_end(self, batch, logs=None):
        self.kernels = [layer.kernel for layer in self.model.layers if hasattr(layer, "kernel")]
        for kernel in self.kernels:
            assert not np.asarray(kernel)[~np.asarray(kernel.constraint.kept)].any()

    def on_epoch_end(self, epoch, logs=None):
        for place, kernel in enumerate(self.kernels):
            logs[f"zeros_{place}"] = int(np.count_nonzero(np.asarray(kernel) == 0))


def train(strategy, *, norm=False, epochs=3, pruning=None, **settings):
    """Trains and returns the model and its history. `pruning` holds the settings of a `PruningConfig`."""
    settings = {"precision": "float32", "jit_compile": False, "steps_per_execution": 1, **settings}
    decided = plan(TrainingConfig(strategy=strategy, global_batch_size=BATCH, **settings))
    keras.utils.set_random_seed(0)
    with decided.scope():
        model, optimizer = build(norm=norm)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compile(model, decided, optimizer=optimizer, loss=loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    callbacks = []
    if pruning is not None:
        x, y, weights = (array[:96].reshape(6, 16, *array.shape[1:]) for array in examples())
        schedule = PruningSchedule(model, PruningConfig(**pruning), data=list(zip(x, y, weights, strict=True)))
        callbacks = [Zeros(), schedule]
    validation = tuple(array[:VALIDATION] for array in examples())
    history = model.fit(
        decided.pipeline(examples()),
        validation_data=decided.pipeline(validation, training=False),
        epochs=epochs,
        callbacks=callbacks,
        verbose=0,
    ).history
    return model, history


def main():
    warnings.simplefilter("error", TfoptWarning)
    request = json.loads(sys.argv[1])
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    for name, settings in request["cases"].items():
        model, history = train("multi_worker", **settings)
        state = [np.asarray(variable) for variable in (*model.variables, *model.optimizer.variables)]
        np.savez(Path(request["results"]) / f"{name}-{worker}.npz", *state, history=json.dumps(history))


if __name__ == "__main__":
    main()
