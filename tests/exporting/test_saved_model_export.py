"""The artifact: what is on disk, that it loads without us, what replaces what, what a wrong export leaves behind."""

import gc
import hashlib
import json
import logging
import os
import resource
import shutil
import subprocess
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.errors import ArtifactError, ConfigError, ExportError, TfoptWarning, UnsupportedModelError
from tfopt.exporting import ExportConfig, SavedModelProcess, export, verify
from tfopt.graph import GraphEditor, freeze
from tfopt.quantization import QuantizationConfig, WeightOnlyConfig, quantize

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(40, 8, 8, 3)).astype("float32")
INT8 = ExportConfig(precision="int8", int8_nodes="all")


def small(filters=8):
    return keras.Sequential(
        [
            keras.Input((8, 8, 3), name="image"),
            layers.Conv2D(filters, 3, name="stem"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(4, name="head"),
        ],
        name="small",
    )


def big():
    """Weights of 4.4 MB."""
    return keras.Sequential(
        [
            keras.Input((5, 5, 64)),
            layers.Conv2D(256, 3, activation="relu"),
            layers.Conv2D(256, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1024, activation="relu"),
            layers.Dense(100),
        ]
    )


def weight_bytes(model):
    return sum(variable.numpy().nbytes for variable in model.weights)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """The small model in float32/ and int8/. Read only."""
    directory = tmp_path_factory.mktemp("artifacts")
    model = small()
    for precision in ("float32", "int8"):
        config = ExportConfig(precision=precision, int8_nodes="all")
        export(model, directory / precision, config, calibration_data=X)
    return model, directory


def manifest_of(path):
    return json.loads((Path(path) / "manifest.json").read_text())


def listing(directory):
    return sorted(path.relative_to(directory).as_posix() for path in Path(directory).rglob("*"))


LOADS_ALONE = """
import json, sys
sys.modules.update(dict.fromkeys(("keras", "tf_keras", "tfopt")))
import numpy as np, tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
serve = model.signatures["serving_default"]
with np.load(sys.argv[2]) as arrays:
    outputs = serve(**{name: tf.constant(arrays[name]) for name in arrays.files})
outputs = {name: value.numpy().tolist() for name, value in outputs.items()}
print(json.dumps({"signatures": list(model.signatures), "outputs": outputs}))
"""


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_loads_with_tensorflow_alone(precision, artifacts, tmp_path, fresh_python):
    model, directory = artifacts
    np.savez(tmp_path / "inputs.npz", image=X[:5])
    files = directory / precision, tmp_path / "inputs.npz"
    result = fresh_python("-I", "-c", LOADS_ALONE, *files, imported="tensorflow", check=True)
    received = json.loads(result.stdout.splitlines()[-1])
    assert received["signatures"] == ["serving_default"]
    if precision == "float32":
        expected, tolerance = np.asarray(model(X[:5])), 1e-5
    else:
        expected, tolerance = quantize(model, calibration_data=X).predict(X[:5]), 1e-4
    np.testing.assert_allclose(received["outputs"]["output_0"], expected, atol=tolerance)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_manifest_tells_the_truth(precision, tmp_path):
    artifact = export(small(), tmp_path / "a", ExportConfig(precision=precision, int8_nodes="all"), calibration_data=X)
    manifest = manifest_of(artifact.path)
    files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path / "a").as_posix() for path in files} == {*manifest["files"], "manifest.json"}
    for name, recorded in manifest["files"].items():
        content = (tmp_path / "a" / name).read_bytes()
        assert recorded == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert artifact.bytes_on_disk == sum(path.stat().st_size for path in files)
    assert manifest["model"] == "small"
    assert manifest["precision"] == artifact.precision == precision
    assert manifest["tensorflow"] == tf.__version__
    assert manifest["baseline"] is None
    signature = tf.saved_model.load(artifact.path).signatures["serving_default"]
    assert manifest["signature"]["inputs"] == {
        name: {"shape": spec.shape.as_list(), "dtype": spec.dtype.name}
        for name, spec in signature.structured_input_signature[1].items()
    }
    assert manifest["signature"]["outputs"] == {"output_0": {"shape": [None, 4], "dtype": "float32", "op": "MatMul"}}
    assert signature.structured_outputs["output_0"].shape.as_list() == [None, 4]
    if precision == "int8":
        assert manifest["report"] == json.loads(artifact.report.to_json())
        assert len(manifest["report"]["changed"]) == 2
    else:
        assert artifact.report is manifest["report"] is None


