"""OpenVINO artifacts compute what the model computes, with the int8 nodes and the stored weights of the ONNX model."""

import json
from collections import Counter
from functools import partial

import keras
import numpy as np
import openvino
import pytest
from keras import layers, ops
from openvino import opset13

from tests.exporting.networks import attention, examples, images, one_axis, sequences, squeeze_and_excite, upwards
from tfopt.cli import main
from tfopt.errors import ArtifactError, ConfigError, ExportError, UnsupportedModelError
from tfopt.exporting import ExportConfig, export, verify
from tfopt.exporting.manifest import read_manifest
from tfopt.exporting.verification.openvino_only import Runtime
from tfopt.exporting.verification.process import RuntimeProcess
from tfopt.exporting.verification.served import Runner
from tfopt.quantization import QuantizationConfig, quantize

MODELS = (images, sequences, attention, one_axis, upwards)


def run(directory, inputs, count=2):
    """Returns the outputs of the runtime of the verification, in calls of `count`, and the kernels."""
    with RuntimeProcess(directory) as process:
        return process.predict(inputs, count), process.count_kernels()


def fast(one):
    """Returns the models, all but one of them slow."""
    return [make if make is one else pytest.param(make, marks=pytest.mark.slow) for make in MODELS]


@pytest.mark.parametrize("make", fast(attention))
def test_the_artifact_computes_what_the_model_computes(make, tmp_path):
    keras.utils.set_random_seed(1)
    model, shape = make()
    x = examples(shape, 5)
    export(model, tmp_path / "a", ExportConfig(format="openvino"))
    outputs, _ = run(tmp_path / "a", {model.inputs[0].name: x})
    expected = model(x)
    expected = expected if isinstance(expected, dict) else {"output_0": expected}
    assert outputs.keys() == expected.keys()
    for name, value in outputs.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, rtol=1e-4)
    read = openvino.Core().read_model(tmp_path / "a" / "model.xml")
    assert [size.is_static for size in read.inputs[0].get_partial_shape()] == [
        size is not None for size in model.inputs[0].shape
    ]


@pytest.mark.parametrize("make", fast(images))
def test_each_int8_node_runs_an_int8_kernel_and_computes_the_annotated_graph(make, tmp_path):
    keras.utils.set_random_seed(1)
    model, shape = make()
    x = examples(shape)
    config = ExportConfig(format="openvino", precision="int8")
    artifact = export(model, tmp_path / "a", config, calibration_data=x)
    outputs, kernels = run(tmp_path / "a", {model.inputs[0].name: x}, 32)
    in_int8 = sum(count for name, count in kernels.items() if name.endswith("_int8"))
    assert in_int8 == len(artifact.report.changed) > 0
    reference = quantize(model, QuantizationConfig(), calibration_data=x).graph.predict(x)
    for name, value in outputs.items():
        scale = np.sqrt(np.mean(np.square(reference[name])))
        assert np.sqrt(np.mean(np.square(value - reference[name]))) <= 0.02 * scale


def padded():
    """A padding before a layer that pads, and one behind a transposed convolution, with an open length."""
    inputs = keras.Input((None, 5), name="wave")
    x = layers.Conv1DTranspose(6, 3, strides=2, padding="same")(layers.Conv1D(8, 5, padding="same")(inputs))
    x = layers.ZeroPadding1D(3)(layers.SeparableConv1D(6, 3, padding="same")(x))
    x = layers.Conv1D(4, 3, strides=2, padding="same")(x)
    return keras.Model(inputs, layers.AveragePooling1D(3, padding="same")(layers.ZeroPadding1D(1)(x)))


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_paddings_before_layers_that_pad_keep_their_places_with_open_lengths(precision, tmp_path):
    """OpenVINO joined the two, and forgot one with open sizes. In int8 it changed the zero points of other nodes."""
    keras.utils.set_random_seed(1)
    model, x = padded(), np.random.default_rng(0).normal(size=(32, 20, 5)).astype("float32")
    export(model, tmp_path / "a", ExportConfig(format="openvino", precision=precision), calibration_data=x)
    with RuntimeProcess(tmp_path / "a") as process:
        for length in (16, 17, 20):
            expected = np.asarray(model(x[:2, :length]))
            for open_sizes in (False, True):
                found = process.predict({"wave": x[:2, :length]}, open_sizes=open_sizes)["output_0"]
                assert found.shape == expected.shape
                limit = {"float32": 1e-5, "int8": 0.1}[precision]
                assert np.linalg.norm(found - expected) < limit * np.linalg.norm(expected)


