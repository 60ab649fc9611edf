"""Quantization as a caller sees it: ranges, forms of calibration data, errors, what is left float."""

import itertools
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.errors import ConfigError, TfoptWarning, UnsupportedModelError
from tfopt.exporting.int8.kernels import lower_to_int8
from tfopt.graph import GraphEditor
from tfopt.graph.edit import attribute
from tfopt.quantization import QuantizationConfig, quantize
from tfopt.quantization.annotation.fusion import FAKE_QUANT
from tfopt.quantization.annotation.grids import covering

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(40, 8, 8, 3)).astype("float32")
Y = np.arange(40) % 4
MIN_MAX = QuantizationConfig(observer="minmax")


def convolutional():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, name="stem"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(8, 3, activation="relu", name="body"),
            layers.Flatten(),
            layers.Dense(4, name="head"),
        ]
    )


def two_inputs(names=("image", "vector")):
    image, vector = keras.Input((8, 8, 3), name=names[0]), keras.Input((5,), name=names[1])
    x = layers.Concatenate()([layers.Flatten()(layers.Conv2D(4, 3, activation="relu")(image)), vector])
    return keras.Model([image, vector], [layers.Dense(2)(x), layers.Dense(3)(x)])


def ranges(quantized):
    """The range of each annotated tensor, in the order of the graph."""
    nodes = [node for node in quantized.graph.graph_def.node if node.op == FAKE_QUANT]
    return [(node.input[0], attribute(node, "min").f, attribute(node, "max").f) for node in nodes]


def test_the_annotated_model_stays_close():
    model = convolutional()
    quantized = quantize(model, calibration_data=X)
    expected = np.asarray(model(X))
    assert np.abs(quantized.predict(X) - expected).max() < 0.05 * np.abs(expected).max()
    np.testing.assert_allclose(quantized.float_graph.predict(X)["output_0"], expected, atol=1e-5)
    assert len(quantized.report.changed) == 3
    assert [change.kind for change in quantized.report.changed] == ["Conv2D", "Conv2D", "MatMul"]


def test_ranges_are_those_of_the_data():
    found = {name: (low, high) for name, low, high in ranges(quantize(convolutional(), MIN_MAX, calibration_data=X))}
    low, high = next(iter(found.values()))  # the input
    assert -low == high == pytest.approx(np.abs(X).max())
    assert all(low == 0 for name, (low, _) in found.items() if "elu" in name.lower())
    assert sum("elu" in name.lower() for name in found) == 2


def test_quantizing_leaves_the_model_alone():
    model = convolutional()
    before = [value.copy() for value in model.get_weights()]
    quantize(model, calibration_data=X)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_all_zero_channels_and_an_all_zero_tensor():
    model = convolutional()
    kernel = model.get_layer("stem").kernel
    kernel.assign(kernel.numpy() * (np.arange(8) % 2))
    model.get_layer("body").kernel.assign(np.zeros((3, 3, 8, 8)))
    model.get_layer("body").bias.assign(np.zeros(8))
    outputs = quantize(model, calibration_data=X).predict(X)
    assert np.isfinite(outputs).all()
    np.testing.assert_allclose(outputs, np.asarray(model(X)), atol=1e-6)


FORMS = {
    "array": lambda: X,
    "tensor": lambda: tf.constant(X),
    "float64": lambda: X.astype("float64"),
    "(x, y)": lambda: (X, Y),
    "(x, y, weights)": lambda: (X, Y, np.ones(40)),
    "list of batches": lambda: [X[:16], X[16:]],
    "list of (x, y)": lambda: [(X[:16], Y[:16]), (X[16:], Y[16:])],
    "generator": lambda: (X[start : start + 7] for start in range(0, 40, 7)),
    "dataset": lambda: tf.data.Dataset.from_tensor_slices(X).batch(16),
    "dataset of (x, y)": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(16),
    "one batch": lambda: [X],
    "endless dataset": lambda: tf.data.Dataset.from_tensor_slices(X).batch(40).repeat(),
    "dict": lambda: [{"image": X}],
}


