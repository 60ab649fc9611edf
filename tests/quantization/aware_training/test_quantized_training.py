"""Quantization-aware training: what is made of a model, what trains, what is exported without calibration data."""

import json
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfopt
from tfopt.errors import ConfigError, TfoptWarning, UnsupportedModelError
from tfopt.exporting import ExportConfig
from tfopt.graph import GraphEditor
from tfopt.pruning import PruningConfig, prune
from tfopt.pruning.weights import find_weights
from tfopt.quantization import QuantizationConfig, quantization_report, quantize
from tfopt.quantization.aware_training.fake_quant import FakeQuantize
from tfopt.quantization.aware_training.layers import QUANTIZED

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 10, 10, 3)).astype("float32")
Y = (X.mean((1, 2, 3)) > 0).astype("int32")
TRAINING = QuantizationConfig(training=True)
PLAIN = QuantizationConfig(equalization=False, smooth_quant=0.0, bias_correction=False)
INT8 = ExportConfig(precision="int8", int8_nodes="all")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def norm(x, *, relu=None):
    """A batch norm whose scales have both signs, one of them zero."""
    layer = layers.BatchNormalization()
    x = layer(x)
    channels = x.shape[-1]
    layer.gamma.assign(np.where(np.arange(channels) == 1, 0, RNG.normal(size=channels)))
    layer.beta.assign(RNG.normal(size=channels))
    layer.moving_mean.assign(RNG.normal(size=channels))
    layer.moving_variance.assign(RNG.uniform(0.5, 2.0, channels))
    return layers.ReLU(name=relu)(x) if relu else x


def residual():
    inputs = keras.Input((10, 10, 3), name="image")
    x = shortcut = norm(layers.Conv2D(6, 3, padding="same", use_bias=False, name="stem")(inputs), relu="first")
    x = norm(layers.Conv2D(6, 1, use_bias=False, name="inner")(x), relu="middle")
    x = norm(layers.Conv2D(6, 3, padding="same", use_bias=False, name="main")(x))
    x = layers.ReLU(name="sum")(layers.Add()([shortcut, x]))
    x = norm(layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="depthwise")(x), relu="second")
    x = layers.MaxPooling2D()(x)
    x = layers.Flatten()(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def small():
    inputs = keras.Input((10, 10, 3), name="image")
    x = norm(layers.Conv2D(6, 3, use_bias=False, name="stem")(inputs), relu="first")
    x = norm(layers.DepthwiseConv2D(3, use_bias=False, name="depthwise")(x), relu="second")
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Flatten()(layers.MaxPooling2D()(x))))


def branches():
    """Ranges inside layers, behind concatenations and nested models, and weights that no kernel takes."""
    inputs = keras.Input((10, 10, 3), name="image")
    part = keras.Sequential(
        [keras.Input((10, 10, 4)), layers.Conv2D(4, 1, activation="relu", name="stem")], name="part"
    )
    x = layers.SeparableConv2D(4, 3, padding="same", activation="swish", name="stem")(inputs)
    x = layers.Concatenate(name="both")([part(x), part(x)])
    x = layers.Conv2D(4, 3, name="joined")(x)
    x = layers.Conv2DTranspose(2, 3, name="wider")(x)
    x = layers.Conv2D(4, 1, groups=2, name="grouped")(x)
    x = layers.Reshape((100, 4))(x)
    x = layers.Conv1D(4, 3, padding="causal", activation="relu", name="along")(x)
    x = layers.EinsumDense("abc,cd->abd", (100, 4), bias_axes="d", activation="gelu", name="einsum")(x)
    x = layers.Dense(3, name="each")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Flatten()(x)))


def sequence():
    inputs = keras.Input((10, 10, 3), name="image")
    x = layers.Conv1D(8, 1, activation="relu")(layers.Reshape((100, 3))(inputs))
    summed = layers.Conv1D(8, 3, padding="causal", dilation_rate=2, activation="relu")(x)
    summed = norm(layers.Conv1D(8, 3, padding="causal", dilation_rate=2, use_bias=False)(summed))
    x = layers.MaxPooling1D(4)(layers.ReLU()(layers.Add()([summed, x])))
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.GlobalAveragePooling1D()(x)))


BUILDERS = {"residual": residual, "branches": branches, "sequence": sequence}


def ranges(model):
    return {layer.name: layer for layer in model.layers if isinstance(layer, FakeQuantize)}


