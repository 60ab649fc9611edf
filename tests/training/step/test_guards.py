"""A training that cannot succeed ends with an error: what happened, the likely cause and the remedy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import ConfigError, TrainingError
from tfopt.training import TrainingConfig, compile, plan

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def fit(x, y, *, learning_rate=0.01, layers=(), epochs=3, **settings):
    decided = plan(
        TrainingConfig(**{"precision": "float32", "global_batch_size": 8, "steps_per_execution": 1, **settings})
    )
    keras.utils.set_random_seed(0)
    with decided.scope():
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1, dtype="float32")])
    compile(model, decided, optimizer=keras.optimizers.SGD(learning_rate), loss="mse")
    return model.fit(decided.pipeline((x, y), training=False), epochs=epochs, verbose=0)


def test_data_that_is_not_finite_is_named_with_the_step_and_the_batch():
    x = X.copy()
    x[35] = np.nan  # in the fifth batch
    with pytest.raises(TrainingError, match=r"loss=nan in step 5\. .* batch 4 of the data holds 4 values") as caught:
        fit(x, Y)
    assert "Clean the data" in str(caught.value)
    assert "There is no checkpoint" in str(caught.value)


def test_labels_are_looked_at_as_well():
    y = Y.copy()
    y[-1] = np.inf
    with pytest.raises(TrainingError, match=r"loss=inf in step 8\. .* batch 7 of the data holds 1 value that is not"):
        fit(X, y)


def test_examples_of_different_lengths_are_told_with_the_remedy():
    spec = (tf.TensorSpec((None,), tf.float32), tf.TensorSpec((1,), tf.float32))
    examples = tf.data.Dataset.from_generator(
        lambda: ((np.ones(3 + i % 2), [1.0]) for i in range(8)), output_signature=spec
    )
    decided = plan(TrainingConfig(precision="float32", global_batch_size=8))
    with decided.scope():
        values = keras.Input((None,))
        model = keras.Model(values, keras.ops.sum(values, axis=1, keepdims=True))
    compile(model, decided, loss="mse")
    with pytest.raises(ConfigError, match=r"of the shapes \[[34]\] and \[[34]\]\. Pad them"):
        model.fit(decided.pipeline(examples), verbose=0)
    model.fit(examples.padded_batch(8), verbose=0)


def test_a_learning_rate_too_high_is_told_from_how_the_loss_grew():
    with pytest.raises(TrainingError, match=r"the loss grew from .* Lower the learning rate \(10\)"):
        fit(X, Y, learning_rate=10.0, epochs=20)


def test_several_steps_of_one_call_are_named_together():
    x = X.copy()
    x[35] = np.nan
    with pytest.raises(TrainingError, match=r"in one of the steps 5 to 8"):
        fit(x, Y, steps_per_execution=4)


def test_the_last_good_checkpoint_is_named_and_a_bad_state_is_not_saved(tmp_path):
    x = X.copy()
    x[35] = np.nan
    with pytest.raises(TrainingError, match=r"last good checkpoint is step 4 in"):
        fit(x, Y, checkpoint_dir=str(tmp_path), checkpoint_every=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002.npz", "step-00000004.npz"]
    with np.load(tmp_path / "step-00000004.npz") as saved:
        floats = [saved[name] for name in saved.files if name.startswith("model/")]
    assert floats
    assert all(np.isfinite(values).all() for values in floats)


def test_weights_that_are_not_finite_are_not_saved_though_the_loss_is(tmp_path):
    """On a CPU, a relu turns NaN into zero. So the loss is finite while the first layer's gradient is not."""
    x = X.copy()
    x[0] = np.nan
    relu = [keras.layers.Dense(8), keras.layers.Lambda(lambda value: tf.where(value > 0, value, 0.0))]
    with pytest.raises(TrainingError, match=r"Weights must be finite to be saved.*batch 0 of the data") as caught:
        fit(x, Y, layers=relu, checkpoint_dir=str(tmp_path))
    assert "the loss is finite" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_it_can_be_switched_off():
    x = X.copy()
    x[35] = np.nan
    history = fit(x, Y, stop_on_nan=False).history
    assert np.isnan(history["loss"]).all()


@keras.saving.register_keras_serializable("tfopt_tests")
class TooLarge(keras.layers.Layer):
    """Asks for a tensor of 16 TiB."""

    def call(self, x):
        return x + tf.reduce_sum(tf.random.uniform([tf.shape(x)[0] * 2**19, 2**20]))


@pytest.mark.slow
def test_out_of_memory_says_what_to_lower():
    with pytest.raises(TrainingError, match=r"accumulate") as caught:
        fit(X, Y, layers=[TooLarge()])
    assert "global_batch_size" in str(caught.value)
    assert "8" in str(caught.value)


def test_an_error_of_the_models_own_stays_what_it_is():
    with pytest.raises(ValueError, match="incompatible with the layer"):
        fit(np.zeros((64, 5), "float32"), Y, epochs=1)


ZEROS, LABELS = np.zeros((40, 4), np.float32), np.arange(40) % 4


class Parts(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise ValueError("no part 2")
        return ZEROS[:8], LABELS[:8]


def of_examples():
    for _ in range(3):  # Keras looks at the first two before it trains
        yield ZEROS[:8], LABELS[:8]
    raise KeyError("no row 7")


def in_map(x, y):
    def augment(values):
        raise RuntimeError("cannot augment")

    return tf.ensure_shape(tf.numpy_function(augment, [x], tf.float32), (None, 4)), y


BATCHES = tf.data.Dataset.from_tensor_slices((ZEROS, LABELS)).batch(8)
BYTES = tf.data.Dataset.from_tensors("no image").repeat(3).batch(1)
PYTHON = "The Python code that makes the batches raised "


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("data", "options", "error", "begins", "also"),
    [
        (BATCHES, {"class_weight": {0: 1.0, 1: 1.0, 2: 2.0}}, ConfigError, "class_weight must", "label of 3"),
        (Parts(), {}, TrainingError, PYTHON + "ValueError: no part 2", "__getitem__"),
        (of_examples(), {"steps_per_epoch": 5}, TrainingError, PYTHON + "KeyError: 'no row 7'", "of_examples"),
        (BATCHES.map(in_map), {}, TrainingError, PYTHON + "RuntimeError: cannot augment", "Correct that code"),
        (
            BATCHES.map(lambda x, y: (x, tf.gather(tf.range(2), y))), {}, TrainingError,
            "A batch could not be made: operation GatherV2 of the data set failed: indices[2]", "functions",
        ),
        (
            BYTES.map(lambda b: (ZEROS[:8] + tf.cast(tf.io.decode_png(b[0])[0, 0, 0], tf.float32), LABELS[:8])), {},
            TrainingError, "The examples could not be read: ", "Repair the file",
        ),
    ],
    ids=["class_weight", "PyDataset", "generator", "numpy_function", "gather", "decode"],
)  # fmt: skip
def test_an_error_of_the_input_says_what_failed(data, options, error, begins, also):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    # With XLA, Python takes the first batch, and the error has other words.
    decided = plan(TrainingConfig(precision="float32", jit_compile=isinstance(data, Parts), global_batch_size=8))
    compile(model, decided, optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(error) as raised:
        model.fit(data, verbose=0, **options)
    assert str(raised.value).startswith(begins)
    assert also in str(raised.value)
    assert ("Repair the file" in str(raised.value)) == (also == "Repair the file")
    assert isinstance(raised.value.__cause__, tf.errors.OpError)
