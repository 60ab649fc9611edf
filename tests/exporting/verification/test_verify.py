"""The receipt: its figures are recomputed here; what is wrong with an artifact or its data is said clearly."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import venv
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from keras import layers

from tfopt.atomic.checked_json import with_checksum
from tfopt.child_processes import signal_group
from tfopt.cli import main
from tfopt.errors import ArtifactError, ConfigError
from tfopt.exporting import ExportConfig, SavedModelProcess, export, time_in_turns, verify, verify_together
from tfopt.exporting.manifest import TensorRecord
from tfopt.exporting.verification.process import ServingStoppedError
from tfopt.exporting.verification.scoring import chunks
from tfopt.pruning import PruningConfig, prune
from tfopt.quantization import quantize

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(70, 8, 8, 3)).astype("float32")
Y = np.arange(70) % 4


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3), name="image"),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    kernel = model.layers[-1].kernel
    kernel.assign(kernel.numpy() * (GENERATOR.random(kernel.shape) < 0.5))
    return model


@pytest.fixture(scope="module")
def artifacts(model, tmp_path_factory):
    """float32/ and int8/, the first being the second's baseline. Read only."""
    directory = tmp_path_factory.mktemp("artifacts")
    export(model, directory / "float32", calibration_data=X)
    int8 = ExportConfig(precision="int8", int8_nodes="all")
    export(model, directory / "int8", int8, calibration_data=X, baseline=directory / "float32")
    return directory


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path, monkeypatch):
    """No child process, zombies included, and no temporary file outlives a test."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
    assert list((tmp_path / "temporary").glob("tfopt-*")) == []


def files_of(directory):
    return sorted(path for path in Path(directory).rglob("*") if path.is_file())


def accuracy(outputs):
    return float(np.mean(outputs.argmax(axis=1) == Y))


def test_every_figure_of_the_int8_receipt(model, artifacts):
    path = artifacts / "int8"
    receipt = verify(path, data=(X, Y), batch_size=3, seconds=0.02)
    assert receipt.ok
    assert receipt.problems == []
    assert (receipt.artifact, receipt.precision, receipt.batch_size) == (str(path), "int8", 3)
    assert Path(receipt.baseline) == artifacts / "float32"
    assert receipt.bytes_on_disk == sum(file.stat().st_size for file in files_of(path))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(path, arcname="int8")
    assert receipt.gzip_bytes == pytest.approx(len(buffer.getvalue()), rel=0.05)
    kernels = [layer.kernel.numpy() for layer in model.layers if hasattr(layer, "kernel")]
    assert receipt.weight_count == sum(kernel.size for kernel in kernels)
    scales = [np.abs(kernel).reshape(-1, kernel.shape[-1]).max(axis=0) / 63 for kernel in kernels]
    zeros = sum(int((np.rint(kernel / scale) == 0).sum()) for kernel, scale in zip(kernels, scales, strict=True))
    assert abs(receipt.zero_count - zeros) <= 2  # values on the edge between 0 and 1
    int8, float32 = quantize(model, calibration_data=X).predict(X), np.asarray(model(X))
    assert receipt.accuracy == accuracy(int8)
    assert receipt.baseline_accuracy == accuracy(float32)
    assert receipt.agreement == np.mean(int8.argmax(axis=1) == float32.argmax(axis=1))
    assert 0 < receipt.parity_relative_error < 0.1
    assert 0 < receipt.parity_max_abs_error < 0.1 * np.abs(float32).max()
    assert 0 < receipt.latency_ms_median <= receipt.latency_ms_p99
    assert receipt.speedup > 0
    assert (receipt.kernels["_FusedQuantizedConv2D"], receipt.kernels["_QuantizedMatMul"]) == (1, 1)
    assert receipt.tensorflow_version == tf.__version__
    assert receipt.unavailable == {}
    assert json.loads(receipt.to_json())["accuracy"] == receipt.accuracy


def test_the_latencies_are_those_of_the_calls(artifacts, monkeypatch):
    calls, time_calls = [], SavedModelProcess.time_calls

    def kept(*arguments, **options):
        calls.append(time_calls(*arguments, **options))
        return calls[-1]

    monkeypatch.setattr(SavedModelProcess, "time_calls", kept)
    receipt = verify(artifacts / "float32", seconds=0.1)
    assert receipt.latency_ms_median == pytest.approx(np.median(np.concatenate(calls)))
    assert receipt.latency_ms_p99 == pytest.approx(np.percentile(np.concatenate(calls), 99))


@pytest.mark.parametrize("precision", ["float32", pytest.param("int8_weight_only", marks=pytest.mark.slow)])
def test_the_weights_of_a_loop_are_counted(tmp_path, precision):
    recurrent = keras.Sequential([keras.Input((5, 16)), layers.LSTM(32), layers.Dense(4)])
    prune(recurrent, PruningConfig(target_sparsity=0.5))
    export(recurrent, tmp_path / "a", ExportConfig(precision=precision))
    receipt = verify(tmp_path / "a", seconds=0.02)
    kernels = [weight for weight in recurrent.get_weights() if weight.ndim == 2]
    assert receipt.weight_count == sum(kernel.size for kernel in kernels) == (16 + 32) * 128 + 32 * 4
    zeros = sum(int((kernel == 0).sum()) for kernel in kernels)
    assert zeros > 3000
    rounded = 0 if precision == "float32" else 0.02 * receipt.weight_count  # int8 rounds the smallest ones to zero
    assert zeros <= receipt.zero_count <= zeros + rounded


def test_the_float_receipt(model, artifacts):
    receipt = verify(artifacts / "float32", data=[(X[:50], Y[:50]), (X[50:], Y[50:])], seconds=0.02)
    kernels = [layer.kernel.numpy() for layer in model.layers if hasattr(layer, "kernel")]
    assert receipt.ok
    assert receipt.zero_count == sum(int((kernel == 0).sum()) for kernel in kernels) > 50
    assert receipt.parity_relative_error < 1e-5
    assert receipt.accuracy == accuracy(np.asarray(model(X)))
    assert receipt.speedup is receipt.agreement is receipt.baseline_accuracy is receipt.baseline is None
    assert receipt.show("speedup") == "unavailable (it has no float baseline)"
    assert "unavailable (it has no float baseline)" in str(receipt)


SPECS = {"image": TensorRecord(shape=(None, 8, 8, 3), dtype="float32")}


@pytest.mark.parametrize(
    "data",
    [
        lambda: (X, Y),
        lambda: ({"image": X}, np.eye(4)[Y]),
        lambda: tf.data.Dataset.from_tensor_slices((X.astype("float64"), Y)).batch(16),
        lambda: ((X[start : start + 9], Y[start : start + 9, None]) for start in range(0, 70, 9)),
    ],
)
def test_forms_of_data(data):
    ((inputs, given),) = chunks(data(), SPECS)
    assert inputs["image"].dtype == np.float32
    np.testing.assert_array_equal(inputs["image"], X)
    labels = given.argmax(axis=1) if given.shape == (70, 4) else given.reshape(-1)
    np.testing.assert_array_equal(labels, Y)


def test_a_fixed_batch_size_above_the_size_of_usual_calls(tmp_path):
    weights = GENERATOR.normal(size=(192, 4)).astype("float32")
    save_plain(lambda x: {"y": x @ weights}, tmp_path / "source", tf.TensorSpec([48, 192], tf.float32, "x"))
    export(tmp_path / "source", tmp_path / "a")
    x = X.reshape(70, 192)  # the second batch is not full
    receipt = verify(tmp_path / "a", data=(x, Y), seconds=0)
    assert receipt.ok
    assert receipt.batch_size == 48
    assert receipt.accuracy == accuracy(x @ weights)


@pytest.mark.slow
def test_without_data_the_reasons_are_given(artifacts):
    receipt = verify(artifacts / "int8", seconds=0.01)
    assert receipt.accuracy is receipt.agreement is receipt.baseline_accuracy is None
    assert receipt.show("accuracy") == "unavailable (no labelled data given)"
    assert receipt.speedup is not None


@pytest.mark.slow
def test_a_baseline_that_is_gone(model, tmp_path):
    export(model, tmp_path / "float32")
    export(model, tmp_path / "a", baseline=tmp_path / "float32")
    shutil.rmtree(tmp_path / "float32")
    receipt = verify(tmp_path / "a", data=(X, Y), seconds=0.01)
    assert receipt.speedup is receipt.agreement is None
    for name in ("speedup", "agreement", "baseline_accuracy"):
        assert receipt.show(name).startswith("unavailable (its baseline ")
    assert receipt.accuracy is not None
    assert receipt.ok


def test_a_baseline_that_never_was_is_refused_before_anything_is_written(model, tmp_path):
    with pytest.raises(ConfigError, match=r"baseline must be the directory of an artifact. Received: .*nowhere"):
        export(model, tmp_path / "a", baseline=tmp_path / "nowhere")
    assert not (tmp_path / "a").exists()


def two_inputs(first, second, width):
    one, other = keras.Input((8,), name=first), keras.Input((width,), name=second)
    return keras.Model([one, other], layers.Dense(3)(layers.Concatenate()([one, other])))


def test_a_baseline_whose_inputs_have_other_names(tmp_path):
    """Keras numbers unnamed inputs anew, so that a model that was saved and loaded again has others."""
    export(two_inputs("a", "b", 5), tmp_path / "float32")
    export(two_inputs("x", "c", 5), tmp_path / "again", baseline=tmp_path / "float32")
    examples = ({"x": np.zeros((4, 8), "float32"), "c": np.ones((4, 5), "float32")}, np.zeros(4, int))
    receipt = verify(tmp_path / "again", data=examples, seconds=0.01)
    assert receipt.speedup > 0
    assert receipt.agreement is not None
    export(two_inputs("x", "c", 8), tmp_path / "alike")
    with pytest.raises(
        ConfigError, match=r"artifact's inputs, a float32 \[None, 8\], b float32 \[None, 5\].*takes x f"
    ):
        verify(tmp_path / "float32", baseline=tmp_path / "alike", seconds=0.01)


def test_a_tuple_of_inputs_is_in_the_models_order(tmp_path):
    inputs = [keras.Input((1,), name=name) for name in ("d", "b", "c", "a")]
    export(keras.Model(inputs, layers.Concatenate()(inputs)), tmp_path / "a")
    given = np.eye(4, dtype="float32")  # the example i has a one in the input i
    examples = (tuple(given[:, number : number + 1] for number in range(4)), np.arange(4))
    assert verify(tmp_path / "a", data=examples, seconds=0.01).accuracy == 1.0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (X, "labelled examples"),
        ([X], "labelled examples"),
        (iter(()), "labelled examples"),
        ((X[:, :5], Y), r"shape of input 'image', \(None, 8, 8, 3\).*\(70, 5, 8, 3\)"),
        ([(X[0], Y[:8])], r"shape of input 'image'.*\(8, 8, 3\)"),
        (({"img": X}, Y), r"inputs \['image'\]. Received: no 'image'"),
        ([(X[:3], Y[:3]), (X[3:6, :5], Y[3:6])], r"shape of input 'image'.*\(3, 5, 8, 3\)"),
        ((X, Y[:-1]), "70 examples and 69 labels|one label per example"),
        (7, "Received: int"),
    ],
)
def test_data_that_will_not_do(data, message):
    with pytest.raises(ConfigError, match=message):
        list(chunks(data, SPECS))


def test_one_input_of_two_is_missing():
    specs = {name: TensorRecord(shape=(None, 3), dtype="float32") for name in ("a", "b")}
    with pytest.raises(ConfigError, match=r"no labels. The model's inputs, \['a', 'b'\], go into one"):
        list(chunks((np.zeros((4, 3)), np.zeros(4)), specs))


def test_verify_refuses_such_data(artifacts):
    with pytest.raises(ConfigError, match="labelled examples"):
        verify(artifacts / "float32", data=X, seconds=0.01)


def test_data_for_what_is_no_classifier(tmp_path):
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(2, 3)])
    export(model, tmp_path / "a")
    with pytest.raises(ConfigError, match=r"class numbers from 0 to 1, or one-hot, .* shape \(70, 6, 6, 2\)"):
        verify(tmp_path / "a", data=(X, Y), seconds=0.01)


def test_batch_size_below_one(artifacts):
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        verify(artifacts / "float32", batch_size=0)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_seconds_out_of_range(seconds, artifacts):
    with pytest.raises(ConfigError, match=rf"seconds must be .*at least 0. Received: seconds={seconds}. Pass the time"):
        verify(artifacts / "float32", seconds=seconds)


def test_a_damaged_file(model, tmp_path):
    export(model, tmp_path / "a")
    file = tmp_path / "a" / "saved_model.pb"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"saved_model\.pb, which has changed.*Export .* again"):
        verify(tmp_path / "a")
    file.unlink()
    with pytest.raises(ArtifactError, match=r"saved_model\.pb, which is missing"):
        verify(tmp_path / "a")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"name": "web"}', '{"format": 99, "tfopt": "9"}', "\xff"])
def test_a_manifest_that_is_not_ours(content, tmp_path):
    (tmp_path / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ArtifactError, match="manifest must be"):
        verify(tmp_path)


def test_no_artifact_at_all(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ArtifactError, match=r"holds no manifest\.json"):
            verify(path)


def test_outputs_other_than_those_recorded_are_a_problem(model, tmp_path):
    export(model, tmp_path / "a")
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    manifest["check"]["outputs"]["artifact"]["output_0"]["values"][0] += 1.0
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    receipt = verify(tmp_path / "a", seconds=0.01)
    assert not receipt.ok
    assert "differ from those recorded" in receipt.problems[0]
    assert main(["verify", str(tmp_path / "a")]) == 1


@pytest.mark.slow
def test_the_speedup_is_above_1_where_the_baseline_is_slower(tmp_path):
    """Both take the same inputs. The baseline computes a hundred times as much."""
    inputs = keras.Input((32, 32, 8), name="x")
    slow = inputs
    for _ in range(4):
        slow = layers.Conv2D(32, 5, padding="same")(slow)
    for name, outputs in {"fast": inputs, "slow": slow}.items():
        model = keras.Model(inputs, layers.GlobalAveragePooling2D(name="y")(layers.Conv2D(4, 1)(outputs)))
        export(model, tmp_path / name)
    receipt = verify(tmp_path / "fast", baseline=tmp_path / "slow", seconds=0.05)
    assert receipt.speedup > 1
    assert receipt.speedup_range[0] > 1
    assert receipt.verdict == "faster"


def test_outputs_that_are_not_numbers_here_are_a_problem(tmp_path):
    """Infinity is one only where there was none at export."""
    x = keras.Input((3,), name="x")
    model = keras.Model(x, layers.Lambda(lambda values: keras.ops.log(values - 0.5))(x))
    export(model, tmp_path / "a", calibration_data=np.full((2, 3), 0.5, "float32"))
    assert verify(tmp_path / "a", seconds=0.01).ok
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    manifest["check"]["ranges"]["x"] = [0.0, 0.4]
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    receipt, again = verify_together([tmp_path / "a", tmp_path / "a"], seconds=0.01)  # a receipt for each path
    assert receipt == again
    assert receipt.problems == ["The outputs hold NaN or infinity."]
    assert receipt.parity_max_abs_error is receipt.parity_relative_error is None
    assert receipt.show("parity_max_abs_error") == "unavailable (the outputs hold NaN or infinity)"


def save_plain(function, directory, *specs):
    tf.saved_model.save(tf.Module(), str(directory), signatures=tf.function(function, input_signature=specs))


def test_a_saved_model_that_ends_its_process(tmp_path):
    """As a crash in a kernel would. The op runs Python, which the other process does not know: it fails, cleanly."""
    save_plain(
        lambda x: {"y": tf.numpy_function(lambda a: a, [x], tf.float32)},
        tmp_path / "a",
        tf.TensorSpec([None], tf.float32, "x"),
    )
    with SavedModelProcess(tmp_path / "a", trusted=True) as process:
        with pytest.raises(ArtifactError, match="cannot be served"):
            process.predict({"x": np.ones(3, "float32")})
        signal_group(process._process, signal.SIGSEGV)
        process._process.wait(60)  # a fork of the tests gets it a moment later
        with pytest.raises(ArtifactError, match=r"crashed the process that ran it.*exit code -11"):
            process.predict({"x": np.ones(3, "float32")})


def test_an_artifact_that_was_calibrated_on_an_outlier(model, tmp_path):
    """Its outputs are those of the export, so nothing but the error on other examples tells."""
    outlier = X.copy()
    outlier[3, 2, 2, 1] = 1e6
    int8 = ExportConfig(precision="int8", int8_nodes="all")
    export(model, tmp_path / "a", int8, calibration_data=outlier, evaluation_data=X[:5])
    steps = []
    receipt = verify(tmp_path / "a", seconds=0, on_step=steps.append)
    assert receipt.parity_inputs == "5 examples of evaluation_data"
    assert receipt.parity_relative_error > 0.5
    (problem,) = receipt.problems
    assert re.match(r"The outputs differ from the float model's by \d+% of their scale, on 5 examples of", problem)
    assert receipt.notes[0].startswith("image: values up to 1e+06")
    assert "on 5 examples of evaluation_data" in str(receipt)
    assert [step.split()[0] for step in steps] == ["loading", "comparing", "timing"]


def test_ids_beyond_the_table_are_an_error_of_the_data(tmp_path):
    model = keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(50, 4), layers.Flatten()])
    export(model, tmp_path / "a")
    with pytest.raises(ConfigError, match=r"data must be examples.*indices\[1,2\] = 50 is not in \[0, 50\)"):
        verify(tmp_path / "a", data=(np.array([[1, 2, 3], [4, 5, 50]]), np.zeros(2, "int32")), seconds=0)


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A SavedModel whose calls never end if x is positive."""

    def serve(x):
        return {"y": tf.while_loop(lambda a: tf.reduce_any(a > 0), lambda a: a + 1.0, [x])[0]}

    directory = tmp_path_factory.mktemp("endless") / "a"
    save_plain(serve, directory, tf.TensorSpec([None], tf.float32, "x"))
    return directory


