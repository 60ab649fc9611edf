"""`tfopt.inspect` counts what the models hold, in every format, and runs nothing of them."""

import json
import re
import shutil

import keras
import numpy as np
import onnx
import openvino
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.core.protobuf import saved_model_pb2

import tfopt
from tfopt.cli import main
from tfopt.errors import ArtifactError, ConfigError
from tfopt.exporting import ExportConfig, export, formats, inspect

FORMATS = ("saved_model", "keras", "onnx", "litert", "openvino")
PRODUCTS = {
    "saved_model": ["Conv2D", "Conv2D", "DepthwiseConv2dNative", "MatMul"],
    "keras": ["Conv2D", "Conv2D", "DepthwiseConv2dNative", "MatMul"],
    "onnx": ["Conv", "Conv", "Conv", "MatMul"],
    "litert": ["CONV_2D", "CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"],
    "openvino": ["Convolution", "Convolution", "GroupConvolution", "MatMul"],
}
INT8 = {
    "saved_model": ["_FusedQuantizedConv2D"] * 2 + ["_FusedQuantizedDepthwiseConv2D", "_QuantizedMatMul"],
    "onnx": ["Conv", "Conv", "Conv", "Gemm"],
    "litert": PRODUCTS["litert"],
}


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3), name="image"),
            layers.Conv2D(8, 3, strides=2, padding="same", activation="relu", bias_initializer="normal", name="first"),
            layers.DepthwiseConv2D(3, padding="same", bias_initializer="normal"),
            layers.Conv2D(16, 1, bias_initializer="normal"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10, bias_initializer="normal", name="last"),
        ]
    )
    kernel = model.get_layer("last").kernel
    kernel.assign(np.where(np.arange(160).reshape(16, 10) % 4, 0, kernel.numpy()))
    return model


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    """The model in each format, as float32 and as int8. Read only."""
    root = tmp_path_factory.mktemp("files")
    x = np.random.default_rng(0).normal(size=(16, 8, 8, 3)).astype("float32")
    model.export(root / "keras", verbose=False)
    export(model, root / "saved_model")
    export(model, root / "onnx", ExportConfig(format="onnx"))
    export(model, root / "saved_model_int8", ExportConfig(precision="int8", int8_nodes="all"), calibration_data=x)
    export(model, root / "onnx_int8", ExportConfig(format="onnx", precision="int8"), calibration_data=x)
    converter = tf.lite.TFLiteConverter.from_saved_model(str(root / "keras"))
    (root / "litert").mkdir()
    (root / "litert" / "model.tflite").write_bytes(converter.convert())
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([each[None]] for each in x)
    (root / "litert_int8").mkdir()
    (root / "litert_int8" / "model.tflite").write_bytes(converter.convert())
    converted = openvino.convert_model(root / "onnx" / "model.onnx")
    openvino.save_model(converted, root / "openvino" / "model.xml", compress_to_fp16=False)
    return root


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_holds_the_tensors_weights_and_multiply_adds_of_the_model(name, files, model):
    found = inspect(files / name)
    assert found.format == ("saved_model" if name == "keras" else name)
    assert found.problems == found.outside == ()
    (image,), (result,) = found.inputs.items(), found.outputs.values()
    assert (image[0], image[1].shape, image[1].dtype) == ("image", (None, 8, 8, 3), "float32")
    assert (result.shape, result.dtype) == ((None, 10), "float32")
    assert found.sizes == {"image": (1, 8, 8, 3)}
    assert found.parameters == model.count_params() == 618
    assert found.parameter_bytes == 4 * 618
    assert found.zeros == 120
    assert found.multiply_adds == tfopt.count_flops(model).multiply_adds
    assert found.uncounted == []
    products = [each for each in found.operators if each.multiply_adds]
    assert sorted(each.kind for each in products) == PRODUCTS[name]
    assert {each.dtype for each in products} == {"float32"}
    largest = max(found.operators, key=found.bytes_of)
    assert largest.kind == PRODUCTS[name][0]
    assert found.bytes_of(largest) in (864, 896)  # without or with its bias