def test_the_bias_of_each_channel_is_added_with_open_sizes(tmp_path):
    """OpenVINO moved it into the rounding behind, and added the bias of the first channel to all of them."""
    keras.utils.set_random_seed(1)
    y = inputs = keras.Input((None, None, 3), name="image")
    for _ in range(2):
        y = layers.Conv2D(12, 3, padding="same", activation="relu")(y)
        y = layers.Conv2DTranspose(16, 2, strides=2)(y)
    y = layers.Conv2D(12, 3, padding="same", activation="relu")(y)
    model = keras.Model(inputs, layers.Conv2D(2, 1)(y))
    for each in model.layers[1:]:
        each.bias.assign(np.random.default_rng(0).normal(size=each.bias.shape) / 2)
    x = examples((8, 10, 3))
    export(model, tmp_path / "a", ExportConfig(format="openvino", precision="int8"), calibration_data=x)
    with RuntimeProcess(tmp_path / "a") as process:
        for images in (x[:2], x[:2, :6, :7]):
            expected = np.asarray(model(images))
            for open_sizes in (False, True):
                found = process.predict({"image": images}, open_sizes=open_sizes)["output_0"]
                assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_images_from_0_to_255_run_int8_kernels(tmp_path):
    """Their step is exactly 1, and OpenVINO left the convolution that reads them in float32."""
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).integers(0, 256, (32, 16, 16, 3)).astype("float32")
    inputs = keras.Input((16, 16, 3), name="image")
    y = layers.Conv2D(8, 3, strides=2, activation="relu")(inputs)
    model = keras.Model(inputs, layers.Conv2D(4, 3)(y))
    config = ExportConfig(format="openvino", precision="int8", quantization=QuantizationConfig(observer="minmax"))
    export(model, tmp_path / "a", config, calibration_data=x)
    outputs, kernels = run(tmp_path / "a", {"image": x}, 32)
    assert kernels == {"Convolution_int8": 2}
    expected = np.asarray(model(x))
    assert np.linalg.norm(outputs["output_0"] - expected) < 0.05 * np.linalg.norm(expected)


def test_open_sizes_run_the_file_as_it_is(tmp_path):
    """The same file in both ways, which differ where OpenVINO joins a padding and a pooling."""
    x = opset13.parameter([-1, 6, -1], np.float32, name="x")
    one = np.array([0, 0, 1], np.int64)
    pooled = opset13.avg_pool(
        opset13.pad(x, one, one, "constant", np.float32(0)), [3], [0], [0], [3], True, "floor", "same_upper"
    )
    export(padded(), tmp_path / "a", ExportConfig(format="openvino"))
    openvino.save_model(openvino.Model([pooled], [x], "pooled"), tmp_path / "a" / "model.xml")
    values = np.ones((2, 6, 20), np.float32)
    with RuntimeProcess(tmp_path / "a") as process:
        (known,), (opened,) = (process.predict({"x": values}, open_sizes=way).values() for way in (False, True))
    own = openvino.Core().compile_model(tmp_path / "a" / "model.xml", "CPU")({"x": values})
    assert known.shape == (2, 6, 8)
    np.testing.assert_array_equal(opened, own[0])