@pytest.mark.slow
def test_sizes(tmp_path):
    model = big()
    x = GENERATOR.normal(size=(8, 5, 5, 64)).astype("float32")
    assert weight_bytes(model) > 1e6
    assert export(model, tmp_path / "float32").bytes_on_disk <= 1.1 * weight_bytes(model)
    assert export(model, tmp_path / "int8", INT8, calibration_data=x).bytes_on_disk <= 0.35 * weight_bytes(model)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "limit"), [("float32", 1.1), ("int8", 0.35)])
def test_weights_used_twice_are_stored_once(precision, limit, tmp_path):
    backbone = big()
    one, other = keras.Input((5, 5, 64), name="one"), keras.Input((5, 5, 64), name="other")
    model = keras.Model([one, other], layers.Subtract()([backbone(one), backbone(other)]))
    x = GENERATOR.normal(size=(8, 5, 5, 64)).astype("float32")
    artifact = export(
        model, tmp_path / "a", ExportConfig(precision=precision, int8_nodes="all"), calibration_data=[(x, x[::-1])]
    )
    assert artifact.bytes_on_disk <= limit * weight_bytes(model)


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.slow), "int8"])
def test_zeros_in_the_artifact_are_those_of_the_model(precision, tmp_path):
    model = small(filters=32)
    zeros = size = 0
    for name in ("stem", "head"):
        kernel = model.get_layer(name).kernel
        values = kernel.numpy() * (GENERATOR.random(kernel.shape) < 0.25)
        # Away from 0, so that rounding to int8 makes no zeros of its own.
        values = np.sign(values) * (0.05 + np.abs(values))
        kernel.assign(values)
        zeros, size = zeros + int((values == 0).sum()), size + values.size
    artifact = export(model, tmp_path / "a", ExportConfig(precision=precision, int8_nodes="all"), calibration_data=X)
    with SavedModelProcess(artifact.path) as process:
        assert process.count_weights() == {"weights": size, "zeros": zeros}


def two_inputs():
    image, vector = keras.Input((8, 8, 3), name="image"), keras.Input((5,), name="a_vector")
    x = layers.Concatenate()([layers.Flatten()(layers.Conv2D(4, 3, activation="relu")(image)), vector])
    return keras.Model([image, vector], {"z": layers.Dense(2)(x), "b": layers.Dense(3)(x)})


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_several_inputs_and_outputs(precision, tmp_path):
    model, vector = two_inputs(), GENERATOR.normal(size=(40, 5)).astype("float32")
    artifact = export(
        model, tmp_path / "a", ExportConfig(precision=precision, int8_nodes="all"), calibration_data=((X, vector), X)
    )
    with SavedModelProcess(artifact.path) as process:
        assert set(process.loaded["inputs"]) == {"image", "a_vector"}
        outputs = process.predict({"image": X, "a_vector": vector})
    expected = keras.tree.map_structure(np.asarray, model([X, vector]))
    for name in ("z", "b"):
        tolerance = 1e-5 if precision == "float32" else 0.05 * np.abs(expected[name]).max()
        np.testing.assert_allclose(outputs[name], expected[name], atol=tolerance)


