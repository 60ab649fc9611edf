"""LiteRT files compute what the model computes, with builtin operators, and in int8 with the graph's integers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter
from keras import layers, ops

from tests.exporting.networks import attention, images, one_axis, sequences, squeeze_and_excite, upwards
from tests.exporting.networks import examples as numbers
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.exporting import ExportConfig, export
from tfopt.exporting.litert.lists import without_lists
from tfopt.exporting.verification.litert_only import WEIGHTED, operators, read
from tfopt.graph import GraphEditor
from tfopt.quantization import QuantizationConfig, quantize
from tfopt.quantization.annotation.fusion import int8_weights


def one_loop():
    inputs = keras.Input((None, 8))
    return keras.Model(inputs, layers.GRU(6, return_sequences=True)(inputs)), (7, 8)


def tokens():
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(10, 8, mask_zero=True)(inputs)
    return keras.Model(inputs, layers.GRU(5)(layers.LSTM(6, return_sequences=True)(x))), (7,)


def products():
    inputs = keras.Input((24,))
    x = layers.Dense(32, activation="relu")(inputs)
    return keras.Model(inputs, layers.Rescaling([-2.0] * 8 + [0.5] * 8)(layers.Dense(16)(x))), (24,)


def decoder():
    inputs = keras.Input((None, 8))
    x = layers.MultiHeadAttention(2, 4)(inputs, inputs, use_causal_mask=True)
    return keras.Model(inputs, x[:, None, ..., None, None, :]), (7, 8)


def slow(*makes):
    return [pytest.param(make, marks=pytest.mark.slow) for make in makes]


def examples(model, shape, count=32):
    if model.inputs[0].dtype == "int32":
        return np.random.default_rng(0).integers(0, 10, (count, *shape)).astype("int32")
    return numbers(shape, count)


def run(directory, inputs):
    return Interpreter(str(directory / "model.tflite")).get_signature_runner("serving_default")(**inputs)


def named(model, values):
    return {tensor.name: value for tensor, value in zip(model.inputs, values, strict=True)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "make", [one_loop, decoder, *slow(attention, images, sequences, tokens, one_axis, upwards, products)]
)
def test_the_file_computes_what_the_model_computes(make, tmp_path):
    keras.utils.set_random_seed(1)
    model, shape = make()
    x = examples(model, shape, 5)
    artifact = export(model, tmp_path / "a", ExportConfig(format="litert"))
    assert artifact.precision == "float32"
    longer = np.concatenate([x, x], axis=1) if shape[0] in (7, 9) else x[:2]
    for given in (x, longer):
        outputs = run(tmp_path / "a", named(model, [given]))
        expected = model(given)
        expected = expected if isinstance(expected, dict) else {"output_0": expected}
        assert outputs.keys() == expected.keys()
        for name, value in outputs.items():
            np.testing.assert_allclose(value, expected[name], atol=1e-5, rtol=1e-4)
    assert not [name for _, _, name in operators(read(str(tmp_path / "a" / "model.tflite"))) if name.startswith("Flex")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [images, *slow(sequences, tokens, attention, one_axis, upwards, products)])
def test_int8_nodes_have_the_integers_of_the_annotated_graph_and_compute_it(make, tmp_path):
    keras.utils.set_random_seed(1)
    model, shape = make()
    x = examples(model, shape)
    artifact = export(model, tmp_path / "a", ExportConfig(format="litert", precision="int8"), calibration_data=x)
    quantized = quantize(model, QuantizationConfig(), calibration_data=x)
    found = stored_integers(tmp_path / "a")
    assert len(found) == len(artifact.report.changed) == len(quantized.graph.fusions) > 0
    editor = GraphEditor(quantized.graph.graph_def)
    for fusion in quantized.graph.fusions:
        integers = int8_weights(editor, editor.nodes[fusion.op].input[1])[0]
        rows = np.moveaxis(integers, -1, 0).reshape(integers.shape[-1], -1)
        assert any(rows.shape == each.shape and (rows == each).all() for each in map(turned(rows), found))
    outputs = run(tmp_path / "a", named(model, [x]))
    reference = quantized.graph.predict(x)
    for name, value in outputs.items():
        scale = np.sqrt(np.mean(np.square(reference[name])))
        assert np.sqrt(np.mean(np.square(value - reference[name]))) <= 0.02 * scale


def test_the_gates_of_swish_and_of_squeeze_and_excite_are_in_int8(tmp_path):
    """LiteRT's kernel of a sigmoid gives steps of 1/256: of other steps, each would be rounded once more."""
    keras.utils.set_random_seed(1)
    model, shape = squeeze_and_excite()
    x = numbers(shape)
    export(model, tmp_path / "a", ExportConfig(format="litert", precision="int8"), calibration_data=x)
    found = list(operators(read(str(tmp_path / "a" / "model.tflite"))))
    types = [
        subgraph.tensors[place].type
        for subgraph, operator, name in found
        for place in (*operator.inputs, *operator.outputs)
        if name in ("LOGISTIC", "MUL")
    ]
    assert types == [schema.TensorType.INT8] * (4 * 2 + 4 * 3)
    assert [name for _, _, name in found].count("QUANTIZE") == 1  # the input
    outputs = run(tmp_path / "a", named(model, [x]))
    reference = quantize(model, QuantizationConfig(), calibration_data=x).predict(x)
    assert np.linalg.norm(outputs["output_0"] - reference) <= 0.05 * np.linalg.norm(reference)