def fit(model, epochs=2, **options):
    model.compile(keras.optimizers.Adam(1e-3), LOSS, jit_compile=False)
    return model.fit(X, Y, batch_size=20, epochs=epochs, verbose=0, **options)


def served(directory, x=X):
    serve = tf.saved_model.load(str(directory)).signatures["serving_default"]
    return next(iter(serve(image=tf.constant(x)).values())).numpy()


@pytest.fixture(scope="module")
def trained():
    """Each model, quantized each way and trained."""
    made = {}

    def make(name, **settings):
        key = (name, *settings.items())
        if key not in made:
            keras.utils.set_random_seed(0)
            model = quantize(BUILDERS[name](), QuantizationConfig(training=True, **settings), calibration_data=X)
            fit(model)
            made[key] = model
        return made[key]

    return make


WAYS = [{}, {"learned_ranges": True}, {"weight_bits": 4, "learned_ranges": True}]


@pytest.mark.slow
def test_before_training_it_computes_what_post_training_quantization_computes():
    model = residual()
    after, before = (quantize(model, config, calibration_data=X) for config in (PLAIN, TRAINING))
    expected, found = after.predict(X), np.asarray(before(X))
    span = np.abs(expected).max()
    # A value on the edge between two steps may fall to either side, in a graph that is folded and in one that is not.
    assert np.median(np.abs(found - expected)) < 1e-5 * span
    assert np.abs(found - expected).max() < 0.02 * span


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("residual", WAYS[0], marks=pytest.mark.slow),
        pytest.param("residual", WAYS[2], marks=pytest.mark.slow),
        pytest.param("branches", WAYS[1], marks=pytest.mark.slow),
        pytest.param("sequence", WAYS[0], marks=pytest.mark.slow),
    ],
    ids=["residual", "residual, int4", "branches, learned", "sequence"],
)
def test_the_folded_annotated_graph_and_the_artifact_compute_what_was_trained(trained, tmp_path, name, settings):
    model = trained(name, **settings)
    expected = np.asarray(model(X))
    span = np.abs(expected).max()
    annotated = quantize(model)
    assert np.median(np.abs(annotated.predict(X) - expected)) < 1e-5 * span
    assert np.abs(annotated.predict(X) - expected).max() < 0.02 * span
    artifact = tfopt.export(model, tmp_path / "int8", INT8)  # no calibration data
    assert artifact.precision == "int8"
    assert [change.name for change in artifact.report.changed] == [change.name for change in annotated.report.changed]
    assert np.abs(served(tmp_path / "int8") - expected).max() < 0.02 * span


def conv1d(x, size=3, **options):
    return layers.Conv1D(4, size, **options)(x)


