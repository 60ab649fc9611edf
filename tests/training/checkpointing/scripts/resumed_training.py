"""Trains with checkpoints in processes that the tests may kill.

With a request as its argument (JSON: the arguments of `train`) this trains in this process. Without one it reads
requests from standard input, one a line, and trains each in a fork of its own: TensorFlow takes seconds to import, and
no time in a fork of a process that has imported it and not yet used a device. Answers are lines of JSON on standard
output: the fork's pid, "begun" when its `fit` begins, "trained" after each call of the step, and its end, as
subprocess.Popen.returncode would say it.
"""

import json
import os
import sys
import traceback
import warnings

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np

from tfopt.errors import TfoptWarning
from tfopt.pruning import PruningConfig, PruningSchedule
from tfopt.training import TrainingConfig, compile, plan

EXAMPLES, BATCH = 100, 16  # seven steps an epoch, the last of four examples


def examples():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 6)).astype("float32")
    return x, (x[:, :1] * x[:, 1:2] > 0).astype("float32")


def build(decided, *, decay_steps, width=16, optimizer="sgd"):
    """Has all that a restart could lose: random numbers, statistics, slots, and a learning rate that changes."""
    keras.utils.set_random_seed(0)
    with decided.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(width, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
    rate = keras.optimizers.schedules.CosineDecay(0.01, decay_steps)
    optimizers = {
        "adam": lambda: keras.optimizers.Adam(rate),
        "averaging": lambda: keras.optimizers.Adam(rate, use_ema=True, ema_momentum=0.9),
        "sgd": lambda: keras.optimizers.SGD(rate, momentum=0.9),
    }
    optimizer = optimizers[optimizer]()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    compile(model, decided, optimizer=optimizer, loss=loss, metrics=["mae"])
    return model


def train(
    directory,
    *,
    result=None,
    epochs=4,
    decay_epochs=None,
    pruning=False,
    size_known=True,
    width=16,
    optimizer="sgd",
    validation=False,
    callbacks=(),
    **settings,
):
    """Trains, and resumes from the directory if it is not None. Returns the model and its history, or writes them."""
    steps = -(-EXAMPLES // BATCH)
    config = {
        "strategy": "none",
        "precision": "float32",
        "jit_compile": False,
        "steps_per_execution": 1,
        "global_batch_size": BATCH,
        "checkpoint_dir": directory,
        "checkpoint_every": 3,
        **settings,
    }
    decided = plan(TrainingConfig(**config))
    model = build(decided, decay_steps=steps * (decay_epochs or epochs), width=width, optimizer=optimizer)
    schedule = []
    if pruning:
        by_gradients = {"criterion": "movement", "regrowth": 0.3, "gradient_batches": 2}
        given = by_gradients if pruning == "by gradients" else {}
        pruned = PruningConfig(target_sparsity=0.75, frequency=4, end_step=steps * epochs * 2 // 3, **given)
        schedule = [PruningSchedule(model, pruned, data=decided.pipeline(examples(), training=False))]
    data = examples()
    batches = decided.pipeline(data)
    history = model.fit(
        batches if size_known else batches.filter(lambda *_: True),
        validation_data=decided.pipeline(data, training=False) if validation else None,
        epochs=epochs,
        callbacks=[*schedule, *callbacks],
        verbose=0,
    ).history
    if result is not None:
        state = [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]
        np.savez(result, *state, history=json.dumps(history))
    return model, history


class _Tell(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        _answer("begun")

    def on_train_batch_end(self, batch, logs=None):
        _answer("trained")


def _answer(value):
    os.write(1, f"{json.dumps(value)}\n".encode())  # at once and whole, whatever happens next


def _life(request):
    code = 1
    try:
        warnings.simplefilter("error", TfoptWarning)
        train(**request, callbacks=[_Tell()])
        code = 0
    finally:  # a fork must never get to where requests are read
        if code:
            traceback.print_exc()
        os._exit(code)


def main():
    if len(sys.argv) > 1:
        train(**json.loads(sys.argv[1]), callbacks=[_Tell()])
        return
    fork = None
    for line in sys.stdin:
        if fork:
            os.waitpid(fork, 0)  # only now, since the tests may still send it signals
        fork = os.fork()
        if not fork:
            _life(json.loads(line))
        _answer(fork)
        end = os.waitid(os.P_PID, fork, os.WEXITED | os.WNOWAIT)
        _answer(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)


if __name__ == "__main__":
    main()