@pytest.fixture(scope="module")
def named():
    """Returns a model whose input has a name, and the ranges from an array."""
    inputs = keras.Input((8, 8, 3), name="image")
    model = keras.Model(inputs, layers.Conv2D(4, 3, activation="relu")(inputs))
    return model, ranges(quantize(model, calibration_data=X))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_ranges(form, named):
    model, expected = named
    received = ranges(quantize(model, calibration_data=FORMS[form]()))
    assert [name for name, *_ in received] == [name for name, *_ in expected]
    np.testing.assert_allclose([r[1:] for r in received], [r[1:] for r in expected], rtol=1e-6)


V = GENERATOR.normal(size=(40, 5)).astype("float32")
SEVERAL = {
    "tuple of arrays": lambda: (X, V),
    "([a, b], y)": lambda: ([X, V], Y),
    "((a, b), (y, z))": lambda: ((X, V), {"y": Y, "z": V}),
    "(dict, y)": lambda: ({"image": X, "vector": V}, Y),
    "dict": lambda: {"vector": V, "image": X},
    "batches of (a, b)": lambda: [(X, V)],
    "batches of ((a, b), y)": lambda: [((X, V), Y)],
    "batches of ((a, b), (y, z))": lambda: [((X, V), (Y, V))],
    "dataset": lambda: tf.data.Dataset.from_tensor_slices(((X, V), (Y, V))).batch(16),
    "dataset of dicts": lambda: tf.data.Dataset.from_tensor_slices(({"image": X, "vector": V}, {"y": Y, "z": V})).batch(
        16
    ),
}


@pytest.fixture(scope="module")
def of_two_inputs():
    return two_inputs()


@pytest.fixture(scope="module")
def of_one_input():
    return convolutional()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", SEVERAL)
def test_several_inputs(form, of_two_inputs):
    """30 of the 40 examples, so that a batch is cut, with its labels, whatever structure these have."""
    config = replace(MIN_MAX, calibration_examples=30)
    quantized = quantize(of_two_inputs, config, calibration_data=SEVERAL[form]())
    found = {name: high for name, _, high in ranges(quantized)}
    assert found["image"] == pytest.approx(np.abs(X[:30]).max())
    assert set(quantized.predict({"image": X, "vector": V})) == {"output_0", "output_1"}


def test_only_so_many_examples_are_calibrated_on():
    """Some behind them are held out, for the export to compare with the float model."""
    read = []

    def batches():
        for start in range(0, 40, 4):
            read.append(start)
            yield X[start : start + 4]

    quantized = quantize(convolutional(), replace(MIN_MAX, calibration_examples=10), calibration_data=batches())
    assert read == [*range(0, 40, 4)]
    np.testing.assert_array_equal(next(iter(quantized.held_out.inputs.values())), X[10:])
    _, low, high = ranges(quantized)[0]
    span = covering(float(X[:10].min()), float(X[:10].max()))
    assert (low, high) == (pytest.approx(span.low), pytest.approx(span.limit))


def test_one_example_is_enough():
    quantized = quantize(convolutional(), calibration_data=X[:1])
    assert np.isfinite(quantized.predict(X)).all()


@pytest.mark.parametrize("training", [False, True])
def test_ids_beyond_the_table(training):
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Embedding(50, 4), layers.Flatten(), layers.Dense(2)]
    )
    ids = np.arange(60).reshape(20, 3) % 50
    quantize(model, QuantizationConfig(training=training), calibration_data=ids.astype("int32"))
    ids[7, 1] = 50
    with pytest.raises(ConfigError, match=r"calibration_data and.*indices\[7,1\] = 50 is not in \[0, 50\).*Remove"):
        quantize(model, QuantizationConfig(training=training), calibration_data=ids.astype("int32"))


