"""TimeDistributed calls its layer once where that computes what Keras does, and as Keras does anywhere else."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfopt
from tfopt.compat import time_distributed
from tfopt.compat.time_distributed import folded_time
from tfopt.graph import freeze
from tfopt.training.plan import plan

GENERATOR = np.random.default_rng(0)
BATCH, STEPS = 4, 3


def cnn(*more):
    parts = layers.Conv2D(4, 3), *more, layers.ReLU(), layers.GlobalAveragePooling2D()
    return keras.Sequential([keras.Input((6, 6, 2)), *parts])


def residual(combine):
    inputs = keras.Input((6, 6, 2))
    return keras.Model(inputs, layers.Flatten()(combine(inputs, layers.Conv2D(2, 3, padding="same")(inputs))))


def frozen(layer):
    layer.trainable = False
    return layer


def traced(layer, x, *, training=False, open_axes=(), mask=None):
    """The results and the gradients of a compiled call, and how many convolutions and products it has."""

    @tf.function(autograph=False)
    def call(x, mask=None):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=training, mask=mask)
            loss = tf.reduce_sum(tf.square(y))
        return y, tape.gradient(loss, [x, *(variable.value for variable in layer.trainable_variables)])

    given = [x] if mask is None else [x, mask]
    specs = [tf.TensorSpec([None if axis in open_axes else size for axis, size in enumerate(x.shape)])]
    function = call.get_concrete_function(*specs, *([] if mask is None else [tf.TensorSpec(mask.shape, bool)]))
    computing = ("Conv2D", "MatMul", "BatchMatMulV2", "Einsum", "While", "StatelessWhile")
    count = sum(operation.type in computing for operation in function.graph.get_operations())
    return tf.nest.flatten(function(*map(tf.constant, given))), count


def compared(wrapped, shape, **options):
    """Returns whether time was folded. Results and gradients must be Keras' either way."""
    keras.utils.set_random_seed(0)
    layer = layers.TimeDistributed(wrapped)
    x = GENERATOR.normal(size=(BATCH, STEPS, *shape)).astype("float32")
    layer(x)
    before = [np.asarray(variable) for variable in layer.non_trainable_variables]
    expected, of_keras = traced(layer, x, **options)
    for variable, value in zip(layer.non_trainable_variables, before, strict=True):
        variable.assign(value)
    with folded_time():
        results, count = traced(layer, x, **options)
    for result, by_keras in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, by_keras, atol=1e-5 * max(1, np.abs(by_keras).max()))
        assert result.shape == by_keras.shape
    assert count == of_keras or count * STEPS <= of_keras
    return count < of_keras


IMAGE, VECTOR, SEQUENCE = (6, 6, 2), (5,), (2, 5)
FOLDED = {
    "dense": (lambda: layers.Dense(3, activation="relu"), VECTOR, {}),
    "training": (lambda: cnn(), IMAGE, {"training": True}),
    "batch norm": (lambda: cnn(layers.BatchNormalization(), layers.Dropout(0.5)), IMAGE, {}),
    "frozen batch norm in training": (lambda: cnn(frozen(layers.BatchNormalization())), IMAGE, {"training": True}),
    "open batch": (lambda: cnn(), IMAGE, {"open_axes": (0,)}),
    "open image": (lambda: layers.Conv2D(3, 2), IMAGE, {"open_axes": (0, 2, 3)}),
    "residual": (lambda: residual(lambda x, y: layers.Add()([x, y])), IMAGE, {}),
    "operators": (lambda: residual(lambda x, y: x + 2 * y), IMAGE, {}),
    "loop in training": (lambda: layers.SimpleRNN(3), SEQUENCE, {"training": True}),
    "einsum": (lambda: layers.EinsumDense("abc,cd->abd", (2, 2)), SEQUENCE, {}),
    "inside another": (lambda: layers.TimeDistributed(layers.Dense(2)), SEQUENCE, {}),
}


ALIKE = ("training", "open batch", "residual")  # as "frozen batch norm in training", "open image", "operators"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in ALIKE else case for case in FOLDED]
)
def test_one_call_computes_and_learns_what_keras_does(case):
    make, shape, options = FOLDED[case]
    assert compared(make(), shape, **options)


class Mine(layers.Dense):
    """A layer of one's own that looks at the whole batch."""

    def call(self, inputs, training=None):
        return super().call(inputs) - tf.reduce_mean(inputs)


def centred(x):
    return x - tf.reduce_mean(x)