@pytest.mark.parametrize("name", INT8)
def test_products_in_int8_are_told_from_others(name, files, model):
    found = inspect(files / f"{name}_int8")
    products = [each for each in found.operators if each.multiply_adds]
    assert sorted(each.kind for each in products) == INT8[name]
    assert {each.dtype for each in products} == {"int8"}
    assert found.multiply_adds == tfopt.count_flops(model).multiply_adds
    assert found.parameters == 618
    weights = [weight for weight in found.weights if weight.dtype == "int8"]
    assert sum(weight.count for weight in weights) == 576  # all but the biases
    assert sum(weight.zeros for weight in weights) >= 120


def test_an_artifact_tells_which_nodes_are_in_int8_and_why_others_are_not(model, tmp_path):
    config = ExportConfig(format="onnx", precision="int8", quantization=tfopt.QuantizationConfig(exclude=("*first*",)))
    x = np.random.default_rng(0).normal(size=(16, 8, 8, 3)).astype("float32")
    export(model, tmp_path / "a", config, calibration_data=x)
    found = inspect(tmp_path / "a")
    assert [choice.quantized for choice in found.choices].count(True) == 3
    (left,) = [choice for choice in found.choices if not choice.quantized]
    assert (left.kind, left.reason) == ("Conv2D", "excluded by the configuration")
    assert sorted(each.dtype for each in found.operators if each.multiply_adds) == ["float32", "int8", "int8", "int8"]
    assert "float  1 Conv2D, excluded by the configuration: " in str(found)


def test_the_name_of_the_model_is_left_out_of_those_of_layers(files):
    text = str(inspect(files / "saved_model_int8"))
    assert "begin with sequential" in text
    assert re.search(r"^  int8  1 MatMul: last\w*/MatMul$", text, re.MULTILINE)


