"""With steps_per_epoch an epoch ends after a number of steps, also if the data has no end, and can be resumed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.data import Examples
from tfopt.training import TrainingConfig, compile, plan

STEPS, EPOCHS = 4, 4


def decode(number):
    return tf.random.stateless_normal([6], [number, 0]), tf.cast(number % 2, tf.float32)


def of_unknown_number():
    return tf.data.Dataset.range(53).filter(lambda number: number != 7)


FORMS = {"unknown": of_unknown_number, "endless": tf.data.Dataset.counter, "known": lambda: tf.data.Dataset.range(53)}


class StopAfter(keras.callbacks.Callback):
    """Ends a training as a crash does."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise RuntimeError


def train(form, directory, callbacks=()):
    config = TrainingConfig(
        steps_per_epoch=STEPS,
        global_batch_size=8,
        precision="float32",
        steps_per_execution=1,
        strategy="none",
        checkpoint_dir=str(directory),
        checkpoint_every=3,
    )
    decided = plan(config)
    records = FORMS[form]()
    examples = Examples(name="stream", train=records, test=records.take(8), outputs=1, decode=decode)
    keras.utils.set_random_seed(0)
    with decided.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    compile(model, decided, optimizer="adam", loss="mse")
    batches = decided.pipeline(examples, cache="off", shuffle_buffer=16)
    model.fit(batches, epochs=EPOCHS, steps_per_epoch=STEPS, callbacks=list(callbacks), verbose=0)
    return model


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", ["unknown", "endless", pytest.param("known", marks=pytest.mark.slow)])
def test_a_stopped_training_goes_on_with_the_next_batch(form, tmp_path):
    whole = train(form, tmp_path / "whole")
    with pytest.raises(RuntimeError):
        train(form, tmp_path / "stopped", [StopAfter(10)])
    resumed = train(form, tmp_path / "stopped")
    assert int(resumed.optimizer.iterations) == STEPS * EPOCHS
    for one, other in zip(whole.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