@pytest.mark.parametrize(
    ("build", "nodes"),
    [
        pytest.param(lambda x: conv1d(conv1d(x, use_bias=False), 1), 2, marks=pytest.mark.slow),
        pytest.param(lambda x: layers.SeparableConv1D(4, 3)(x), 2, marks=pytest.mark.slow),
        pytest.param(lambda x: conv1d(layers.MaxPooling1D(2)(conv1d(x, use_bias=False)), 1), 2, marks=pytest.mark.slow),
        pytest.param(
            lambda x: conv1d(layers.ReLU()(layers.Add()([norm(conv1d(x)), norm(conv1d(x))])), 1),
            3,
            marks=pytest.mark.slow,
        ),
        (lambda x: conv1d(conv1d(x, dilation_rate=2, use_bias=False), 1), 2),
        pytest.param(
            lambda x: layers.Conv2D(4, 3, dilation_rate=2, use_bias=False)(layers.Reshape((6, 6, 3))(x)),
            1,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no bias", "separable", "pooled", "branches", "dilated", "dilated image"],
)
def test_what_is_trained_in_int8_is_exported_in_int8(build, nodes):
    """Also where folding takes away the very tensor that a layer returns."""
    inputs = keras.Input((36, 3))
    x = RNG.normal(size=(16, 36, 3)).astype("float32")
    trained = quantize(keras.Model(inputs, build(inputs)), TRAINING, calibration_data=x)
    annotated = quantize(trained)
    assert annotated.report.skipped == []
    assert len(annotated.report.changed) == nodes
    expected = np.asarray(trained(x))
    np.testing.assert_allclose(annotated.predict(x), expected, rtol=0, atol=0.02 * np.abs(expected).max())


def test_one_convolution_exports_to_the_very_steps_that_were_trained(tmp_path):
    """Without anything behind it that could amplify it, an edge shows as what it is: at most one step of one value."""
    inputs = keras.Input((10, 10, 3), name="image")
    x = norm(layers.Conv2D(6, 3, use_bias=False)(inputs), relu="relu")
    model = quantize(keras.Model(inputs, x), TRAINING, calibration_data=X)
    fit_to(model, np.abs(RNG.normal(size=(40, 8, 8, 6))))
    expected, annotated = np.asarray(model(X)), quantize(model)
    step = float(list(ranges(model).values())[-1].limit.numpy()) / 255
    steps = np.rint(expected / step)
    np.testing.assert_allclose(expected, steps * step, atol=1e-5)
    tfopt.export(model, tmp_path / "int8", INT8)
    for found in (annotated.predict(X), served(tmp_path / "int8")):
        differing = np.abs(np.rint(found / step) - steps)
        assert differing.max() <= 1
        assert differing.mean() < 1e-3


def fit_to(model, targets):
    model.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=False)
    model.fit(X, targets, epochs=1, verbose=0)


def test_layers_become_quantized_ones_and_ranges_lie_where_the_kernels_need_them():
    model = quantize(residual(), replace(TRAINING, observer="minmax"), calibration_data=X)
    assert [type(model.get_layer(name)).__name__ for name in ("stem", "depthwise", "head")] == [
        "QuantizedConv2D",
        "QuantizedDepthwiseConv2D",
        "QuantizedDense",
    ]
    found = ranges(model)
    # The input; behind each Relu; nothing between the last convolution and the sum that its kernel fuses.
    assert list(found) == ["image_range", "first_range", "middle_range", "sum_range", "second_range"]
    assert [layer.signed for layer in found.values()] == [True, False, False, False, False]
    assert float(found["image_range"].limit.numpy()) == pytest.approx(np.abs(X).max())
    assert not any(layer.trainable_weights for layer in found.values())
    given = small()
    learned = quantize(given, replace(TRAINING, learned_ranges=True), calibration_data=X)
    assert len(learned.trainable_weights) == len(given.trainable_weights) + len(ranges(learned)) + 3


@pytest.mark.slow
def test_the_model_given_stays_as_it_was():
    model = small()
    weights, before = model.get_weights(), np.asarray(model(X))
    config = model.get_config()
    fit(quantize(model, TRAINING, calibration_data=X), epochs=1)
    assert model.get_config() == config
    assert len(model.get_layer("stem")._inbound_nodes) == 1
    for one, other in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(np.asarray(model(X)), before)


def test_the_report_names_each_layer_and_why_it_was_left():
    report = quantization_report(quantize(branches(), TRAINING, calibration_data=X))
    details = {change.name: change.detail for change in report.changed}
    assert set(details) == {
        *("stem_depthwise", "stem", "stem_1", "joined", "wider", "along", "einsum", "each", "head"),
    }
    assert details["stem"] == "int8 weights (1, 1, 3, 4) per channel"
    assert "stays float" in details["wider"]
    assert [(skip.name, skip.kind) for skip in report.skipped] == [("grouped", "Conv2D")]
    assert report.skipped[0].reason == "more than one filter for each input channel"


def test_a_layer_that_holds_others_is_left_alone_with_the_reason():
    inputs = keras.Input((6, 8), name="tokens")
    x = layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(4, name="head")(x))
    tokens = RNG.normal(size=(8, 6, 8)).astype("float32")
    quantized = quantize(model, TRAINING, calibration_data=tokens)
    report = quantization_report(quantized)
    assert [change.name for change in report.changed] == ["head"]
    assert [skip.name for skip in report.skipped] == ["attention"]
    assert "MultiHeadAttention" in report.skipped[0].reason
    annotated = quantize(quantized)
    assert len(annotated.report.changed) == 1
    np.testing.assert_allclose(annotated.predict(tokens), np.asarray(quantized(tokens)), atol=1e-2)


def test_an_embedding_trains_on_rounded_vectors():
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), layers.Embedding(9, 6), layers.Flatten(), layers.Dense(2)]
    )
    tokens = RNG.integers(0, 9, (30, 4))
    quantized = quantize(model, TRAINING, calibration_data=tokens)
    before = quantized.get_weights()[0]
    quantized.compile("adam", LOSS)
    quantized.fit(tokens, RNG.integers(0, 2, 30), verbose=0)
    assert np.abs(quantized.get_weights()[0] - before).max() > 0
    assert len(quantize(quantized).report.changed) == 1