def stored_integers(directory):
    """Returns the int8 weights of the file's products and convolutions, a row for each output channel."""
    file, found = read(str(directory / "model.tflite")), []
    for subgraph, operator, name in operators(file):
        if name in WEIGHTED and (tensor := subgraph.tensors[operator.inputs[1]]).type == schema.TensorType.INT8:
            values = np.frombuffer(file.buffers[tensor.buffer].data, np.int8).reshape(tensor.shape)
            values = np.moveaxis(values, 3, 0) if name == "DEPTHWISE_CONV_2D" else values
            assert len(tensor.quantization.scale) == len(values)
            source = subgraph.tensors[operator.inputs[0]]
            assert source.type == schema.TensorType.INT8 or name == "FULLY_CONNECTED"
            found.append(values.reshape(len(values), -1))
    return found


def turned(rows):
    """Returns a function that gives rows the signs of others: a factor that followed is in the step, its sign here."""

    def turn(each):
        same = each.shape == rows.shape
        return each * np.sign(np.sum(each.astype(int) * rows, axis=1))[:, None] if same else each

    return turn


@pytest.mark.slow
def test_steps_of_the_users_model_are_kept(tmp_path):
    """Weights on a grid of 7 bits stay on it: the converter's own grid of 8 bits would move them."""
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3, activation="relu"), layers.Conv2D(4, 3)])
    config = ExportConfig(format="litert", precision="int8", quantization=QuantizationConfig(reduce_range=True))
    export(model, tmp_path / "a", config, calibration_data=examples(model, (8, 8, 3)))
    assert max(np.abs(each.astype(int)).max() for each in stored_integers(tmp_path / "a")) == 63


def test_several_inputs_and_outputs_keep_their_names(tmp_path):
    image, words = keras.Input((4, 4, 3), name="image"), keras.Input((5,), dtype="int32", name="words")
    x = layers.Flatten()(layers.Conv2D(4, 3)(image))
    y = layers.GlobalAveragePooling1D()(layers.Embedding(10, 6)(words))
    joined = layers.Concatenate()([x, y])
    model = keras.Model([image, words], {"one": layers.Dense(3)(joined), "words": layers.Dense(2)(joined)})
    export(model, tmp_path / "a", ExportConfig(format="litert"))
    given = {"image": examples(model, (4, 4, 3), 3), "words": np.ones((3, 5), np.int32)}
    outputs = run(tmp_path / "a", given)
    expected = model([given["image"], given["words"]])
    assert outputs.keys() == expected.keys()
    for name, value in outputs.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5)


