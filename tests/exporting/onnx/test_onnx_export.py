"""ONNX files compute what the model computes, and their int8 nodes have pairs on every operand."""

from collections import Counter

import keras
import numpy as np
import onnx
import onnxruntime
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.exporting.networks import attention, examples, images, one_axis, sequences, squeeze_and_excite, upwards
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.exporting import ExportConfig, export, export_formats
from tfopt.exporting.formats import FORMATS
from tfopt.exporting.lowering import lower
from tfopt.exporting.manifest import read_manifest
from tfopt.exporting.paired import with_all_pairs
from tfopt.exporting.stored_weights import encode_weights
from tfopt.exporting.verification import written
from tfopt.exporting.verification.process import RuntimeProcess, runs
from tfopt.graph import GraphEditor, fold_constants, freeze
from tfopt.quantization import QuantizationConfig, WeightOnlyConfig, quantize

INPUTS = (("whole", (1,), "int32"), ("number", (3,), "float32"), ("image", (9, 9, 2), "float32"))
MODELS = [images, sequences, attention, one_axis, upwards]


def served(directory):
    return onnxruntime.InferenceSession(str(directory / "model.onnx"), providers=["CPUExecutionProvider"])


def executed_by(directory, scratch):
    """Returns a session, and how many ops of each type the graph has that it makes of the file."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(scratch / "executed.onnx")
    session = onnxruntime.InferenceSession(directory / "model.onnx", options, providers=["CPUExecutionProvider"])
    return session, Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)


def run(directory, inputs):
    session = served(directory)
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("make", MODELS)
def test_the_file_computes_what_the_model_computes(make, tmp_path):
    keras.utils.set_random_seed(1)
    model, shape = make()
    x = examples(shape, 5)
    artifact = export(model, tmp_path / "a", ExportConfig(format="onnx"))
    assert artifact.precision == "float32"
    outputs = run(tmp_path / "a", {model.inputs[0].name: x})
    expected = model(x)
    expected = expected if isinstance(expected, dict) else {"output_0": expected}
    assert outputs.keys() == expected.keys()
    for name, value in outputs.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, rtol=1e-4)
    onnx.checker.check_model(onnx.load(tmp_path / "a" / "model.onnx"), full_check=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("make", "tensorrt"),
    [
        (images, True),
        (attention, False),
        pytest.param(images, False, marks=pytest.mark.slow),
        *(
            pytest.param(make, trt, marks=pytest.mark.slow)
            for make in (sequences, one_axis, upwards)
            for trt in (False, True)
        ),
        pytest.param(attention, True, marks=pytest.mark.slow),
    ],
)
def test_int8_nodes_have_pairs_on_all_inputs_and_compute_the_annotated_graph(make, tensorrt, tmp_path):
    keras.utils.set_random_seed(1)
    model, shape = make()
    x = examples(shape)
    config = ExportConfig(format="onnx", precision="int8", tensorrt=tensorrt)
    artifact = export(model, tmp_path / "a", config, calibration_data=x)
    file = onnx.load(tmp_path / "a" / "model.onnx")
    held = {each.name: onnx.numpy_helper.to_array(each) for each in file.graph.initializer}
    made = {name: node for node in file.graph.node for name in node.output}
    in_int8 = [
        node
        for node in file.graph.node
        if node.op_type in ("Conv", "MatMul", "Gemm") and (pair := made.get(node.input[1])) is not None
        if pair.op_type == "DequantizeLinear" and held[pair.input[0]].dtype == np.int8
    ]
    assert len(in_int8) == len(artifact.report.changed) > 0
    for node in in_int8:
        source, weight = (made[name] for name in node.input[:2])
        assert source.op_type == weight.op_type == "DequantizeLinear"
        assert held[source.input[2]].dtype.itemsize == 1
        if len(node.input) == 3:
            biased = made.get(node.input[2])
            assert (biased is None) == tensorrt
            assert tensorrt or held[biased.input[0]].dtype == np.int32
    zeros = [held[node.input[2]] for node in file.graph.node if node.op_type == "QuantizeLinear"]
    assert all(zero.dtype == np.int8 and zero == 0 for zero in zeros) or not tensorrt
    outputs = run(tmp_path / "a", {model.inputs[0].name: x})
    quantized = quantize(model, QuantizationConfig(), calibration_data=x)
    reference = quantized.graph.predict(x)
    for name, value in outputs.items():
        scale = np.sqrt(np.mean(np.square(reference[name])))
        assert np.sqrt(np.mean(np.square(value - reference[name]))) <= (0.05 if tensorrt else 0.02) * scale


def test_a_residual_sum_and_its_operands_are_quantized():
    model, shape = images()
    quantized = quantize(model, QuantizationConfig(), calibration_data=examples(shape))
    nodes = {node.name: node for node in with_all_pairs(quantized).graph_def.node}
    (addition,) = (node for node in nodes.values() if node.op == "AddV2" and "add" in node.name)
    assert [nodes[name].op for name in addition.input] == ["FakeQuantWithMinMaxArgs"] * 2


def test_the_gates_of_swish_and_of_squeeze_and_excite_are_in_int8(tmp_path):
    """ONNX Runtime computes a sigmoid and a product in int8 where the operands and the result are rounded."""
    keras.utils.set_random_seed(1)
    model, shape = squeeze_and_excite()
    x = examples(shape)
    export(model, tmp_path / "a", ExportConfig(format="onnx", precision="int8"), calibration_data=x)
    session, executed = executed_by(tmp_path / "a", tmp_path)
    assert (executed["QLinearSigmoid"], executed["QLinearMul"]) == (4, 4)
    assert not executed.keys() & {"Sigmoid", "Mul", "QuickGelu"}
    (found,) = session.run(None, {model.inputs[0].name: x})
    reference = quantize(model, QuantizationConfig(), calibration_data=x).predict(x)
    assert np.linalg.norm(found - reference) <= 0.03 * np.linalg.norm(reference)


@pytest.mark.parametrize("size", [12, None])
def test_zeros_before_a_maximum_and_means_of_images_are_in_int8_kernels(size, tmp_path):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((size, size, 3))
    hidden = layers.Conv2D(8, 3, activation="relu")(inputs)
    hidden = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(((1, 2), (2, 0)))(hidden))
    hidden = layers.Conv2D(8, 3, activation="relu")(hidden)
    kept = layers.GlobalAveragePooling2D(keepdims=True)(hidden)
    model = keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(layers.Conv2D(8, 1)(kept))))
    x = examples((12, 12, 3))
    for precision, tolerance in (("float32", 1e-5), ("int8", 0.02)):
        config = ExportConfig(format="onnx", precision=precision)
        export(model, tmp_path / "a", config, calibration_data=x)
        session, executed = executed_by(tmp_path / "a", tmp_path)
        assert "Pad" not in executed
        assert executed["QLinearGlobalAveragePool" if precision == "int8" else "GlobalAveragePool"] == 2
        (found,) = session.run(None, {model.inputs[0].name: x})
        reference = model(x) if precision == "float32" else quantize(model, calibration_data=x).predict(x)
        assert np.linalg.norm(found - reference) <= tolerance * np.linalg.norm(reference)


@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_zeros_that_may_be_the_maximum_stay(format, tmp_path):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6, 6, 2))
    negative = layers.Conv2D(3, 1, bias_initializer=keras.initializers.Constant(-9.0))(inputs)
    of_zeros_alone = layers.MaxPooling2D(2)(layers.ZeroPadding2D(2)(ops.relu(inputs)))
    outputs = [layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(negative)), of_zeros_alone]
    model = keras.Model(inputs, outputs)
    x = examples((6, 6, 2))
    export(model, tmp_path / "a", ExportConfig(format=format), calibration_data=x)
    with runs(tmp_path / "a")(tmp_path / "a") as process:
        found = process.predict({model.inputs[0].name: x}, len(x)).values()
    for value, expected in zip(found, model(x), strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-5)


def test_the_swish_of_thousands_has_a_range_in_int8(tmp_path):
    """Its exponential is infinite there, which is no warning: tests take those for errors."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8, 8, 3))
    hidden = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3, activation="silu")(inputs))
    model = keras.Model(inputs, layers.Dense(4)(hidden))
    x = 1e4 * examples((8, 8, 3))
    export(model, tmp_path / "a", ExportConfig(format="onnx", precision="int8"), calibration_data=x)
    file = onnx.load(tmp_path / "a" / "model.onnx")
    quantized = {node.input[0] for node in file.graph.node if node.op_type == "QuantizeLinear"}
    assert all(set(node.output) <= quantized for node in file.graph.node if node.op_type in ("Sigmoid", "Mul"))
    (found,) = run(tmp_path / "a", {model.inputs[0].name: x}).values()
    reference = quantize(model, QuantizationConfig(), calibration_data=x).predict(x)
    assert np.linalg.norm(found - reference) <= 0.03 * np.linalg.norm(reference)


