"""The dtype policy for different hardware, outputs in float32, and widths that do not fit tensor cores."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.errors import ConfigError, TfoptWarning, UnsupportedModelError
from tfopt.hardware import Gpu, Hardware
from tfopt.models.float32_outputs import float32_outputs, half_outputs, keep_float32
from tfopt.profiling.tensor_cores import tensor_core_alignment
from tfopt.training.choices import choose_precision

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


def machine(*capabilities, features=()):
    gpus = tuple(Gpu(name=f"GPU {number}", compute_capability=value) for number, value in enumerate(capabilities))
    return Hardware(logical_cores=2, memory_bytes=2**30, tensorflow_version="2.21.0", gpus=gpus, cpu_features=features)


@pytest.mark.parametrize(
    ("hardware", "precision", "reason"),
    [
        (machine(), "float32", "2.5 times"),
        (machine(features=("avx512_bf16",)), "float32", "0.98x to 1.14x"),
        (machine(features=("avx512_bf16", "amx_bf16")), "mixed_bfloat16", "AMX"),
        (machine((6, 1), features=("amx_bf16",)), "float32", "no tensor cores"),
        (machine((7, 5)), "mixed_float16", "7.5"),
        (machine((9, 0)), "mixed_bfloat16", "9.0"),
        (machine((9, 0), (7, 0)), "mixed_float16", "7.0"),
        (machine((9, 0), None), "float32", "unknown"),
    ],
)
def test_auto_follows_the_hardware(hardware, precision, reason):
    value, why = choose_precision("auto", hardware)
    assert value == precision
    assert reason in why


@pytest.mark.parametrize(
    ("requested", "hardware", "reason"),
    [
        ("float32", machine(), "as asked"),
        ("mixed_bfloat16", machine((8, 0)), "as asked"),
        ("mixed_float16", machine((7, 0)), "as asked"),
        ("mixed_bfloat16", machine(features=("amx_bf16",)), "as asked"),
        ("mixed_float16", machine(), "as asked; a CPU has no fast float16 and gains nothing from it"),
        ("mixed_float16", machine((6, 1)), "as asked; GPU 0 of compute capability 6.1 has no float16 tensor cores"),
        (
            "mixed_bfloat16",
            machine((8, 0), (7, 5)),
            "as asked; GPU 1 of compute capability 7.5 has no bfloat16 tensor cores",
        ),
    ],
)
def test_what_is_asked_for_is_kept_and_its_drawback_named(requested, hardware, reason):
    assert choose_precision(requested, hardware) == (requested, reason)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'mixed_float16'"):
        choose_precision("mixed_float61", machine())


def functional(policy):
    inputs = keras.Input((4,))
    hidden = layers.Dense(8, dtype=policy)(inputs)
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="out", dtype=policy)(hidden))


def sequential(policy):
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, dtype=policy), layers.Dense(3, dtype=policy, name="out"),
         layers.Activation("softmax", dtype=policy, name="soft")]
    )  # fmt: skip


def ends_in_an_operation(policy):
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.ops.softmax(layers.Dense(3, name="out", dtype=policy)(inputs)))


def reshaped(policy):
    inputs = keras.Input((4,))
    outputs = layers.Dense(6, activation="softmax", name="out", dtype=policy)(layers.Dense(8, dtype=policy)(inputs))
    return keras.Model(inputs, layers.Reshape((2, 3), name="shape", dtype=policy)(outputs))


def nested(policy):
    inputs = keras.Input((4,))
    return keras.Model(inputs, functional(policy)(layers.Dense(4, dtype=policy)(inputs)))


def wrapped(policy):
    inputs = keras.Input((4,))
    inner = layers.Dense(3, activation="softmax", name="inner", dtype=policy)
    return keras.Model(inputs, layers.TimeDistributed(inner, name="out", dtype=policy)(layers.Reshape((2, 2))(inputs)))


def two_outputs(policy):
    inputs = keras.Input((4,))
    hidden = layers.Dense(8, dtype=policy)(inputs)
    return keras.Model(
        inputs, {"out": layers.Dense(3, name="out", dtype=policy)(hidden), "float": layers.Dense(2)(hidden)}
    )


MODELS = {
    functional: ["out"],
    sequential: ["soft", "out"],
    ends_in_an_operation: ["out"],
    reshaped: ["shape", "out"],
    nested: ["out"],
    wrapped: ["out"],
    two_outputs: ["out"],
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(("build", "names"), MODELS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_outputs_are_found_and_made_float32_in_place_and_on_disk(build, names, policy, tmp_path):
    model = build(policy)
    half = policy.removeprefix("mixed_")
    assert [layer.name for layer in half_outputs(model)] == names
    assert half in [keras.backend.standardize_dtype(y.dtype) for y in keras.tree.flatten(model(X))]
    weights, variables = model.get_weights(), [id(weight) for weight in model.weights]

    report = float32_outputs(model)

    assert [change.name.split("/")[-1] for change in report.changed] == names
    assert [id(weight) for weight in model.weights] == variables
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
    outputs = [np.asarray(y) for y in keras.tree.flatten(model(X))]
    assert {y.dtype for y in outputs} == {np.dtype("float32")}
    assert {y.dtype for y in keras.tree.flatten(model.outputs)} == {"float32"}
    assert half_outputs(model) == []
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for before, after in zip(outputs, keras.tree.flatten(loaded(X)), strict=True):
        assert after.dtype == "float32"
        np.testing.assert_array_equal(before, np.asarray(after))


def test_hidden_layers_stay_half_and_probabilities_gain_digits():
    model = functional("mixed_bfloat16")
    before = np.asarray(keras.ops.cast(model(X), "float32"))
    float32_outputs(model)
    after = np.asarray(model(X))
    assert model.layers[1].compute_dtype == "bfloat16"
    np.testing.assert_allclose(before, after, atol=0.01)
    # Eight bits of mantissa leave the sum of probabilities off by more than float32 ever does.
    assert np.abs(after.sum(-1) - 1).max() < 1e-6 < np.abs(before.sum(-1) - 1).max()


@pytest.mark.slow
def test_a_model_with_float32_outputs_trains_in_mixed_float16():
    model = functional("mixed_float16")
    float32_outputs(model)
    model.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy")
    losses = model.fit(X, (X[:, 0] > 0).astype(int), epochs=20, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]


def test_a_float32_model_is_left_alone_with_a_warning():
    with pytest.warns(TfoptWarning, match="changed nothing"):
        assert float32_outputs(functional("float32")).changed == ()


def test_half_precision_weights_are_left_alone_with_the_reason():
    model = functional("float16")
    with pytest.warns(TfoptWarning, match="mixed_ policy"):
        float32_outputs(model)
    assert model.get_layer("out").compute_dtype == "float16"


def test_an_unbuilt_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="must be built"):
        float32_outputs(keras.Sequential([layers.Dense(3)]))


class Subclassed(keras.Model):
    def __init__(self, activation, tensors_only=False):
        super().__init__()
        self.hidden = layers.Dense(8, activation="relu", dtype="mixed_float16")
        self.head = layers.Dense(3, activation=activation, dtype="mixed_float16", name="head")
        self.dropped = layers.Dropout(0.5, dtype="mixed_float16", name="dropped")
        self.tensors_only = tensors_only

    def call(self, inputs, training=False):
        hidden = self.hidden(inputs)
        return self.dropped(self.head(tf.math.abs(hidden) if self.tensors_only else hidden), training=training)


@pytest.mark.parametrize("activation", ["softmax", None])
def test_the_outputs_of_a_subclassed_model_are_found_once_it_was_called(activation):
    model = Subclassed(activation)
    assert [layer.name for layer in half_outputs(model)] == (["head"] if activation else [])
    assert model(X).dtype == "float16"
    seed = np.asarray(model.dropped.seed_generator.state)
    assert [layer.name for layer in half_outputs(model)] == ["dropped", "head"]
    np.testing.assert_array_equal(model.dropped.seed_generator.state, seed)
    float32_outputs(model)
    assert model(X).dtype == "float32"
    assert model.hidden.compute_dtype == "float16"


def test_of_a_call_that_needs_tensors_the_softmax_is_known_and_nothing_else():
    for activation, found in (("softmax", ["head"]), (None, [])):
        model = Subclassed(activation, tensors_only=True)
        model(X)
        assert [layer.name for layer in half_outputs(model)] == found
        report = keep_float32(model)
        assert [change.name for change in report.changed] == found
        assert "cannot be followed to its outputs" in str(report)


def test_alignment_names_widths_with_the_cost_of_padding_them():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(20, 3, name="conv")(inputs)
    x = layers.DepthwiseConv2D(3)(x)
    x = layers.Conv2D(32, 1, name="aligned")(x)
    x = layers.Flatten()(x)
    model = keras.Model(inputs, layers.Dense(10, name="classes")(x))

    alignment = tensor_core_alignment(model)

    found = [(row.name, row.what, row.width, row.padded, row.is_output) for row in alignment.rows]
    assert found == [("conv", "filters", 20, 24, False), ("classes", "units", 10, 16, True)]
    assert alignment.layers == 3
    # A real layer of the padded width has just so many parameters more.
    wider = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(24, 3)]).count_params()
    narrow = model.get_layer("conv").count_params()
    assert alignment.rows[0].extra_parameters_percent == pytest.approx(100 * (wider / narrow - 1))
    assert "an output" in str(alignment)
    assert "conv (Conv2D): filters=20 -> 24, +20.0%" in str(alignment)
    assert [row.padded for row in tensor_core_alignment(model, 16).rows] == [32, 16]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda width: layers.Dense(width), "units"),
        (lambda width: layers.EinsumDense("abc,cd->abd", output_shape=(None, width), bias_axes="d"), "output_shape"),
        (lambda width: layers.LSTM(width), "units"),
        (lambda width: layers.GRU(width), "units"),
        (lambda width: layers.SimpleRNN(width), "units"),
        (lambda width: layers.Conv1D(width, 3), "filters"),
        (lambda width: layers.Conv1DTranspose(width, 3), "filters"),
        (lambda width: layers.SeparableConv1D(width, 3), "filters"),
        (lambda width: layers.Conv1D(2 * width, 3, groups=2), "filters per group"),
    ],
)
def test_the_cost_of_padding_is_that_of_a_layer_built_wider(make, what):
    def parameters(width):
        layer = make(width)
        layer.build((None, 6, 8))
        return layer, layer.count_params()

    layer, narrow = parameters(12)
    row = tensor_core_alignment(keras.Sequential([keras.Input((6, 8)), layer, layers.Flatten()])).rows[0]
    assert (row.what, row.width, row.padded) == (what, 12, 16)
    assert row.extra_parameters_percent == pytest.approx(100 * (parameters(16)[1] / narrow - 1))


@pytest.mark.parametrize("attention", ["multi_head", "group_query"])
def test_attention_is_looked_at_by_its_head_dimension(attention):
    def build(width):
        inputs = keras.Input((5, 24))
        make = layers.MultiHeadAttention if attention == "multi_head" else layers.GroupQueryAttention
        layer = make(2, width, name="a") if attention == "multi_head" else make(width, 4, 2, name="a")
        return keras.Model(inputs, layers.Dense(8)(layer(inputs, inputs)))

    rows = tensor_core_alignment(build(12)).rows
    grown = 100 * (build(16).get_layer("a").count_params() / build(12).get_layer("a").count_params() - 1)
    assert [row.what for row in rows] == (["key_dim", "value_dim"] if attention == "multi_head" else ["head_dim"])
    assert sum(row.extra_parameters_percent for row in rows) == pytest.approx(grown)


def test_a_multiple_below_one_is_refused():
    with pytest.raises(ConfigError, match="multiple=0"):
        tensor_core_alignment(functional("float32"), 0)