def test_nodes_that_stay_float_keep_their_float_weights(tmp_path):
    """The converter by itself quantizes what lies between two ranges, and multiplies weights by what follows."""
    inputs = keras.Input((6, 6, 3))
    x = layers.Conv2D(4, 3, activation="relu")(inputs)
    x = layers.Conv2D(4, 3, padding="same", activation="relu", name="kept")(x)
    x = layers.Conv2DTranspose(4, 3, strides=2, name="upwards")(layers.Conv2D(4, 1)(x))
    x = layers.ReLU()(layers.Rescaling([-3.0, 0.5, 1.0, 0.02])(x))
    model = keras.Model(inputs, layers.Conv2D(2, 1)(x))
    x = examples(model, (6, 6, 3))
    config = ExportConfig(format="litert", precision="int8", quantization=QuantizationConfig(exclude=("*kept*",)))
    export(model, tmp_path / "a", config, calibration_data=x)
    file, held = read(str(tmp_path / "a" / "model.tflite")), []
    for subgraph, operator, name in operators(file):
        if name in WEIGHTED and (tensor := subgraph.tensors[operator.inputs[1]]).type == schema.TensorType.FLOAT32:
            held.append(np.frombuffer(file.buffers[tensor.buffer].data, np.float32).reshape(tensor.shape))
    kept, upwards = (model.get_layer(name).kernel.numpy() for name in ("kept", "upwards"))
    np.testing.assert_array_equal(held[0], kept.transpose(3, 0, 1, 2))
    found = held[1] / upwards.transpose(2, 0, 1, 3)  # the factors, which equalization has changed
    np.testing.assert_allclose(found, np.broadcast_to(found[:, :1, :1, :1], found.shape), rtol=1e-5)
    assert len(held) == 2
    (found,) = run(tmp_path / "a", named(model, [x])).values()
    reference = quantize(model, config.quantization, calibration_data=x).predict(x)
    assert np.linalg.norm(found - reference) <= 0.02 * np.linalg.norm(reference)


@pytest.mark.slow
def test_float16_halves_the_file(tmp_path):
    model = keras.Sequential([keras.Input((64,)), layers.Dense(256, activation="relu"), layers.Dense(64)])
    x = examples(model, (64,))
    sizes = {}
    for precision in ("float32", "float16"):
        config = ExportConfig(format="litert", precision=precision)
        sizes[precision] = export(model, tmp_path / "a", config).bytes_on_disk
        outputs = run(tmp_path / "a", named(model, [x]))["output_0"]
    rounded = keras.models.clone_model(model)
    rounded.set_weights([w.astype("float16").astype("float32") if w.size >= 1024 else w for w in model.get_weights()])
    np.testing.assert_allclose(outputs, rounded(x), atol=1e-5)
    assert sizes["float16"] < 0.6 * sizes["float32"]


def test_an_op_without_a_builtin_is_refused_with_its_name_and_its_layer_and_nothing_is_written(tmp_path):
    inputs = keras.Input((3, 3))
    model = keras.Model(inputs, ops.qr(inputs)[1], name="decomposed")
    with pytest.raises(UnsupportedModelError, match=r"builtin operators. Received: .*Qr of '.*/Qr'.*saved_model"):
        export(model, tmp_path / "a", ExportConfig(format="litert"))
    assert not list(tmp_path.iterdir())


def test_a_look_up_table_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((1,), dtype="string"), layers.StringLookup(vocabulary=["a", "b"])])
    with pytest.raises(UnsupportedModelError, match="must have no look-up table"):
        export(model, tmp_path / "a", ExportConfig(format="litert"))


def test_precisions_and_settings_of_others_are_refused():
    with pytest.raises(ConfigError, match="precision must be one of float32, float16, int8 with format='litert'"):
        ExportConfig(format="litert", precision="int4_weight_only")
    with pytest.raises(ConfigError, match="compute belongs to format='saved_model'"):
        ExportConfig(format="litert", compute="bfloat16")


@pytest.mark.slow
def test_layers_of_zeros_are_stored(tmp_path):
    first, second = (layers.Dense(units, kernel_initializer="zeros", bias_initializer="ones") for units in (6, 4))
    model = keras.Sequential([keras.Input((4,)), first, second])
    config = ExportConfig(format="litert", precision="int8")
    export(model, tmp_path / "a", config, calibration_data=examples(model, (4,)))
    (found,) = run(tmp_path / "a", named(model, [examples(model, (4,))])).values()
    np.testing.assert_allclose(found, np.ones((32, 4)), atol=0.01)


@pytest.mark.slow
def test_a_model_with_trained_ranges_is_written(tmp_path):
    model, shape = one_axis()
    x = examples(model, shape)
    trained = quantize(model, QuantizationConfig(training=True), calibration_data=x)
    export(trained, tmp_path / "a", ExportConfig(format="litert", precision="int8"))
    (found,) = run(tmp_path / "a", named(trained, [x])).values()
    np.testing.assert_allclose(found, trained.predict(x, verbose=0), atol=0.05)