class Either(layers.Layer):
    """A product where the sum is positive, and else nothing."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, 4))

    def call(self, x):
        return keras.ops.cond(keras.ops.sum(x) > 0, lambda: keras.ops.matmul(x, self.kernel), lambda: x)


def test_each_branch_of_a_condition_counts(tmp_path):
    model = keras.Sequential([keras.Input((4,)), Either()])
    model.export(tmp_path / "keras", verbose=False)
    export(model, tmp_path / "ours")
    for name in ("keras", "ours"):
        found = inspect(tmp_path / name)
        assert (found.multiply_adds, found.parameters) == (16, 16)
        assert any("each of its branches counts" in note for note in found.notes)


@pytest.mark.slow
def test_loops_count_their_rounds(tmp_path):
    inputs = keras.Input((None, 8))
    hidden = layers.Dense(4)(layers.LSTM(6, return_sequences=True)(inputs))
    model = keras.Model(inputs, layers.GRU(5)(hidden))
    model.export(tmp_path / "keras", verbose=False)
    export(model, tmp_path / "ours")
    for name in ("keras", "ours"):
        found = inspect(tmp_path / name, open_size=7)
        assert found.multiply_adds == 7 * (8 + 6) * 24 + 7 * 6 * 4 + 7 * (4 + 5) * 15
        assert found.uncounted == []
    assert inspect(tmp_path / "keras").parameters == model.count_params()


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["litert", "onnx"])
@pytest.mark.parametrize("steps", [6, None])
def test_loops_of_other_formats_count_their_rounds_or_say_that_they_do_not(file_format, steps, tmp_path):
    inputs = keras.Input((steps, 8))
    hidden = layers.Dense(4)(layers.LSTM(6, return_sequences=True)(inputs))
    export(keras.Model(inputs, layers.GRU(5)(hidden)), tmp_path / "model", ExportConfig(format=file_format))
    found = inspect(tmp_path / "model")
    if steps is None:
        assert len(found.open_loops) == len(found.to_dict()["open_loops"]) == 2
        assert "at least" in str(found)
    else:
        assert found.multiply_adds == steps * (8 + 6) * 24 + steps * 6 * 4 + steps * (4 + 5) * 15
        assert not found.open_loops


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["saved_model", "litert", "onnx"])
def test_convolutions_of_all_steps_and_of_each_count(file_format, tmp_path):
    model = keras.Sequential([keras.Input((6, 8, 8, 2)), layers.ConvLSTM2D(3, 3)])
    export(model, tmp_path / "model", ExportConfig(format=file_format))
    found = inspect(tmp_path / "model")
    assert (found.multiply_adds, found.open_loops) == (6 * 6 * 6 * 9 * (2 + 3) * 12, ())


@pytest.mark.parametrize("name", [*FORMATS, *(f"{name}_int8" for name in INT8)])
def test_it_prints_in_100_columns_and_as_json(name, files, capsys):
    assert main(["inspect", str(files / name)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100 + len(str(files))
    assert max(map(len, text.splitlines()[1:])) <= 100
    assert main(["inspect", str(files / name), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["parameters"] == 618
    assert len(values["operators"]) >= 4
    assert "<table" in inspect(files / name)._repr_html_()


class Reader(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec((None, 2), name="x")])
    def serve(self, x):
        return {"y": x + tf.strings.to_number(tf.io.read_file("/etc/hostname"))}


def test_ops_that_touch_files_are_told_and_not_run(tmp_path, monkeypatch):
    module = Reader()
    tf.saved_model.save(module, str(tmp_path / "reader"), signatures={"serving_default": module.serve})

    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(tf.saved_model, "load", refuse)
    monkeypatch.setattr(tf.graph_util, "import_graph_def", refuse)
    found = inspect(tmp_path / "reader")
    assert len(found.outside) == 1
    assert "ReadFile" in found.outside[0]
    assert "touches files" in found.outside[0]
    assert "ReadFile" in [each.kind for each in found.operators]


def test_functions_that_would_fill_the_memory_are_refused(files, tmp_path):
    """Each of 40 functions calls the next twice."""
    saved = saved_model_pb2.SavedModel.FromString((files / "keras" / "saved_model.pb").read_bytes())
    graph = saved.meta_graphs[0].graph_def
    for number in range(40):
        function = graph.library.function.add()
        function.signature.name = f"f{number}"
        function.signature.input_arg.add(name="x", type=tf.float32.as_datatype_enum)
        function.signature.output_arg.add(name="y", type=tf.float32.as_datatype_enum)
        function.ret["y"] = "second:y:0" if number < 39 else "x"
        for name, source in (("first", "x"), ("second", "first:y:0")) if number < 39 else ():
            function.node_def.add(name=name, op=f"f{number + 1}", input=[source])
    graph.node.add(name="start", op="f0", input=["serving_default_image"])
    signature = saved.meta_graphs[0].signature_def["serving_default"]
    for output in signature.outputs.values():
        output.name = "start:0"
    (tmp_path / "saved_model.pb").write_bytes(saved.SerializeToString())
    with pytest.raises(ArtifactError, match=r"call each other more than .* times"):
        inspect(tmp_path)


def test_an_operator_that_a_runtime_lacks_is_told(tmp_path):
    function = tf.function(lambda x: tf.linalg.inv(x)).get_concrete_function(tf.TensorSpec((2, 2), name="x"))
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function])
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS, tf.lite.OpsSet.SELECT_TF_OPS]
    (tmp_path / "inverse.tflite").write_bytes(converter.convert())
    found = inspect(tmp_path / "inverse.tflite")
    assert found.outside == ("FlexMatrixInverse runs TensorFlow's MatrixInverse: a runtime needs the Flex delegate",)


def test_scales_and_zero_points_of_openvino_are_no_parameters(files, tmp_path):
    converted = openvino.convert_model(files / "onnx_int8" / "model.onnx")
    openvino.save_model(converted, tmp_path / "model.xml")
    assert inspect(tmp_path / "model.xml").parameters == inspect(files / "onnx_int8").parameters


def test_weights_of_an_onnx_file_outside_of_its_directory_are_told_and_not_read(files, tmp_path):
    model = onnx.load(files / "onnx" / "model.onnx")
    tensor = max(model.graph.initializer, key=lambda each: len(each.raw_data))
    onnx.external_data_helper.set_external_data(tensor, "../../secret")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    found = inspect(tmp_path / "model.onnx")
    assert found.outside == ("weights of '../../secret' touch files",)
    assert [weight.zeros for weight in found.weights].count(None) == 1
    assert found.parameters == 618


BROKEN = {
    "missing.onnx": None,
    "text.onnx": b"a text\n",
    "text.tflite": b"a text\n",
    "text.xml": b"a text\n",
    "text.txt": b"a text\n",
    "model.keras": b"a text\n",
    "empty": None,
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_model_is_one_line(name, tmp_path, capsys):
    path = tmp_path / name
    if BROKEN[name] is not None:
        path.write_bytes(BROKEN[name])
    elif name == "empty":
        path.mkdir()
    assert main(["inspect", str(path)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert str(path) in error[0]


def test_a_directory_of_two_models_is_refused(tmp_path):
    for name in ("model.onnx", "model.tflite"):
        (tmp_path / name).touch()
    with pytest.raises(ArtifactError, match=r"hold one model.*with model\.onnx, model\.tflite\. Name the file of one"):
        inspect(tmp_path)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kept", [0, 40, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_one_line(name, kept, files, tmp_path, capsys):
    file = formats.FORMATS["saved_model" if name == "keras" else name].file
    shutil.copytree(files / name, tmp_path / "a")
    (tmp_path / "a" / "manifest.json").unlink(missing_ok=True)
    content = (tmp_path / "a" / file).read_bytes()
    (tmp_path / "a" / file).write_bytes(content[: int(kept * len(content) if kept < 1 else kept)])
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "a")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("tfopt: path must be a readable model. Received: ")


@pytest.mark.parametrize(
    ("name", "file"), [("openvino", "model.bin"), ("keras", "variables/variables.data-00000-of-00001")]
)
def test_truncated_weights_are_one_line(name, file, files, tmp_path, capsys):
    shutil.copytree(files / name, tmp_path / "a")
    content = (tmp_path / "a" / file).read_bytes()
    (tmp_path / "a" / file).write_bytes(content[: len(content) // 2])
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "a")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_damaged_artifact_fails_the_check(files, tmp_path, capsys):
    shutil.copytree(files / "onnx", tmp_path / "a")
    file = tmp_path / "a" / "model.onnx"
    content = bytearray(file.read_bytes())
    place = content.index(b"first") + 1  # in a name, so that it can still be read
    content[place] ^= 1
    file.write_bytes(content)
    assert main(["inspect", str(tmp_path / "a")]) == 1
    text = capsys.readouterr().out
    assert "files as written  no" in text
    assert "model.onnx, which has changed" in " ".join(text.split())
    file.write_bytes(content[:100])
    assert main(["inspect", str(tmp_path / "a")]) == 1
    assert "which has changed" in capsys.readouterr().err


def test_wrong_arguments(files, monkeypatch):
    with pytest.raises(ConfigError, match="open_size must be a whole number"):
        inspect(files / "onnx", open_size=0)
    (files / "layers.keras").touch()
    with pytest.raises(ArtifactError, match="Export it: tfopt export"):
        inspect(files / "layers.keras")
    monkeypatch.setattr("tfopt.exporting.inspection.inspect.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tfopt\[litert\]'"):
        inspect(files / "litert")