@pytest.mark.slow
def test_strings_are_looked_up_before_the_layers_that_train(tmp_path):
    words = np.array([["a b"], ["b c"], ["c a a"]] * 8)
    inputs = {
        "text": keras.Input((1,), dtype="string", name="text"),
        "town": keras.Input((1,), dtype="string", name="town"),
    }
    lookup = layers.TextVectorization(output_mode="multi_hot", vocabulary=["a", "b", "c"])(inputs["text"])
    towns = layers.StringLookup(vocabulary=["a b"], output_mode="one_hot")(inputs["town"])
    x = layers.Dense(8, activation="relu", name="hidden")(layers.Concatenate()([layers.Flatten()(lookup), towns]))
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    data = {"text": words, "town": words}
    quantized = quantize(model, TRAINING, calibration_data=data)
    assert [change.name for change in quantization_report(quantized).changed] == ["head"]
    tensors = {name: tf.constant(value) for name, value in data.items()}
    np.testing.assert_allclose(quantized(tensors), model(tensors), atol=0.05)
    quantized.compile(keras.optimizers.SGD(0.1), LOSS)
    quantized.fit(tf.data.Dataset.from_tensor_slices((tensors, np.arange(24) % 2)).batch(8), shuffle=False, verbose=0)
    artifact = tfopt.export(quantized, tmp_path / "artifact", INT8)
    loaded = tf.saved_model.load(str(artifact.path)).signatures["serving_default"]
    np.testing.assert_allclose(loaded(**tensors)["output_0"], quantized(tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("learned", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ranges_far_below_one_keep_their_values(learned):
    """A layer of small weights before one of large weights: the values between them are of about 1e-9."""
    model = keras.Sequential([keras.Input((8,)), layers.Dense(32, activation="relu"), layers.Dense(2)])
    first, last = model.layers
    first.kernel.assign(first.kernel * 1e-9)
    last.kernel.assign(last.kernel * 1e9)
    x = RNG.normal(size=(64, 8)).astype("float32")
    quantized = quantize(model, replace(TRAINING, learned_ranges=learned), calibration_data=x)
    expected = np.asarray(model(x))
    np.testing.assert_allclose(np.asarray(quantized(x)), expected, atol=0.05 * np.abs(expected).max())


def test_a_nested_part_that_is_not_trained_stays_so():
    base = keras.Sequential([keras.Input((10, 10, 3)), layers.Conv2D(4, 3, name="conv"), layers.BatchNormalization()])
    base.trainable = False
    inputs = keras.Input((10, 10, 3), name="image")
    x = layers.Flatten()(base(inputs))
    model = quantize(keras.Model(inputs, layers.Dense(2, name="head")(x)), TRAINING, calibration_data=X)
    assert [layer.name for layer in model.layers if layer.trainable_weights] == ["head"]
    fit(model, epochs=1)
    for one, other in zip(model.get_layer("conv").get_weights(), base.get_layer("conv").get_weights(), strict=False):
        np.testing.assert_array_equal(one, other)
    statistics = next(layer for layer in model.layers if isinstance(layer, layers.BatchNormalization))
    np.testing.assert_array_equal(statistics.moving_mean, np.zeros(4))


def test_shared_layers_stay_shared_and_have_a_range_for_each_call():
    inputs = keras.Input((10, 10, 3), name="image")
    conv = layers.Conv2D(3, 3, padding="same", activation="relu", name="conv")
    model = keras.Model(inputs, layers.Dense(2, name="head")(layers.Flatten()(conv(conv(inputs)))))
    quantized = quantize(model, TRAINING, calibration_data=X)
    assert list(ranges(quantized)) == ["image_range", "conv_range", "conv_call1_range"]
    assert len(quantized.trainable_weights) == len(model.trainable_weights)
    np.testing.assert_allclose(
        quantize(quantized).predict(X), quantize(model, PLAIN, calibration_data=X).predict(X), atol=1e-2
    )


def test_the_ranges_of_a_nested_model_that_is_called_twice_are_those_of_its_calls():
    """Keras walks a nested model in another order than the flat one that is made of it."""
    inner_input = keras.Input((10, 10, 3))
    features = layers.Conv2D(4, 3, activation="relu")(layers.Conv2D(4, 3, activation="relu")(inner_input))
    inner = keras.Model(inner_input, layers.GlobalAveragePooling2D()(features))
    small, large = keras.Input((10, 10, 3), name="small"), keras.Input((10, 10, 3), name="large")
    model = keras.Model([small, large], layers.Concatenate()([inner(small), inner(large)]))
    data = (X, 50 * X)
    exact = np.asarray(model(list(data)))
    for trained in (False, True):
        quantized = quantize(model, TRAINING, calibration_data=data)
        outputs = quantize(quantized).predict(data) if trained else np.asarray(quantized(list(data)))
        for half in (slice(4), slice(4, 8)):
            assert np.linalg.norm((outputs - exact)[:, half]) <= 0.02 * np.linalg.norm(exact[:, half])


def test_a_nested_model_that_is_called_with_a_dict_gets_its_inputs_by_name():
    """They are in no alphabetical order, and the weights of one do not suit the other."""
    right, left = keras.Input((12,), name="right"), keras.Input((12,), name="left")
    inner = keras.Model([right, left], layers.Dense(4)(right) - 5 * layers.Dense(4)(left))
    one, other = keras.Input((12,)), keras.Input((12,))
    model = keras.Model([one, other], inner({"right": one, "left": other}))
    data = RNG.normal(size=(2, 40, 12)).astype("float32")
    exact = np.asarray(model([*data]))
    outputs = quantize(model, TRAINING, calibration_data=tuple(data)).predict([*data], verbose=0)
    assert np.linalg.norm(outputs - exact) <= 0.02 * np.linalg.norm(exact)


@pytest.mark.slow
def test_nested_models_whose_operations_have_the_same_names():
    """Keras counts operations that are no layers anew after clear_session, and a clone keeps their names."""
    inputs = keras.Input((12,))
    encoder = keras.Model(inputs, layers.Dense(12, activation="relu", name="encode")(inputs) + inputs)
    clone = keras.models.clone_model(encoder)
    one, other = keras.Input((12,)), keras.Input((12,))
    outputs = encoder(one) - 3 * keras.Model(clone.inputs[0], clone.outputs[0], name="clone")(encoder(other))
    model = keras.Model([one, other], layers.Dense(2)(outputs))
    data = RNG.normal(size=(2, 40, 12)).astype("float32")
    exact = np.asarray(model([*data]))
    quantized = quantize(model, TRAINING, calibration_data=tuple(data))
    assert len({operation.name for operation in quantized.operations}) == len(quantized.operations)
    found = np.asarray(quantized([*data]))
    assert np.linalg.norm(found - exact) <= 0.03 * np.linalg.norm(exact)
    assert np.linalg.norm(quantize(quantized).predict(tuple(data)) - found) <= 0.03 * np.linalg.norm(found)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [WAYS[0], WAYS[2]])
def test_a_saved_model_loads_in_a_fresh_process_with_tfopt_alone_bit_for_bit(trained, tmp_path, settings, fresh_python):
    model = trained("residual", **settings)
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", X)
    script = (
        "import sys, keras, numpy as np, tfopt\n"
        "model = keras.models.load_model(sys.argv[1] + '/model.keras')\n"
        "x = np.load(sys.argv[1] + '/x.npy')\n"
        "np.save(sys.argv[1] + '/y.npy', model.predict(x, verbose=0))\n"
        "model.fit(x, np.zeros(len(x)), verbose=0)\n"
    )
    fresh_python("-c", script, tmp_path, check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), model.predict(X, verbose=0))
    tfopt.export(tmp_path / "model.keras", tmp_path / "int8", INT8)
    assert json.loads((tmp_path / "int8" / "manifest.json").read_text())["precision"] == "int8"


@pytest.mark.slow
def test_pruned_weights_stay_exactly_zero_into_the_artifact(tmp_path):
    model = residual()
    prune(model, PruningConfig(target_sparsity=0.75))
    quantized = quantize(model, TRAINING, calibration_data=X)  # takes the masks along
    fit(quantized)
    zeros = {weight.path: int((weight.read() == 0).sum()) for weight in find_weights(quantized)[0]}
    assert zeros == {"stem": 122, "inner": 27, "main": 243, "head": 225}
    assert quantized.get_layer("stem").kernel.numpy().any()
    tfopt.export(quantized, tmp_path / "int8", INT8)
    receipt = tfopt.verify(tmp_path / "int8")
    assert receipt.zero_count >= sum(zeros.values())


@pytest.mark.parametrize(
    ("settings", "tops"),
    [
        ({"weight_bits": 4}, [7]),
        ({}, [63, 127]),
        pytest.param({"reduce_range": False}, [127], marks=pytest.mark.slow),
    ],
    ids=["4 bits", "8 bits, reduced but where depthwise", "8 bits"],
)
def test_weights_of_so_many_bits_use_so_many_values_of_the_kernel(settings, tops):
    model = small()
    for quantized in (
        quantize(model, replace(PLAIN, **settings), calibration_data=X),
        quantize(quantize(model, QuantizationConfig(training=True, **settings), calibration_data=X)),
    ):
        editor = GraphEditor(quantized.graph.graph_def)
        for node in [node for node in editor.nodes.values() if node.op == "FakeQuantWithMinMaxVarsPerChannel"]:
            weights, limits = editor.value(node.input[0]), editor.value(node.input[2])
            steps = weights / (limits / 127)
            assert np.abs(steps).max() == pytest.approx(tops[-1 if "depthwise" in node.name else 0], rel=1e-5)
            if tops == [7]:
                np.testing.assert_allclose(steps, np.rint(steps), atol=1e-4)
                assert len(np.unique(np.rint(steps))) <= 15


def test_layers_are_excluded_by_their_own_names_or_those_of_their_nodes():
    by_layer = QuantizationConfig(training=True, exclude=("stem",))
    by_node = QuantizationConfig(training=True, exclude=("*/stem/*",))
    for config in (by_layer, by_node):
        report = quantization_report(quantize(small(), config, calibration_data=X))
        assert [skip.name for skip in report.skipped] == ["stem"]
    with pytest.raises(ConfigError, match="matches none"):
        quantize(small(), QuantizationConfig(training=True, exclude=("stm",)), calibration_data=X)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x)