def test_float16_halves_the_file(tmp_path):
    model = keras.Sequential([keras.Input((64,)), layers.Dense(256, activation="relu"), layers.Dense(64)])
    x = examples((64,))
    sizes = {}
    for precision in ("float32", "float16"):
        sizes[precision] = export(model, tmp_path / "a", ExportConfig(format="onnx", precision=precision)).bytes_on_disk
        outputs = run(tmp_path / "a", {model.inputs[0].name: x})["output_0"]
    rounded = keras.models.clone_model(model)
    rounded.set_weights([w.astype("float16").astype("float32") if w.size >= 1024 else w for w in model.get_weights()])
    np.testing.assert_allclose(outputs, rounded(x), atol=1e-5)
    assert sizes["float16"] < 0.6 * sizes["float32"]


def test_stored_int8_weights_are_exactly_those_of_the_saved_model_and_nothing_else_is_rounded(tmp_path):
    """Each kind of weight has its channels on another axis; those of a transposed convolution are on all but one."""
    model = keras.Sequential(
        [
            keras.Input((6, 6, 5)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.DepthwiseConv2D(3, depth_multiplier=2),
            layers.Conv2DTranspose(7, 3, name="upwards"),
            layers.Flatten(),
            layers.Dense(16, name="kept"),
            layers.Dense(8, activation="relu"),
        ]
    )
    stored = WeightOnlyConfig(minimum_size=100, exclude=("*/kept/*",))
    config = ExportConfig(format="onnx", precision="int8_weight_only", weight_only=stored)
    artifact = export(model, tmp_path / "a", config)
    reference, report = encode_weights(freeze(model), "int8_weight_only", stored)
    assert artifact.report == report
    assert len(report.changed) == 4
    editor = GraphEditor(fold_constants(reference).graph_def)
    names = {change.name for change in report.changed}
    expected = [editor.value(name) for name in editor.nodes if any(name.startswith(f"{each}/") for each in names)]
    file = onnx.load(tmp_path / "a" / "model.onnx")
    held = {each.name: onnx.numpy_helper.to_array(each) for each in file.graph.initializer}
    integers = {node.output[0]: held[node.input[0]] for node in file.graph.node if node.op_type == "Cast"}
    decoded = [integers[n.input[0]] * held[n.input[1]] for n in file.graph.node if n.input[0] in integers]
    assert {value.dtype.name for value in integers.values()} == {"int8"}

    def values(arrays):
        return sorted(np.sort(each, axis=None).tobytes() for each in arrays)

    assert values(decoded) == values(each for each in expected if each.dtype == np.float32 and each.ndim > 1)
    assert any(np.array_equal(value, model.get_layer("kept").kernel) for value in held.values())
    x = examples((6, 6, 5))
    found = run(tmp_path / "a", {model.inputs[0].name: x})["output_0"]
    np.testing.assert_allclose(found, reference.predict(x)["output_0"], atol=1e-5)


def test_an_op_that_onnx_does_not_have_is_refused_with_its_name_and_nothing_is_written(tmp_path):
    inputs = keras.Input((3, 3))
    model = keras.Model(inputs, ops.qr(inputs)[1])
    with pytest.raises(UnsupportedModelError, match=r"Every op of a model in ONNX.*Qr"):
        export(model, tmp_path / "a", ExportConfig(format="onnx"))
    assert not list(tmp_path.iterdir())


def test_a_look_up_table_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((1,), dtype="string"), layers.StringLookup(vocabulary=["a", "b"])])
    with pytest.raises(UnsupportedModelError, match="must have no look-up table"):
        export(model, tmp_path / "a", ExportConfig(format="onnx"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "int4_weight_only"}, "precision must be one of float32, .*int8_weight_only with format='onnx'"),
        ({"precision": "int4_weight_only"}, "no integers of 4 bits; 'int8_weight_only' comes nearest"),
        ({"compute": "bfloat16"}, "compute belongs to format='saved_model'"),
        ({"precision": "int8", "float_fallback": True}, "float_fallback belongs to format='saved_model'"),
        ({"weights_in": "constants"}, "weights_in belongs to format='saved_model'"),
        ({"tensorrt": True}, "tensorrt belongs to format='onnx' and precision='int8'"),
    ],
)
def test_settings_that_only_a_saved_model_has_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ExportConfig(format="onnx", **settings)