def test_a_layer_without_a_kernel_on_this_processor():
    channels_first = layers.Conv2D(4, 3, data_format="channels_first")
    model = keras.Sequential([keras.Input((3, 8, 8)), channels_first, layers.Flatten(), layers.Dense(2)])
    with (
        tf.device("CPU:0"),
        pytest.raises(UnsupportedModelError, match=r"processor.*NHWC.*data_format='channels_last'"),
    ):
        quantize(model, calibration_data=np.moveaxis(X, -1, 1))


def used_up():
    data = iter([X])
    next(data)
    return data


NAN = X.copy()
NAN[11, 2, 2, 1] = np.nan


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "calibration_data must be given"),
        ([], "at least one example"),
        (X[:0], "at least one example"),
        (used_up(), "at least one example"),
        (NAN, "NaN or infinity in tensor .* among examples 8 to 15"),
        (np.full_like(X, np.inf), "NaN or infinity"),
        (X[0], r"shape of input .*, \(None, 8, 8, 3\).*Received: a batch of shape \(8, 8, 3\)"),
        (X[:, :7], r"Received: a batch of shape \(32, 7, 8, 3\)"),
        (tf.data.Dataset.from_tensor_slices(X), "Pass whole batches"),
        ({"img": X}, r"inputs \[.*\].*Received: a dict with \['img'\]"),
        ("images", "Received: str"),
        (3, "Received: int"),
        ([3.0, 4.0], "Received: a single value of dtype float64"),
        (["a", "b"], "Received: a single value"),
    ],
)
def test_data_that_will_not_do(data, message, of_one_input):
    with pytest.raises(ConfigError, match=message):
        quantize(of_one_input, calibration_data=data)


def test_examples_that_leave_no_value_are_too_small():
    inputs = keras.Input((None, None, 3))
    model = keras.Model(inputs, layers.Conv2D(2, 1)(layers.Conv2D(4, 3)(inputs)))
    with pytest.raises(ConfigError, match=r"shapes \[\(2, 2, 3\)\], with which .* Pass larger examples"):
        quantize(model, calibration_data=X[:, :2, :2])


def test_one_array_for_two_inputs():
    with pytest.raises(ConfigError, match=r"inputs \['image', 'vector'\]"):
        quantize(two_inputs(), calibration_data=X)


def test_inputs_of_different_numbers_of_examples():
    inputs = [keras.Input((3,)), keras.Input((3,))]
    model = keras.Model(inputs, keras.layers.Add()(inputs))
    with pytest.raises(ConfigError, match=r"as many examples of each input.*\[5, 8\]"):
        quantize(model, calibration_data=(np.zeros((5, 3)), np.zeros((8, 3))))


def test_a_model_that_is_not_built():
    with pytest.raises(UnsupportedModelError, match="must be built"):
        quantize(keras.Sequential([layers.Dense(2)]), calibration_data=X)


@pytest.mark.parametrize("counts", [(0, 1, 5), pytest.param((2, 3, 4), marks=pytest.mark.slow)])
def test_any_part_of_a_residual_network_can_be_kept_float_with_the_ranges_at_hand(counts):
    """Which fusions fuse a sum depends on which others are int8, and so does which tensors need a range."""
    x = inputs = keras.Input((8, 8, 3))
    r = layers.Conv2D(4, 3, padding="same", activation="relu", name="stem")(x)
    left = layers.Conv2D(4, 3, padding="same", name="left")(r)
    right = layers.Conv2D(4, 1, name="right")(r)
    x = layers.ReLU()(left + right)
    x = layers.ReLU()(layers.Conv2D(4, 3, padding="same", name="last")(x) + x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(layers.Flatten()(x)))
    quantized = quantize(model, calibration_data=X)
    names = [change.name for change in quantized.report.changed]
    assert len(names) == 5
    expected = np.asarray(model(X))
    for count in counts:
        for kept_float in itertools.combinations(names, count):
            fewer = quantized.leaving_float(dict.fromkeys(kept_float, "because"))
            assert {skip.name for skip in fewer.report.skipped if skip.reason == "because"} == set(kept_float)
            assert {change.name for change in fewer.report.changed} == set(names) - set(kept_float)
            outputs = lower_to_int8(fewer.graph).predict(X)["output_0"]
            assert np.abs(outputs - expected).max() <= (0.1 * np.abs(expected).max() if count < 5 else 1e-5)