@pytest.mark.slow
def test_excluding_and_quantizing_in_two_steps(tmp_path):
    model = small()
    config = QuantizationConfig(exclude=("*/stem/*",))
    one = export(
        model,
        tmp_path / "one",
        ExportConfig(precision="int8", int8_nodes="all", quantization=config),
        calibration_data=X,
    )
    other = export(quantize(model, config, calibration_data=X), tmp_path / "other", INT8)
    assert other.precision == "int8"
    for artifact in (one, other):
        with SavedModelProcess(artifact.path) as process:
            outputs = process.predict({"image": X})["output_0"]
            kernels = process.loaded["kernels"]
        assert (kernels["Conv2D"], kernels["_QuantizedMatMul"]) == (1, 1)
        assert "_FusedQuantizedConv2D" not in kernels
        expected = np.asarray(model(X))
        np.testing.assert_allclose(outputs, expected, atol=0.03 * np.abs(expected).max())


def test_sequences_and_dilations_stay_in_int8_from_layer_to_layer(tmp_path):
    image = keras.Input((8, 8, 3), name="image")
    x = layers.Conv2D(8, 3, padding="same", dilation_rate=2, use_bias=False)(image)
    x = layers.Reshape((64, 8))(layers.ReLU()(layers.BatchNormalization()(x)))
    for dilation in (1, 2):
        shortcut = x = layers.Conv1D(8, 1, activation="relu")(x)
        x = layers.Conv1D(8, 3, padding="causal", dilation_rate=dilation, activation="relu")(x)
        x = layers.Conv1D(8, 3, padding="same", dilation_rate=dilation, use_bias=False)(x)
        x = layers.ReLU()(layers.Add()([layers.BatchNormalization()(x), shortcut]))
    model = keras.Model(image, layers.Dense(4)(layers.Flatten()(layers.MaxPooling1D(4)(x))))
    export(model, tmp_path / "a", INT8, calibration_data=X)
    with SavedModelProcess(tmp_path / "a") as process:
        outputs = process.predict({"image": X})["output_0"]
        kernels = process.loaded["kernels"]
    assert kernels == {"QuantizeV2": 1, "_FusedQuantizedConv2D": 7, "QuantizedMaxPool": 1, "_QuantizedMatMul": 1}
    expected = np.asarray(model(X))
    np.testing.assert_allclose(outputs, expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_custom_gradients_do_not_hinder(precision, tmp_path):
    """Swish has one, in the graph and in the body of a loop."""
    cell = layers.LSTM(4, activation="swish")
    model = keras.Sequential(
        [keras.Input((8, 8, 3), name="image"), layers.Conv2D(4, 3, activation="swish"), layers.Reshape((36, 4)), cell]
    )
    export(model, tmp_path / "a", ExportConfig(precision=precision, int8_nodes="all"), calibration_data=X)
    with SavedModelProcess(tmp_path / "a") as process:
        outputs = process.predict({"image": X})["output_0"]
    expected = np.asarray(model(X))
    tolerance = 1e-5 if precision == "float32" else 0.1 * np.abs(expected).max()
    np.testing.assert_allclose(outputs, expected, atol=tolerance)


@pytest.mark.slow
def test_nothing_to_quantize_is_exported_as_float_with_a_warning(tmp_path):
    model = keras.Sequential([keras.Input((8, 8, 3), name="image"), layers.Conv2DTranspose(3, 2)])
    with pytest.warns(TfoptWarning, match="changed nothing"):
        export(model, tmp_path / "a", INT8, calibration_data=X)
    with SavedModelProcess(tmp_path / "a") as process:
        np.testing.assert_allclose(process.predict({"image": X})["output_0"], np.asarray(model(X)), atol=1e-5)


@pytest.mark.slow
def test_from_a_keras_file_and_from_its_own_artifact(tmp_path):
    model = small()
    model.save(tmp_path / "model.keras")
    export(tmp_path / "model.keras", tmp_path / "one")
    export(str(tmp_path / "one"), tmp_path / "two", INT8, calibration_data=X)
    export(tmp_path / "one", tmp_path / "one")  # onto itself
    expected = np.asarray(model(X))
    (outputs,) = freeze(tmp_path / "one").predict(X).values()
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    with SavedModelProcess(tmp_path / "two") as process:
        assert process.loaded["kernels"]["_FusedQuantizedConv2D"] == 1
        outputs = process.predict({"image": X})["output_0"]
    np.testing.assert_allclose(outputs, expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.slow
def test_a_loop_survives(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((6, 3), name="x"), layers.LSTM(4), layers.Dense(2, dtype="float32")])
    finally:
        keras.config.set_dtype_policy("float32")
    x = GENERATOR.normal(size=(7, 6, 3)).astype("float32")
    export(model, tmp_path / "a")
    with SavedModelProcess(tmp_path / "a") as process:
        outputs = process.predict({"x": x})["output_0"]
    np.testing.assert_allclose(outputs, np.asarray(model(x)), atol=1e-2)
    assert verify(tmp_path / "a", seconds=0.01).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype", "head"),
    [
        ((None, None, 3), "float32", [layers.Conv2D(4, 7), layers.GlobalMaxPooling2D(), layers.Dense(2)]),
        ((None,), "int32", [layers.Embedding(10, 4), layers.GlobalAveragePooling1D(), layers.Dense(2)]),
        ((5,), "float32", [layers.Dense(3), layers.Lambda(lambda x: x > 0)]),
        ((5,), "float32", [layers.Dense(3), layers.Lambda(lambda x: keras.ops.argmax(x, axis=-1))]),
    ],
)
def test_open_sizes_and_other_types(shape, dtype, head, tmp_path):
    model = keras.Sequential([keras.Input(shape, dtype=dtype), *head])
    export(model, tmp_path / "a")
    receipt = verify(tmp_path / "a", seconds=0.01)
    assert receipt.ok
    assert receipt.parity_max_abs_error < 1e-4