@pytest.mark.slow
def test_weights_that_a_branch_reads_are_kept(tmp_path):
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
    data = examples((4,))
    for precision in ("float32", "int8"):
        export(model, tmp_path / "a", ExportConfig(format="onnx", precision=precision), calibration_data=data)
        for sign in (1, -1):
            (found,) = run(tmp_path / "a", {model.inputs[0].name: sign * np.abs(data)}).values()
            tolerance = 1e-5 if precision == "float32" else 0.1
            np.testing.assert_allclose(found, model(sign * np.abs(data)), atol=tolerance)


def test_layers_of_zeros_of_two_shapes_are_told_apart(tmp_path):
    first, second = (layers.Dense(units, kernel_initializer="zeros", bias_initializer="ones") for units in (6, 4))
    model = keras.Sequential([keras.Input((4,)), first, second])
    config = ExportConfig(format="onnx", precision="int8")
    export(model, tmp_path / "a", config, calibration_data=examples((4,)))
    (found,) = run(tmp_path / "a", {model.inputs[0].name: examples((4,))}).values()
    np.testing.assert_array_equal(found, np.ones((32, 4)))


def test_weights_that_are_used_in_several_places_are_stored_once(tmp_path):
    inputs, shared = keras.Input((4,)), layers.Dense(4, "relu")
    model = keras.Model(inputs, shared(shared(shared(inputs))))
    x = examples((4,))
    artifact = export(model, tmp_path / "a", ExportConfig(format="onnx", precision="int8"), calibration_data=x)
    held = [onnx.numpy_helper.to_array(each) for each in onnx.load(tmp_path / "a" / "model.onnx").graph.initializer]
    assert len(artifact.report.changed) == 3
    assert [each.dtype for each in held if each.shape == (4, 4)] == [np.int8]
    with RuntimeProcess(tmp_path / "a") as process:
        (found,) = process.predict({inputs.name: x}, len(x)).values()
        assert process.count_kernels()["QGemm"] == 3
    np.testing.assert_allclose(found, model(x), atol=0.1)