def test_a_process_that_dies_at_work(endless):
    """It dies while an answer is awaited, which must end the waiting. The kernel kills so where memory is short."""
    with SavedModelProcess(endless) as process:
        timer = threading.Timer(0.3, process._process.kill)
        timer.start()
        with pytest.raises(ServingStoppedError, match=r"SIGKILL.*does not mean that the artifact is damaged"):
            process.time_calls({"x": np.ones(1, "float32")}, seconds=0.01)
        timer.join()


@pytest.mark.slow
def test_a_process_that_hangs_is_ended_and_one_that_goes_on_is_not(endless):
    with SavedModelProcess(endless) as process:
        process.time_calls({"x": np.zeros(1, "float32")}, seconds=0)  # the first calls take long
        process.step_limit_s = 2.0
        process.time_calls({"x": np.zeros(1, "float32")}, seconds=3.0)  # longer as a whole, not in any step
        with pytest.raises(ArtifactError, match=r"must end within 2 seconds. Received: .*was ended. Pass smaller"):
            process.predict({"x": np.ones(1, "float32")})
        assert process._process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_the_process_ends_with_its_parent_also_in_a_call(endless):
    program = """
import sys, numpy as np
from tfopt.exporting import SavedModelProcess
with SavedModelProcess(sys.argv[1]) as process:
    print(process._process.pid, flush=True)
    process.predict({"x": np.ones(1, "float32")})
"""
    with subprocess.Popen([sys.executable, "-c", program, endless], stdout=subprocess.PIPE) as parent:
        serving = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    serving.wait(60)  # it raises psutil.TimeoutExpired