class Own(layers.Layer):
    def __init__(self, width):
        super().__init__()
        self.dense = layers.Dense(width)

    def call(self, x):
        return self.dense(x)


def test_what_cannot_be_trained_is_refused_with_the_remedy(tmp_path):
    model = Subclassed()
    model(X[:, 0, 0])
    with pytest.raises(UnsupportedModelError, match=r"functional or Sequential.*Subclassed.*keras\.Model\(inputs"):
        quantize(model, TRAINING, calibration_data=X[:, 0, 0])
    with pytest.raises(UnsupportedModelError, match="must be built"):
        quantize(keras.Sequential([layers.Dense(2)]), TRAINING, calibration_data=X)
    with pytest.raises(UnsupportedModelError, match="SavedModel cannot be trained"):
        quantize(tmp_path, TRAINING, calibration_data=X)
    small = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    with pytest.raises(ConfigError, match="calibration_data must be given"):
        quantize(small, TRAINING)
    quantized = quantize(small, TRAINING, calibration_data=np.ones((3, 4), "float32"))
    with pytest.raises(UnsupportedModelError, match="already"):
        quantize(quantized, TRAINING, calibration_data=np.ones((3, 4), "float32"))
    with pytest.raises(UnsupportedModelError, match="training=True"):
        quantization_report(small)
    own = keras.Sequential([keras.Input((4,)), Own(3), layers.Dense(2)])
    with pytest.raises(UnsupportedModelError, match=r"'own.*get_config"):
        quantize(own, TRAINING, calibration_data=np.ones((3, 4), "float32"))
    with pytest.warns(TfoptWarning, match="changed nothing"):
        quantize(
            keras.Sequential([keras.Input((4,)), layers.ReLU()]), TRAINING, calibration_data=np.ones((3, 4), "float32")
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_bits": 2}, "weight_bits must be 8 or 4"),
        ({"learned_ranges": True}, "learned_ranges is a setting of quantization-aware training"),
        ({"freeze_ranges_after": 3}, "Set training=True"),
        (
            {"training": True, "freeze_batch_norm_after": -1},
            "freeze_batch_norm_after must be a whole number of at least 0 or None",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        QuantizationConfig(**settings)


def test_an_export_does_not_train():
    with pytest.raises(ConfigError, match=r"training must be False.*tfopt\.quantize"):
        ExportConfig(precision="int8", quantization=TRAINING)


def test_every_quantized_layer_class_saves_and_loads_its_config():
    for kind in QUANTIZED.values():
        assert keras.saving.get_registered_name(kind) == f"tfopt>{kind.__name__}"