def test_an_output_with_the_name_of_an_input_is_refused(tmp_path):
    inputs = keras.Input((4,), name="image")
    model = keras.Model({"image": inputs}, {"image": layers.Dense(4)(inputs)})
    with pytest.raises(UnsupportedModelError, match=r"another name than each input. Received: \['image'\]"):
        export(model, tmp_path / "a", ExportConfig(format="onnx"))


def test_a_missing_package_is_told_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("tfopt.exporting.formats.find_spec", lambda name: None if name == "tf2onnx" else name)
    with pytest.raises(ConfigError, match=r"without tf2onnx. Install them: pip install 'tfopt\[onnx\]'"):
        export("nowhere.keras", tmp_path / "a", ExportConfig(format="onnx"))


def test_a_package_that_cannot_be_imported_is_told_before_the_work(tmp_path, monkeypatch):
    def fails(name):
        raise ImportError("libfoo.so.1: cannot open shared object file")

    monkeypatch.setattr("tfopt.exporting.formats.import_module", fails)
    with pytest.raises(ConfigError, match=r"in which onnx cannot be imported \(libfoo.so.1.*Install it again"):
        export_formats("nowhere.keras", tmp_path / "a", ["saved_model", "onnx"])
    assert not list(tmp_path.iterdir())


def test_float64_is_told_as_the_reason(tmp_path):
    model = keras.Sequential([keras.Input((8, 8, 3), dtype="float64"), layers.Conv2D(2, 3, dtype="float64")])
    with pytest.raises(UnsupportedModelError, match=r"ONNX file must run.*NOT_IMPLEMENTED.*Export a float32 model"):
        export(model, tmp_path / "a", ExportConfig(format="onnx"))
    assert not (tmp_path / "a").exists()