def test_excluded_nodes_stay_float():
    model = convolutional()
    quantized = quantize(model, QuantizationConfig(exclude=("*/head/*", "*stem*")), calibration_data=X)
    assert ["body" in change.name for change in quantized.report.changed] == [True]
    assert {skip.reason for skip in quantized.report.skipped} == {"excluded by the configuration"}
    weights = GraphEditor(quantized.graph.graph_def)
    quantized_ops = [
        node.name
        for node in weights.nodes.values()
        if node.op in ("Conv2D", "MatMul") and weights.constant(node.input[1]) is None
    ]
    assert len(quantized_ops) == 1
    assert "body" in quantized_ops[0]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: keras.Sequential([keras.Input((4,)), layers.ReLU()]), "has no layer or node that it can change"),
        (lambda: keras.Sequential([keras.Input((4, 4, 2)), layers.Conv2DTranspose(3, 2)]), "no int8 kernel computes"),
    ],
)
def test_nothing_to_quantize_is_a_warning(model, reason):
    model = model()
    data = np.ones((4, *model.input_shape[1:]), "float32")
    with pytest.warns(TfoptWarning, match=f"quantize changed nothing.*{reason}"):
        quantized = quantize(model, calibration_data=data)
    np.testing.assert_allclose(quantized.predict(data), np.asarray(model(data)), atol=1e-6)


def test_weights_with_nan_are_named():
    model = convolutional()
    model.get_layer("head").kernel.assign(np.full(model.get_layer("head").kernel.shape, np.nan))
    report = quantize(model, calibration_data=X).report
    assert [skip.reason for skip in report.skipped] == ["its weights hold NaN or infinity"]
    assert len(report.changed) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"observer": "magic"}, "Unknown observer 'magic'. Expected one of: 'entropy', 'minmax'"),
        ({"calibration_examples": 0}, "at least 1.*=0"),
        (
            {"calibration_examples": 1.5},
            "calibration_examples must be a whole number of at least 1. Received: calibration_examples=1.5",
        ),
        ({"calibration_examples": True}, "whole number"),
        ({"percentile": "99"}, r"percentile must be in \[50, 100\]. Received: percentile='99'"),
        ({"equalization": "no"}, "equalization must be True or False"),
        ({"max_accuracy_drop": "x"}, "a number of at least 0 or None"),
        ({"exclude": "*"}, r"exclude must be a tuple of strings. Received: exclude='\*'"),
        ({"exclude": (5,)}, "exclude must be a tuple of strings"),
        ({"rounding": None}, "rounding must be 'nearest' or 'adaptive'"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ConfigError, match=message):
        QuantizationConfig(**settings)


def test_an_exclude_that_matches_nothing_is_refused():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="head")])
    x = np.zeros((4, 8), np.float32)
    with pytest.raises(ConfigError, match="'\\*/haed/\\*' matches none"):
        quantize(model, QuantizationConfig(exclude=("*/haed/*",)), calibration_data=x)


def test_what_stays_float_inside_a_loop_is_listed():
    model = keras.Sequential([keras.Input((5, 4)), keras.layers.LSTM(8), keras.layers.Dense(4)])
    x = np.random.default_rng(0).random((16, 5, 4), dtype=np.float32)
    quantized = quantize(model, calibration_data=x)
    report = quantized.report
    assert [change.kind for change in report.changed] == ["MatMul", "MatMul"]  # the LSTM's inputs, and the Dense
    assert any("inside a function" in skip.reason and skip.kind == "MatMul" for skip in report.skipped)
    assert len(repr(quantized)) < 3000