def test_a_fixed_batch_size(tmp_path):
    weights = GENERATOR.normal(size=(6, 3)).astype("float32")
    serve = tf.function(lambda x: {"y": x @ weights}, input_signature=[tf.TensorSpec([4, 6], tf.float32, "x")])
    tf.saved_model.save(tf.Module(), str(tmp_path / "source"), signatures=serve.get_concrete_function())
    x = GENERATOR.normal(size=(4, 6)).astype("float32")
    export(tmp_path / "source", tmp_path / "a", INT8, calibration_data=[x])
    receipt = verify(tmp_path / "a", seconds=0.01)
    assert receipt.ok
    assert receipt.batch_size == 4


@pytest.mark.slow
def test_sizes_that_only_the_data_show(tmp_path):
    """At 64x64, which is tried where nothing is known, the reshape fails."""
    inputs = keras.Input((None, None, 3))
    model = keras.Model(inputs, layers.Dense(2)(layers.Reshape((8 * 8 * 3,))(inputs)))
    with pytest.raises(UnsupportedModelError, match="Pass calibration_data with examples that it accepts: of"):
        export(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    export(model, tmp_path / "a", calibration_data=X)
    assert verify(tmp_path / "a", seconds=0.01).ok


@pytest.mark.parametrize("batches", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_generator_of_calibration_data(batches, tmp_path):
    """Read once for the ranges, and its first batch for the check: it gives each batch only once."""
    data = (X[start::batches] for start in range(batches))
    export(small(), tmp_path / "a", INT8, calibration_data=data)
    low, high = manifest_of(tmp_path / "a")["check"]["ranges"]["image"]
    assert (low, high) == (pytest.approx(float(X[::batches].min())), pytest.approx(float(X[::batches].max())))


@pytest.mark.parametrize(
    ("data", "message"),
    [(None, "must be given"), (iter(()), "at least one example"), (X * np.nan, "NaN"), (X[:, :5], "shape of input")],
)
def test_wrong_calibration_data_leaves_nothing(data, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        export(small(), tmp_path / "a", INT8, calibration_data=data)
    assert listing(tmp_path) == []


def test_wrong_example_data_for_float32(tmp_path):
    with pytest.raises(ConfigError, match=r"model's inputs \['image'\].*'img'"):
        export(small(), tmp_path / "a", calibration_data=[{"img": X}])
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    "settings", [{"format": "onxn"}, {"precision": "int9"}, {"quantization": {"observer": "minmax"}}]
)
def test_settings_out_of_range(settings):
    with pytest.raises(ConfigError, match=r"Received|Expected"):
        ExportConfig(**settings)


def test_models_that_cannot_be_exported_leave_nothing(tmp_path):
    with pytest.raises(UnsupportedModelError, match="must be built"):
        export(keras.Sequential([layers.Dense(2)]), tmp_path / "a")
    with pytest.raises(ArtifactError, match=r"no saved_model\.pb"):
        export(tmp_path / "absent", tmp_path / "a")
    assert listing(tmp_path) == []


def test_a_saved_model_that_was_cut_short(tmp_path):
    """As a full disk or a copy that broke off leaves it."""
    small().export(tmp_path / "whole", verbose=False)
    for name in ("saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001"):
        for share in (0, 0.5):
            source = shutil.copytree(tmp_path / "whole", tmp_path / "source", dirs_exist_ok=True)
            content = (source / name).read_bytes()
            (source / name).write_bytes(content[: int(share * len(content))])
            with pytest.raises(ArtifactError, match=r"must be a loadable SavedModel. Received: .*Save it again"):
                export(source, tmp_path / "a")
    small().save(tmp_path / "model.keras")
    content = (tmp_path / "model.keras").read_bytes()
    for share in (0, 0.5, 0.99):
        (tmp_path / "model.keras").write_bytes(content[: int(share * len(content))])
        with pytest.raises(ArtifactError, match=r"must be a readable \.keras file. Received: "):
            export(tmp_path / "model.keras", tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_an_earlier_artifact_is_replaced(tmp_path):
    export(small(), tmp_path / "a")
    before = manifest_of(tmp_path / "a")["files"]
    export(small(filters=16), tmp_path / "a")
    assert manifest_of(tmp_path / "a")["files"] != before
    assert [value.shape for value in freeze(tmp_path / "a").predict(X).values()] == [(40, 4)]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_export_does_not_replace_its_own_baseline(tmp_path):
    export(small(), tmp_path / "a")
    with pytest.raises(
        ConfigError, match=r"baseline must be an artifact that the export leaves in place. Received: .*a'"
    ):
        export(small(), tmp_path / "a", INT8, calibration_data=X, baseline=tmp_path / "b" / ".." / "a")
    assert manifest_of(tmp_path / "a")["precision"] == "float32"


def test_an_empty_directory_and_missing_parents(tmp_path):
    (tmp_path / "empty").mkdir()
    export(small(), tmp_path / "empty")
    export(small(), tmp_path / "new" / "deep" / "a b")
    assert verify(tmp_path / "new" / "deep" / "a b", seconds=0.0).ok
    assert (tmp_path / "empty" / "manifest.json").is_file()


def test_the_working_directory_itself(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export(small(), ".")
    assert (tmp_path / "here" / "manifest.json").is_file()


def test_a_link_keeps_pointing(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(2):
        export(small(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "manifest.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


@pytest.mark.parametrize("content", ['{"name": "a browser extension"}', "[]", "not JSON"])
def test_what_is_not_ours_is_not_replaced(content, tmp_path):
    """Web applications and browser extensions have a manifest.json too."""
    foreign = tmp_path / "web"
    foreign.mkdir()
    (foreign / "manifest.json").write_text(content)
    (foreign / "work").write_text("years of it")
    with pytest.raises(ExportError, match="holds something else"):
        export(small(), foreign)
    assert listing(tmp_path) == ["web", "web/manifest.json", "web/work"]
    assert (foreign / "work").read_text() == "years of it"


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ExportError, match="holds something else"):
        export(small(), tmp_path / "file")
    for place in (tmp_path / "file" / "a", Path("/proc/a"), tmp_path / ("x" * 300)):
        with pytest.raises(ExportError, match="must be writable"):
            export(small(), place)
    assert listing(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


@pytest.fixture(params=["full disk", "limit on files"])
def no_room(request, tmp_path):
    """A directory in which no file can grow above 300 kB."""
    directory = tmp_path / "full"
    directory.mkdir()
    if request.param == "full disk":
        if os.geteuid() != 0:
            pytest.skip("only root may mount a small file system")
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", directory], check=True)
        yield directory
        subprocess.run(["umount", directory], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    yield directory
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("decode", ["load", "call"])
def test_no_room_for_the_artifact(decode, no_room):
    """In constants, which Python writes, and in variables, which a kernel writes."""
    model = keras.Sequential([keras.Input((200,)), layers.Dense(2000)])
    config = ExportConfig(precision="float16", weight_only=WeightOnlyConfig(decode=decode))
    with pytest.raises(ExportError, match=r"The graph has 8\d\d,\d+ bytes; [\d,]+ bytes are free there. Make room"):
        export(model, no_room / "a", config)
    assert listing(no_room) == []


@pytest.mark.slow
def test_the_folder_can_be_moved_with_its_baseline(tmp_path):
    model = small()
    export(model, tmp_path / "x" / "float32")
    export(model, tmp_path / "x" / "int8", INT8, calibration_data=X, baseline=tmp_path / "x" / "float32")
    assert manifest_of(tmp_path / "x" / "int8")["baseline"] == "../float32"
    shutil.move(tmp_path / "x", tmp_path / "y")
    receipt = verify(tmp_path / "y" / "int8", seconds=0.01)
    assert receipt.speedup is not None
    assert Path(receipt.baseline) == tmp_path / "y" / "float32"


def test_nothing_is_dequantized_on_the_way(artifacts):
    """Flatten asks for the shape of the pooled image, which the quantized tensor has too."""
    with SavedModelProcess(artifacts[1] / "int8") as process:
        kernels = process.loaded["kernels"]
    assert kernels == {"QuantizeV2": 1, "_FusedQuantizedConv2D": 1, "QuantizedMaxPool": 1, "_QuantizedMatMul": 1}


def test_int8_weights_are_held_as_int8(artifacts):
    graph = GraphEditor(freeze(artifacts[1] / "int8").graph_def)
    kernels = [node for node in graph.nodes.values() if node.op == "_FusedQuantizedConv2D"]
    assert len(kernels) == 1
    assert graph.nodes[kernels[0].input[1]].attr["dtype"].type == tf.qint8.as_datatype_enum


EXPORTS_FOR_EVER = """
import sys
import keras
from tfopt.exporting import export
models = [
    keras.Sequential([keras.Input((200,)), keras.layers.Dense(n), keras.layers.Dense(10)]) for n in (2000, 4000)
]
export(models[0], sys.argv[1])
print("ready", flush=True)
while True:
    for model in models:
        export(model, sys.argv[1])
"""


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path, fresh_python):
    """The final name holds a whole artifact, and the next export clears what was left."""
    final = tmp_path / "a"
    for delay in np.random.default_rng(0).uniform(0, 1.5, 3):
        with fresh_python.running("-c", EXPORTS_FOR_EVER, final, stderr=subprocess.DEVNULL) as process:
            assert process.stdout.readline() == "ready\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=delay)
        for name, recorded in manifest_of(final)["files"].items():
            assert hashlib.sha256((final / name).read_bytes()).hexdigest() == recorded["sha256"]
        assert freeze(final).predict(np.ones((2, 200), "float32"))["output_0"].shape == (2, 10)
    export(small(), final)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert verify(final, seconds=0.01).ok


@pytest.mark.slow
def test_an_export_leaves_no_graph_that_holds_heavy_weights(tmp_path):
    model = keras.Sequential([keras.Input((4096,), name="x"), layers.Dense(9000)])  # 147 MB
    gc.disable()
    try:
        export(model, tmp_path / "a")
        graphs = [thing for thing in gc.get_objects() if isinstance(thing, tf.Graph)]
        assert [graph for graph in graphs for node in graph.as_graph_def().node if node.ByteSize() > 10**8] == []
    finally:
        gc.enable()


def test_an_int8_artifact_is_not_exported_anew(tmp_path):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    x = np.random.default_rng(0).random((16, 8), dtype=np.float32)
    export(model, tmp_path / "int8", INT8, calibration_data=x)
    for precision in ("float32", "int8"):
        with pytest.raises(ConfigError, match="whose precision is int8"):
            export(
                tmp_path / "int8",
                tmp_path / "again",
                ExportConfig(precision=precision, int8_nodes="all"),
                calibration_data=x,
            )
    assert not (tmp_path / "again").exists()


def test_a_path_that_tensorflow_reads_as_a_pattern_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    with pytest.raises(ExportError, match="reads as a pattern"):
        export(model, tmp_path / "tiny [x]" / "float32")
    assert not list(tmp_path.iterdir())


def test_an_artifact_that_holds_another_file_is_not_replaced(tmp_path):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    export(model, tmp_path / "a")
    (tmp_path / "a" / "mine.txt").write_text("notes")
    with pytest.raises(ExportError, match="holds something else"):
        export(model, tmp_path / "a")
    assert (tmp_path / "a" / "mine.txt").read_text() == "notes"


def test_inputs_whose_names_are_no_identifiers_get_one(tmp_path, caplog):
    """TensorFlow makes arguments of a function of them, and warned of what it does not take."""
    logger = logging.getLogger("tensorflow")
    logger.addHandler(caplog.handler)
    names = ("x-y", "2nd", "feat ures", "self", "entrée", "a:b", "_p")
    inputs = {name: keras.Input((4,), name=name) for name in names}
    model = keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(list(inputs.values()))))
    x = {name: np.random.default_rng(place).random((3, 4), np.float32) for place, name in enumerate(inputs)}
    artifact = export(model, tmp_path / "a", ExportConfig(), calibration_data=x)
    logger.removeHandler(caplog.handler)
    assert "not a valid node name" not in caplog.text
    serve = tf.saved_model.load(artifact.path)
    named = {"x_y": "x-y", "arg_2nd": "2nd", "feat_ures": "feat ures", "arg_self": "self", "entr_e": "entrée"}
    named |= {"a": "a:b", "arg__p": "_p"}
    found = serve.signatures["serving_default"](**{own: x[name] for own, name in named.items()})
    np.testing.assert_allclose(found["output_0"], model(x), rtol=1e-5)


def test_a_name_that_tensorflow_does_not_take_is_said(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"ASCII letters.*Received: 'modèle'"):
        export(keras.Sequential([keras.Input((4,)), layers.Dense(2)], name="modèle"), tmp_path / "a")


def test_two_inputs_whose_names_become_one_are_refused(tmp_path):
    one, other = keras.Input((4,), name="a-b"), keras.Input((4,), name="a.b")
    with pytest.raises(UnsupportedModelError, match="must have names that differ in letters and digits"):
        export(keras.Model([one, other], layers.Add()([one, other])), tmp_path / "a")


def test_an_input_without_axes_is_refused(tmp_path):
    module = tf.Module()
    specs = (tf.TensorSpec((None, 2), name="x"), tf.TensorSpec((), name="factor"))
    module.serve = tf.function(lambda x, factor: {"y": factor * x}, input_signature=specs)
    tf.saved_model.save(module, tmp_path / "source", signatures={"serving_default": module.serve})
    with pytest.raises(UnsupportedModelError, match=r"an axis for the examples.*'factor' is a single float32"):
        export(tmp_path / "source", tmp_path / "a")