def test_a_model_with_trained_ranges_is_int8_alone(tmp_path):
    model, shape = one_axis()
    trained = quantize(model, QuantizationConfig(training=True), calibration_data=examples(shape))
    with pytest.raises(ConfigError, match="precision must be 'int8' for a model that was trained with fake"):
        export(trained, tmp_path / "a", ExportConfig(format="onnx"))
    export(trained, tmp_path / "a", ExportConfig(format="onnx", precision="int8"))
    (found,) = run(tmp_path / "a", {trained.inputs[0].name: examples(shape)}).values()
    np.testing.assert_allclose(found, trained.predict(examples(shape), verbose=0), atol=0.05)


def test_ops_that_a_converter_gets_wrong_are_right(tmp_path):
    """Of negative integers, of negative indices, of the sign of zero, and of sizes that no float32 factor reaches."""
    whole, number, image = (keras.Input(shape, dtype=dtype, name=name) for name, shape, dtype in INPUTS)
    outputs = {
        "rest": ops.mod(whole, 3),
        "rounded": ops.floor_divide(whole, -3),
        "rest_of_floats": ops.mod(number, 0.7),
        "one_hot": ops.one_hot(whole, 5),
        "largest": ops.argmax(number, -1),
        "resized": layers.Resizing(13, 13)(image),
        "enlarged": layers.Resizing(13, 20, interpolation="nearest")(image),
        "reduced": layers.Resizing(3, 5, interpolation="nearest")(image),
    }
    model = keras.Model([whole, number, image], outputs)
    export(model, tmp_path / "a", ExportConfig(format="onnx"))
    zeros = np.array([[0.0, -0.0, 0.0], [-0.0, 0.0, -0.0]], np.float32)
    x = {
        "whole": np.arange(-4, 5, dtype=np.int32).reshape(9, 1),
        "number": np.concatenate([zeros, examples((3,), 7)]),
        "image": examples((9, 9, 2), 9),
    }
    found = run(tmp_path / "a", x)
    for name, value in model(x).items():
        np.testing.assert_allclose(found[name], value, atol=1e-5)
    resizes = [node for node in onnx.load(tmp_path / "a" / "model.onnx").graph.node if node.op_type == "Resize"]
    assert [str(each) for each in resizes if "tf_half_pixel" in str(each)] == []  # left ONNX with version 13