def test_a_damaged_saved_model(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "saved_model.pb").write_bytes(b"garbage")
    with pytest.raises(ArtifactError, match="cannot be served"), SavedModelProcess(tmp_path / "a"):
        pass


TALKATIVE = {
    "ONEDNN_VERBOSE": "2",
    "DNNL_VERBOSE": "2",  # prints to standard output, where the answers go
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_MAX_VLOG_LEVEL": "3",  # megabytes to standard error
}


@pytest.mark.slow
def test_a_talkative_process_neither_hangs_nor_garbles(artifacts, monkeypatch):
    for name, value in TALKATIVE.items():
        monkeypatch.setenv(name, value)
    with SavedModelProcess(artifacts / "float32") as process:
        outputs = process.predict({"image": X})["output_0"]
    assert outputs.shape == (70, 4)


@pytest.mark.slow
def test_the_working_directory_cannot_slip_modules_in(artifacts, tmp_path, monkeypatch):
    for module in ("tensorflow", "numpy", "json"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('not me')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    with SavedModelProcess(artifacts / "float32") as process:
        assert process.loaded["imported"] == []


@pytest.mark.slow
def test_the_callers_tensorflow_is_found_where_the_interpreter_itself_finds_none(artifacts, tmp_path, monkeypatch):
    """As after `pip install --user`, or with PYTHONPATH: this interpreter's own site-packages are empty."""
    venv.create(tmp_path / "bare", symlinks=True)
    bare = str(tmp_path / "bare" / "bin" / "python")
    assert subprocess.run([bare, "-I", "-c", "import tensorflow"], check=False, stderr=subprocess.DEVNULL).returncode
    monkeypatch.setattr("tfopt.exporting.verification.process.PYTHON", bare)
    with SavedModelProcess(artifacts / "float32") as process:
        assert process.loaded["tensorflow"] == tf.__version__
        assert process.loaded["imported"] == []


@pytest.mark.slow
def test_a_saved_model_of_keras_can_be_timed_beside(model, artifacts, tmp_path):
    """Variables in place of constants, and another process: what the benchmarks compare with."""
    model.export(tmp_path / "keras", verbose=False)
    with SavedModelProcess(tmp_path / "keras") as process:
        (outputs,) = process.predict({next(iter(process.loaded["inputs"])): X}).values()
        name = next(iter(process.loaded["inputs"]))
        kernels = sum(layer.kernel.shape.num_elements() for layer in model.layers[::2])
        assert process.count_weights()["weights"] >= kernels
    np.testing.assert_allclose(outputs, np.asarray(model(X)), atol=1e-5)
    assert name == "image"
    times = time_in_turns([tmp_path / "keras", artifacts / "int8"], {"image": X[:1]}, seconds=0.01, rounds=2)
    assert [len(calls) >= 6 for calls in times] == [True, True]
    assert min(min(calls) for calls in times) > 0


def test_standard_tools_see_no_zombie(artifacts):
    with SavedModelProcess(artifacts / "float32") as process:
        pid = process._process.pid
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    assert subprocess.run(["true"], check=False).returncode == 0


@pytest.mark.parametrize(
    ("labels", "message"),
    [(np.full(70, 9), "class numbers from 0 to 3"), (np.full(70, 0.5), "class numbers"), (Y[:3], "one label")],
)
def test_labels_that_are_none_are_refused(labels, message, artifacts):
    with pytest.raises(ConfigError, match=message):
        verify(artifacts / "float32", data=(X, labels), seconds=0.01)