LEFT = {
    "own layer": (lambda: Mine(3), VECTOR, {}),
    "own function": (lambda: layers.Dense(3, activation=centred), VECTOR, {}),
    "lambda": (lambda: keras.Sequential([layers.Dense(3), layers.Lambda(centred)]), VECTOR, {}),
    "operation": (lambda: residual(lambda x, y: x - keras.ops.mean(y, axis=0, keepdims=True)), IMAGE, {}),
    "an array for the batch": (lambda: residual(lambda x, y: x + y * np.ones((BATCH, 6, 6, 2), "float32")), IMAGE, {}),
    "along the batch": (lambda: keras.Sequential([layers.Dense(3), layers.Softmax(axis=0)]), VECTOR, {}),
    "along the batch from the end": (lambda: keras.Sequential([layers.Dense(3), layers.Softmax(axis=-2)]), VECTOR, {}),
    "product along the batch": (lambda: layers.EinsumDense("ab,abc->ac", 2), VECTOR, {}),
    "batch norm in training": (lambda: cnn(layers.BatchNormalization()), IMAGE, {"training": True}),
    "power iteration": (lambda: layers.SpectralNormalization(layers.Dense(3)), VECTOR, {"training": True}),
    "loss of outputs": (lambda: cnn(layers.ActivityRegularization(0.1)), IMAGE, {}),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow) if case in ("along the batch", "own function") else case
        for case in LEFT
    ],
)
def test_what_looks_at_the_batch_is_left_as_keras_has_it(case):
    make, shape, options = LEFT[case]
    assert not compared(make(), shape, **options)


@pytest.mark.parametrize("wrapped", [layers.Dropout(0.5), layers.GaussianNoise(1.0)])
def test_each_step_draws_its_own_random_numbers_in_training(wrapped):
    layer = layers.TimeDistributed(wrapped)

    def draws():
        call = tf.function(lambda: layer(tf.ones((2, STEPS, 3)), training=True)).get_concrete_function()
        return sum("Random" in operation.type for operation in call.graph.get_operations())

    before = draws()
    with folded_time():
        assert draws() == before > STEPS - 1


def test_an_open_number_of_steps_is_folded():
    layer = layers.TimeDistributed(cnn())
    x = GENERATOR.normal(size=(BATCH, STEPS, 6, 6, 2)).astype("float32")
    expected, _ = traced(layer, x)
    with folded_time():
        results, count = traced(layer, x, open_axes=(0, 1))
    assert count == 1
    np.testing.assert_allclose(results[0], expected[0], atol=1e-5)


@pytest.mark.parametrize(("shape", "folds"), [((BATCH, STEPS, 2), True), ((BATCH, STEPS), False)])
def test_masks_of_each_step_reach_a_layer_that_uses_them(shape, folds):
    layer = layers.SimpleRNN(3) if folds else layers.Softmax()
    mask = GENERATOR.integers(0, 2, shape).astype(bool)
    assert compared(layer, SEQUENCE if folds else (BATCH,), mask=mask) is folds


def test_a_mask_of_steps_passes_through_a_network_that_uses_none():
    network = keras.Sequential([keras.Input((5,)), layers.Dense(3), layers.BatchNormalization()])
    assert compared(network, VECTOR, mask=GENERATOR.integers(0, 2, (BATCH, STEPS)).astype(bool))


@pytest.mark.parametrize(("room", "count"), [pytest.param(9, 1, marks=pytest.mark.slow), (8, 2), (4, 9)])
def test_large_tensors_limit_how_many_steps_are_computed_together(monkeypatch, room, count):
    monkeypatch.setattr(time_distributed, "BYTES_TOGETHER", room * 2 * 6 * 6 * 5 * 4)
    monkeypatch.setattr(time_distributed, "FEWEST_STEPS", 5)
    layer = layers.TimeDistributed(residual(lambda x, y: layers.Conv2D(5, 1)(x + y)))
    x = GENERATOR.normal(size=(2, 9, 6, 6, 2)).astype("float32")
    expected = layer(x)
    with folded_time():
        results, found = traced(layer, x)
    np.testing.assert_allclose(results[0], expected, atol=1e-5)
    assert found == 2 * count


def video(*more):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((STEPS, 6, 6, 2))
    return keras.Model(inputs, layers.Dense(2)(layers.GRU(3)(layers.TimeDistributed(cnn(*more))(inputs))))


def test_an_artifact_has_one_network_for_all_steps():
    model = video(layers.BatchNormalization())
    graph = freeze(model)
    assert [node.op for node in graph.graph_def.node].count("Conv2D") == 1
    x = GENERATOR.normal(size=(BATCH, STEPS, 6, 6, 2)).astype("float32")
    np.testing.assert_allclose(graph.predict(x)["output_0"], model(x), atol=1e-5)


def test_a_network_trains_as_with_keras_and_the_layer_is_as_before():
    x, y = GENERATOR.normal(size=(8, STEPS, 6, 6, 2)).astype("float32"), GENERATOR.normal(size=(8, 2))
    model, own = video(), video()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    config = tfopt.TrainingConfig(precision="float32", jit_compile=False)
    tfopt.compile(own, plan(config), optimizer=keras.optimizers.SGD(0.05), loss="mse")
    before = vars(layers.TimeDistributed)["call"]
    losses = [each.fit(x, y, batch_size=4, shuffle=False, verbose=0).history["loss"] for each in (model, own)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    with pytest.raises(ZeroDivisionError), folded_time(), folded_time():
        raise ZeroDivisionError
    assert vars(layers.TimeDistributed)["call"] is before