@pytest.mark.parametrize("size", [(None, None), (8, 6)], ids=["open", "fixed"])
def test_repeated_pixels_are_a_resize_by_whole_factors_and_tiles_between_int8_kernels(size, tmp_path):
    """ONNX Runtime has a fast kernel for float images with the channels first; for int8 it has the channels last."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((*size, 3), name="x")
    y = layers.UpSampling2D((3, 2))(layers.Conv2D(4, 3, padding="same", activation="relu")(inputs))
    y = layers.UpSampling2D()(layers.Conv2D(4, 3, padding="same", activation="relu")(y))
    model, x = keras.Model(inputs, layers.Conv2D(2, 1)(y)), examples((8, 6, 3))
    quantized = quantize(model, QuantizationConfig(), calibration_data=x)
    for each, precision, counts, limit in ((model, "float32", (2, 0), 1e-5), (quantized, "int8", (0, 2), 0.05)):
        export(each, tmp_path / "a", ExportConfig(format="onnx", precision=precision))
        graph = onnx.load(tmp_path / "a" / "model.onnx").graph
        kinds = Counter(node.op_type for node in graph.node)
        assert (kinds["Resize"], kinds["Tile"]) == counts
        for part in (x, *([x[:3, :5, :4]] if None in size else [])):
            found, expected = run(tmp_path / "a", {"x": part})["output_0"], np.asarray(model(part))
            assert found.shape == expected.shape
            assert np.linalg.norm(found - expected) < limit * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (layers.Resizing(6, 6, interpolation="area"), "must compute what the model computes.*ONNX Runtime"),
        (layers.Resizing(6, 6, interpolation="bicubic"), "must run in its runtime"),
        (layers.Lambda(lambda x: tf.linalg.diag(x[:, 0, :, 0])), r"outputs of the model's shapes.*for \(2, 9, 9\)"),
    ],
    ids=["area", "bicubic", "diag"],
)
def test_a_file_that_computes_something_else_is_refused_and_nothing_is_written(layer, message, tmp_path):
    inputs = keras.Input((9, 9, 2))
    with pytest.raises(UnsupportedModelError, match=message):
        export(keras.Model(inputs, layer(inputs)), tmp_path / "a", ExportConfig(format="onnx"))
    assert not list(tmp_path.iterdir())


def test_a_runtime_that_refuses_open_sizes_is_told_without_the_path_of_what_is_not_written(tmp_path):
    inputs = keras.Input((None, None, 2))
    model = keras.Model(inputs, layers.Resizing(6, 6, interpolation="bicubic")(inputs))
    with pytest.raises(
        UnsupportedModelError, match=r"must run in its runtime.* Give keras\.Input whole sizes"
    ) as error:
        export(model, tmp_path / "a", ExportConfig(format="onnx"))
    assert str(tmp_path) not in str(error.value)


def test_a_file_that_is_wrong_for_other_lengths_than_those_of_the_data_is_refused(tmp_path):
    """The file of another model, which computes the same of an even length."""
    inputs = keras.Input((None, 3), name="x")
    model = keras.Model(inputs, layers.ReLU()(inputs))
    doubled = layers.Lambda(lambda x: tf.nn.relu(x) * (1 + tf.cast(tf.shape(x)[1] % 2, tf.float32)))
    other = keras.Model(inputs, doubled(inputs))
    config, x = ExportConfig(format="onnx"), examples((20, 3), 24)
    for name, each in {"model": model, "other": other}.items():
        export(each, tmp_path / name, config, calibration_data=x)
    lowered, check = lower(model, config, x, None), read_manifest(tmp_path / "model").check
    assert written.check_written(tmp_path / "model", lowered, check, FORMATS["onnx"]) == check
    with pytest.raises(UnsupportedModelError, match="must compute what the model computes"):
        written.check_written(tmp_path / "other", lowered, check, FORMATS["onnx"])


def test_the_error_in_the_manifest_is_that_of_the_runtime(tmp_path):
    model, shape = one_axis()
    x = examples(shape, 52)
    config = ExportConfig(format="onnx", precision="int8", quantization=QuantizationConfig(calibration_examples=32))
    export(model, tmp_path / "a", config, calibration_data=x)
    recorded = read_manifest(tmp_path / "a").check
    assert recorded.held_out
    (found,) = run(tmp_path / "a", {model.inputs[0].name: x[32:]}).values()
    assert recorded.errors["artifact"].max_abs == pytest.approx(np.abs(found - model(x[32:])).max(), rel=1e-4)


def test_outputs_of_one_value_or_one_row_for_all_are_exported(tmp_path):
    inputs = keras.Input((4,))
    outputs = {"mean": ops.mean(inputs), "alike": ops.matmul(inputs, ops.transpose(inputs))}
    x = examples((4,), 24)
    export(keras.Model(inputs, outputs), tmp_path / "a", ExportConfig(format="onnx"), calibration_data=x)
    found = run(tmp_path / "a", {inputs.name: x})
    np.testing.assert_allclose(found["mean"], x.mean(), rtol=1e-4)
    np.testing.assert_allclose(found["alike"], x @ x.T, atol=1e-5)


def test_a_wrong_output_is_found_beside_a_large_one():
    large, small = np.full(100, 300.0), np.linspace(0.1, 0.3, 5)
    expected = {"boxes": large, "scores": small}
    assert written._difference({"boxes": large, "scores": small * 1.0001}, expected) < 2e-4
    assert written._difference({"boxes": large, "scores": small[::-1]}, expected) > 0.1
    inf = {"y": np.array([1.0, np.inf])}
    assert written._difference({"y": np.array([1.0, np.nan])}, inf) == np.inf
    assert written._difference(inf, inf) == 0


def test_formats_from_a_generator_or_onto_their_source_are_refused(tmp_path):
    model, shape = one_axis()
    config = ExportConfig(precision="int8", int8_nodes="all")
    with pytest.raises(ConfigError, match=r"calibration_data is read for each format\. Received: an iterator"):
        export_formats(model, tmp_path / "a", ["onnx"], config, calibration_data=iter([examples(shape)]))
    export(model, tmp_path / "b" / "saved_model")
    with pytest.raises(ConfigError, match="directory must not hold the model that is exported"):
        export_formats(tmp_path / "b" / "saved_model", tmp_path / "b", ["saved_model", "onnx"])


def test_ops_that_onnx_lacks_are_exact_expressions(tmp_path):
    """Also of values near 0, which 1 + x rounds away, and of those that have no logarithm."""
    x, y = keras.Input((8,), name="x"), keras.Input((8,), name="y")
    outputs = {
        "log1p": ops.log1p(x),
        "expm1": ops.expm1(y),
        "xlogy": layers.Lambda(lambda xy: tf.math.xlogy(*xy))((x, y)),
        "xlog1py": layers.Lambda(lambda xy: tf.math.xlog1py(*xy))((x, y)),
        "xdivy": layers.Lambda(lambda xy: tf.math.xdivy(*xy))((y, x)),
        "multiply": layers.Lambda(lambda xy: tf.math.multiply_no_nan(*xy))((y, x)),
        "buckets": layers.Discretization([-1.0, 0.0, 0.5, 90.0])(y),
        "cross": ops.cross(x[:, :3], y[:, 3:6]),
        **{
            side: layers.Lambda(lambda xy, side=side: tf.searchsorted(tf.sort(xy[0]), xy[1], side))((x, y))
            for side in ("left", "right")
        },
    }
    model = keras.Model([x, y], outputs)
    values = {
        "x": np.array([[0, -0.0, 1e-12, -3e-8, 4e-4, 0.7, 5, 3e38], [0, 0, -1, -2, np.inf, -0.999, 1, 0]], np.float32),
        "y": np.array([[0, -0.0, 1e-12, -3e-8, 4e-4, -0.7, 5, 88], [-5, np.inf, -1, -2, np.inf, 80, 1, 9]], np.float32),
    }
    expected = {name: np.asarray(value) for name, value in model(values).items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        in_double = {name: value.astype(np.float64) for name, value in values.items()}
        exact = {"log1p": np.log1p(in_double["x"]), "expm1": np.expm1(in_double["y"])}
    for file_format in ("onnx", "openvino"):
        export(model, tmp_path / file_format, ExportConfig(format=file_format))
        with RuntimeProcess(tmp_path / file_format) as process:
            found = process.predict(values)
        for name, value in found.items():
            np.testing.assert_allclose(value, exact.get(name, expected[name]), rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_range_whose_values_a_loop_reads_is_kept_outside_of_it(tmp_path):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4, 8, 3)), layers.ConvLSTM1D(4, 3)])
    x = examples((4, 8, 3))
    quantized = quantize(model, QuantizationConfig(), calibration_data=x)
    artifact = export(quantized, tmp_path / "a", ExportConfig(format="onnx", precision="int8"))
    assert [change.kind for change in artifact.report.changed] == ["Conv2D"]
    (note,) = [note for note in artifact.report.notes if note.name == "int8_nodes"]
    assert "tfopt bench" in note.detail
    (found,), (expected,) = run(tmp_path / "a", {model.inputs[0].name: x}).values(), quantized.graph.predict(x).values()
    assert np.linalg.norm(found - expected) <= 0.02 * np.linalg.norm(expected)