def test_equal_values_are_sorted_as_in_keras(tmp_path):
    inputs = keras.Input((12, 8), name="x")
    model = keras.Model(inputs, [ops.argsort(layers.ReLU()(inputs), axis=1), ops.top_k(inputs, 3)[1]])
    export(model, tmp_path / "a", ExportConfig(format="openvino"))
    x = np.random.default_rng(0).integers(-2, 3, (5, 12, 8)).astype("float32")
    for name, value in run(tmp_path / "a", {"x": x})[0].items():
        np.testing.assert_array_equal(value, model(x)[int(name.removeprefix("output_"))])


@pytest.mark.slow
def test_strided_products_of_one_tensor_run_int8_kernels(tmp_path):
    """As in the first block of a residual stage. OpenVINO moves their stride, which left them in float32."""
    keras.utils.set_random_seed(1)
    x = examples((16, 16, 3))
    inputs = keras.Input((16, 16, 3))
    y = layers.Conv2D(32, 3, padding="same", activation="relu")(inputs)
    main = layers.Conv2D(16, 1, strides=2, activation="relu")(y)
    sides = [layers.Conv2D(32, 3, padding="same")(main), layers.Conv2D(32, 1, strides=2)(y)]
    model = keras.Model(
        inputs, layers.Conv2D(8, 1, strides=2, padding="same")(layers.Activation("relu")(layers.Add()(sides)))
    )
    config = ExportConfig(format="openvino", precision="int8")
    artifact = export(model, tmp_path / "a", config, calibration_data=x)
    outputs, kernels = run(tmp_path / "a", {model.inputs[0].name: x}, 32)
    assert sum(count for name, count in kernels.items() if name.endswith("_int8")) == len(artifact.report.changed) == 5
    expected = np.asarray(model(x))
    assert np.linalg.norm(outputs["output_0"] - expected) < 0.05 * np.linalg.norm(expected)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """A model in each precision, and its float32 SavedModel."""
    keras.utils.set_random_seed(0)
    directory = tmp_path_factory.mktemp("openvino")
    inputs = keras.Input((64,), name="features")
    x = layers.Dense(256, activation="relu")(inputs)
    model = keras.Model(inputs, layers.Dense(5, activation="softmax")(x))
    x = examples((64,))
    model.save(directory / "model.keras")
    export(model, directory / "saved_model")
    for precision in ("float32", "float16", "int8", "int8_weight_only"):
        config = ExportConfig(format="openvino", precision=precision)
        export(model, directory / precision, config, calibration_data=x, baseline=directory / "saved_model")
    return directory


@pytest.mark.slow
def test_the_receipt_is_that_of_openvino(artifacts):
    data = examples((64,)), np.random.default_rng(1).integers(0, 5, 32)
    receipt = verify(artifacts / "int8", data=data, seconds=0, batch_size=4)
    assert receipt.ok, receipt.problems
    assert receipt.runtime.startswith("OpenVINO ")
    assert receipt.kernels == {"FullyConnected_int8": 2}
    assert receipt.computes == "int8"  # all of it
    assert receipt.weight_count == 64 * 256 + 256 * 5
    assert receipt.agreement >= 0.9
    assert receipt.speedup > 0
    assert None not in (receipt.load_ms, receipt.first_call_ms, receipt.memory_peak_bytes)


def test_a_lone_call_has_one_stream_with_the_threads_and_calls_at_the_same_time_have_one_each(artifacts, tmp_path):
    np.savez(tmp_path / "inputs.npz", features=examples((64,))[:3])
    runner = Runner(Runtime(), lambda: None)
    runner.load(path=str(artifacts / "float32" / "model.xml"), threads=1)
    given = {"inputs": str(tmp_path / "inputs.npz"), "seconds": 0}
    for ask in (
        partial(runner.time, at_least=1),
        partial(runner.throughput, callers=2),
        partial(runner.time, at_least=1),
    ):
        ask(**given)
    settings = ("NUM_STREAMS", "INFERENCE_NUM_THREADS")
    found = [tuple(map(each.get_property, settings)) for each in runner.runtime.compiled.values()]
    most = openvino.Core().get_property("CPU", "RANGE_FOR_STREAMS")[1]  # one on a single core
    assert found == [(1, 1), (min(2, most),) * 2]


