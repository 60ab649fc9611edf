"""Which callbacks need a call for each batch, and which lines train without fit."""

import keras
import pytest
import tensorflow as tf

from tfopt.scripts.obstacles import has_unknown_length, obstacle, own_loops
from tfopt.training.step.fit_callback import per_batch_callback


class OnTestBatch(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        pass


class OldName(keras.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        pass


class Inherits(keras.callbacks.ModelCheckpoint):
    pass


@pytest.mark.parametrize(
    ("callback", "needs"),
    [
        (keras.callbacks.EarlyStopping(), False),
        (keras.callbacks.CSVLogger("log.csv"), False),
        (keras.callbacks.LambdaCallback(on_epoch_end=print), False),
        (keras.callbacks.LambdaCallback(on_train_batch_end=print), True),
        (keras.callbacks.ModelCheckpoint("a.keras"), False),
        (Inherits("a.keras"), False),
        (Inherits("a.keras", save_freq=5), True),
        (keras.callbacks.BackupAndRestore("backup"), False),
        (keras.callbacks.BackupAndRestore("backup", save_freq=5), True),
        (keras.callbacks.TensorBoard("logs"), False),
        (keras.callbacks.TensorBoard("logs", write_steps_per_second=True), False),
        (keras.callbacks.TensorBoard("logs", update_freq=100), True),
        (keras.callbacks.TensorBoard("logs", profile_batch=(3, 5)), True),
        (keras.callbacks.TerminateOnNaN(), False),
        (keras.callbacks.LearningRateScheduler(abs), False),
        (keras.callbacks.ReduceLROnPlateau(), False),
        (keras.callbacks.SwapEMAWeights(), False),
        (keras.callbacks.RemoteMonitor(), False),
        (OldName(), True),
    ],
)
def test_a_callback_that_looks_at_batches_is_found(callback, needs):
    assert per_batch_callback([callback], validates=False) == (type(callback).__name__ if needs else None)
    assert per_batch_callback(keras.callbacks.CallbackList([callback], add_progbar=True), validates=True) == (
        type(callback).__name__ if needs else None
    )


def test_batches_of_the_validation_count_only_where_there_is_one():
    assert per_batch_callback(OnTestBatch(), validates=False) is None
    assert per_batch_callback(OnTestBatch(), validates=True) == "OnTestBatch"
    assert per_batch_callback(None, validates=True) is None


def test_data_whose_end_is_unknown_is_found():
    class Endless(keras.utils.PyDataset):
        num_batches = None

    data, strategy = tf.data.Dataset.range(8).batch(4), tf.distribute.OneDeviceStrategy("CPU:0")
    unknown = data.filter(lambda batch: True)
    for known in (data, data.repeat(), strategy.experimental_distribute_dataset(data), [1.0], None):
        assert not has_unknown_length(known)
    for each in (unknown, strategy.experimental_distribute_dataset(unknown), (i for i in ()), Endless()):
        assert has_unknown_length(each)


def test_what_keras_itself_cannot_run_under_a_strategy_is_left_to_it():
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        assert obstacle(model, "train.py:1") is None
        model.compile("sgd", "mse", jit_compile=True)
    assert "jit_compile=True under a strategy. Leave it out" in obstacle(model, "train.py:1").reason


def test_loops_without_fit_are_found_with_their_line_and_remedy(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(
        "import tensorflow as tf\n"
        "@tf.function\n"
        "def graph(x):\n"
        "    with tf.GradientTape() as tape:\n"
        "        pass\n"
        "def eager(x):\n"
        "    with tf.GradientTape() as tape:\n"
        "        pass\n"
        "model.train_on_batch(x, y)\n"
    )
    found = {int(skip.name.rpartition(":")[2]): skip.reason for skip in own_loops(str(script))}
    assert list(found) == [4, 7, 9]
    assert "Decorate" not in found[4]
    assert "Decorate eager with @tf.function" in found[7]
    assert "Call fit" in found[9]
    assert own_loops(str(tmp_path / "missing.py")) == []