@pytest.mark.slow
def test_weights_in_a_branch_are_kept(tmp_path):
    inputs = keras.Input((4,))
    one, other = layers.Dense(3, name="one"), layers.Dense(3, name="other")
    one.build((None, 4))
    other.build((None, 4))
    x = layers.Dense(4, name="before")(inputs)

    class Choice(layers.Layer):
        def __init__(self):
            super().__init__()
            self.one, self.other = one, other

        def call(self, x):
            return ops.cond(ops.sum(x) > 0, lambda: self.one(x), lambda: self.other(x))

    model = keras.Model(inputs, Choice()(x))
    data = examples(model, (4,))
    for precision in ("float32", "int8"):
        export(model, tmp_path / "a", ExportConfig(format="litert", precision=precision), calibration_data=data)
        for sign in (1, -1):
            (found,) = run(tmp_path / "a", named(model, [sign * np.abs(data)])).values()
            tolerance = 1e-5 if precision == "float32" else 0.1
            np.testing.assert_allclose(found, model(sign * np.abs(data)), atol=tolerance)


def test_a_loop_with_a_list_of_unknown_shapes_is_refused(tmp_path):
    inputs = keras.Input((None, 3))

    class Sums(layers.Layer):
        def call(self, x):
            return ops.scan(lambda total, step: (total + step, total), ops.zeros_like(x[0]), x)[1]

    model = keras.Model(inputs, Sums(name="sums")(inputs))
    with pytest.raises(UnsupportedModelError, match=r"Received: '.*' \(TensorListReserve of '.*sums"):
        export(model, tmp_path / "a", ExportConfig(format="litert"))


def test_a_loop_that_keeps_the_last_output_alone_is_right(tmp_path):
    """The LSTM of another program's SavedModel: it writes each output in place of the one before."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((None, 3), name="steps"), layers.LSTM(6)])
    model.export(str(tmp_path / "saved"), verbose=False)
    export(tmp_path / "saved", tmp_path / "a", ExportConfig(format="litert"))
    for count, steps in ((1, 9), (4, 12)):
        x = examples(model, (steps, 3), count)
        (found,) = run(tmp_path / "a", {"steps": x}).values()
        np.testing.assert_allclose(found, model(x), atol=1e-5)


@pytest.mark.parametrize("grows", [False, True])
def test_a_list_of_one_element_is_that_element_unless_it_grows(grows):
    @tf.function(input_signature=[tf.TensorSpec((4, 3))])
    def loop(x):
        kept = tf.TensorArray(tf.float32, size=1, dynamic_size=grows, element_shape=(3,))
        for step in tf.range(4):
            kept = kept.write(step if grows else 0, x[step])
        return kept.stack()

    changed = without_lists(loop.get_concrete_function().graph.as_graph_def())
    inside = {node.op for function in changed.library.function for node in function.node_def}
    assert not {each for each in inside if each.startswith("TensorList")}
    assert ("ConcatV2" in inside) == grows


def several_ranges():
    """Concatenations and a maximum of results of very different ranges, which others read rounded and in float."""

    def conv(x, filters, size):
        return layers.Conv2D(filters, 1, kernel_initializer=keras.initializers.RandomNormal(stddev=size))(x)

    inputs = keras.Input((8, 8, 3))
    x = layers.ReLU()(conv(inputs, 8, 1.0))
    joined = layers.Concatenate()([x, conv(x, 4, 30.0)])
    again = layers.Concatenate()([conv(joined, 4, 0.001), joined, conv(x, 4, 0.1)])
    largest = layers.Maximum()([conv(x, 16, 0.1), conv(x, 16, 10.0)])
    normed = layers.Normalization(mean=[0.0] * 20, variance=[1.0] * 4 + [50.0] * 12 + [0.1] * 4)(again)
    outputs = {"joined": conv(layers.ReLU()(normed), 4, 1.0), "largest": layers.Rescaling(2.0)(largest)}
    return keras.Model(inputs, outputs), (8, 8, 3)


def test_what_reads_several_ranges_stays_in_float(tmp_path):
    """The converter would give all that a concatenation reads the range of the first."""
    keras.utils.set_random_seed(1)
    model, shape = several_ranges()
    x = examples(model, shape)
    quantized = quantize(model, QuantizationConfig(), calibration_data=x)
    export(quantized, tmp_path / "a", ExportConfig(format="litert"))
    outputs, reference = run(tmp_path / "a", named(model, [x])), quantized.graph.predict(x)
    for name, value in outputs.items():
        assert np.linalg.norm(value - reference[name]) <= 0.02 * np.linalg.norm(reference[name])
    kinds = [name for _, _, name in operators(read(str(tmp_path / "a" / "model.tflite")))]
    assert "CONCATENATION" in kinds
    assert "FLOOR" not in kinds