@pytest.mark.parametrize(("precision", "limit"), [("float16", 0.52), ("int8_weight_only", 0.27)])
def test_stored_weights_are_small_and_the_products_stay_in_float32(precision, limit, artifacts, tmp_path):
    sizes = {name: (artifacts / name / "model.bin").stat().st_size for name in ("float32", precision)}
    assert sizes[precision] < limit * sizes["float32"]
    x = examples((64,))
    outputs, kernels = run(artifacts / precision, {"features": x}, 32)
    assert kernels == {"FullyConnected": 2}
    export(str(artifacts / "model.keras"), tmp_path / "a", ExportConfig(precision=precision))
    model = keras.layers.TFSMLayer(str(tmp_path / "a"), call_endpoint="serving_default")
    np.testing.assert_allclose(outputs["output_0"], model(x)["output_0"], atol=1e-6)


def test_a_changed_and_a_missing_file_of_weights_are_refused(artifacts, tmp_path):
    assert {"model.xml", "model.bin"} == read_manifest(artifacts / "float32").files.keys()
    export(str(artifacts / "model.keras"), tmp_path / "a", ExportConfig(format="openvino"))
    weights = tmp_path / "a" / "model.bin"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"model\.bin, which has changed"):
        verify(tmp_path / "a")
    weights.unlink()
    with pytest.raises(ArtifactError, match=r"model\.bin, which is missing"):
        verify(tmp_path / "a")


def test_what_openvino_cannot_hold_is_refused_and_nothing_is_written(tmp_path):
    inputs = keras.Input((3, 3))
    with pytest.raises(UnsupportedModelError, match=r"made from its ONNX model. Every op .*Qr"):
        export(keras.Model(inputs, ops.qr(inputs)[1]), tmp_path / "a", ExportConfig(format="openvino"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"no integers of 4 bits; 'int8_weight_only' comes nearest"):
        ExportConfig(format="openvino", precision="int4_weight_only")
    with pytest.raises(ConfigError, match="tensorrt belongs to format='onnx'"):
        ExportConfig(format="openvino", precision="int8", tensorrt=True)


@pytest.mark.slow
def test_a_maximum_that_is_rounded_is_right_in_int8(tmp_path):
    """OpenVINO would compute the rounding in the kernel of the maximum, and wrongly."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((12, 6)), layers.Conv1D(12, 3, activation="relu"), layers.Conv1D(8, 1)])
    model = keras.Sequential([model, layers.ReLU(), layers.GlobalMaxPooling1D(), layers.Dense(8)])
    x = examples((12, 6))
    config = ExportConfig(format="openvino", precision="int8")
    export(model, tmp_path / "a", config, calibration_data=x)
    outputs, kernels = run(tmp_path / "a", {model.inputs[0].name: x}, 32)
    assert kernels == {"Convolution_int8": 2, "FullyConnected_int8": 1}
    assert np.linalg.norm(outputs["output_0"] - model(x)) <= 0.03 * np.linalg.norm(model(x))


@pytest.mark.slow
def test_extremes_that_are_rounded_behind_other_ops_are_right_in_int8(tmp_path):
    """As in the attention of CBAM, where OpenVINO moves the rounding of a concatenation to the maximum."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="swish")(inputs)
    joined = layers.Concatenate()([ops.min(x, -1, keepdims=True), ops.max(x, -1, keepdims=True)])
    least = layers.Reshape((1, 1, 8))(ops.min(x, (1, 2)))
    model = keras.Model(inputs, [layers.Conv2D(4, 1)(each) for each in (joined, least, x)])
    x = examples((12, 12, 3))
    quantized = quantize(model, QuantizationConfig(), calibration_data=x)
    export(quantized, tmp_path / "a", ExportConfig(format="openvino"))
    outputs, kernels = run(tmp_path / "a", {inputs.name: x}, 32)
    assert kernels == {"Convolution_int8": 4}
    for name, expected in quantized.graph.predict({inputs.name: x}).items():
        assert np.linalg.norm(outputs[name] - expected) <= 0.05 * np.linalg.norm(expected)


@pytest.mark.slow
def test_a_swish_is_computed_in_the_kernel_of_its_convolution(tmp_path):
    """With a rounding in between, it would be a kernel of its own."""
    keras.utils.set_random_seed(0)
    model, shape = squeeze_and_excite()
    x = examples(shape)
    quantized = quantize(model, QuantizationConfig(), calibration_data=x)
    export(quantized, tmp_path / "a", ExportConfig(format="openvino"))
    outputs, kernels = run(tmp_path / "a", {model.inputs[0].name: x}, 32)
    assert sum(kernels.values()) == 6
    settings = {"EXECUTION_MODE_HINT": "ACCURACY"}
    compiled = openvino.Core().compile_model(str(tmp_path / "a" / "model.xml"), "CPU", settings)
    kinds = Counter(node.get_rt_info()["layerType"].astype(str) for node in compiled.get_runtime_model().get_ops())
    assert kinds["Subgraph"] + kinds["Eltwise"] == 1  # the product of squeeze-and-excite
    (exact,), (annotated,) = (
        [*graph.predict({model.inputs[0].name: x}).values()] for graph in (quantized.float_graph, quantized.graph)
    )
    assert np.linalg.norm(outputs["output_0"] - exact) <= 1.2 * np.linalg.norm(annotated - exact)


@pytest.mark.slow
def test_layers_that_are_used_twice_and_layers_of_equal_sizes_run_in_int8(tmp_path):
    """OpenVINO would compute products in float whose weights, scales or zero points are one constant."""
    keras.utils.set_random_seed(0)
    inputs, convolution, dense = keras.Input((8, 8, 3)), layers.Conv2D(8, 3, activation="relu"), layers.Dense(8)
    x = convolution(layers.Conv2D(8, 1)(inputs))
    x = layers.GlobalAveragePooling2D()(convolution(x))
    model = keras.Model(inputs, dense(layers.ReLU()(dense(x))))
    x = examples((8, 8, 3))
    config = ExportConfig(format="openvino", precision="int8")
    export(model, tmp_path / "a", config, calibration_data=x)
    outputs, kernels = run(tmp_path / "a", {inputs.name: x}, len(x))
    assert kernels == {"Convolution_int8": 3, "FullyConnected_int8": 2}
    assert np.linalg.norm(outputs["output_0"] - model(x)) <= 0.03 * np.linalg.norm(model(x))


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["onnx", "openvino"])
def test_an_einsum_of_activations_is_computed(file_format, tmp_path):
    """The ops that tf2onnx would make of it have another meaning in OpenVINO."""
    inputs = keras.Input((10, 6))
    weights = ops.softmax(ops.sum(inputs, -1), axis=-1)
    model = keras.Model(inputs, ops.einsum("bt,btc->bc", weights, inputs))
    export(model, tmp_path / "a", ExportConfig(format=file_format))
    x = examples((10, 6))
    outputs, _ = run(tmp_path / "a", {inputs.name: x}, len(x))
    np.testing.assert_allclose(outputs["output_0"], model(x), atol=1e-5)


def test_a_full_disk_is_an_error_of_the_export(artifacts, tmp_path, monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("basic_ios::clear: iostream error")

    monkeypatch.setattr(openvino, "save_model", fails)
    with pytest.raises(ExportError, match=r"could not be written.*iostream error.* bytes are free there"):
        export(str(artifacts / "model.keras"), tmp_path / "a", ExportConfig(format="openvino"))


@pytest.mark.slow
def test_the_commands_write_and_measure_it(artifacts, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["export", str(artifacts / "model.keras"), out, "--format", "openvino"]) == 0
    capsys.readouterr()
    assert main(["verify", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runtime"].startswith("OpenVINO")
