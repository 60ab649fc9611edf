import contextlib
import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.atomic.scratch import scratch_directory
from tfopt.cli import COMMANDS, entry, main
from tfopt.errors import ArtifactError, ConfigError, ExportError, TfoptWarning, TrainingError, UnsupportedModelError
from tfopt.models import BUILDERS
from tfopt.models.table import PUBLISHED_MODELS
from tfopt.recipe import Recipe
from tfopt.recipes import RECIPES
from tfopt.settings.flags import expand, flag_paths, parse, stages
from tfopt.signals import on_signals

TINY = """
name = "tiny"
export_dir = "artifacts"
[model]
builder = "mlp"
arguments = { units = [16] }
[data]
source = "synthetic"
arguments = { examples = 200, input_shape = [8], num_classes = 4 }
[training]
epochs = 2
[pruning]
target_sparsity = 0.5
epochs = 1
frequency = 1
[quantization]
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path


@pytest.fixture
def unbuilt(workplace):
    keras.Sequential([keras.layers.Dense(3)]).save("unbuilt.keras")


@pytest.fixture
def built(workplace):
    keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)], name="built").save("built.keras")


@pytest.fixture
def tfopt_process(fresh_python):
    """Runs the command, as users start it."""
    return lambda *words, **options: fresh_python("-m", "tfopt", *words, **options)


# Words, and what the one line on standard error must hold: the value received, and the rule or the remedy.
WRONG = {
    "run nosuch": ["'nosuch'", "'digits_cnn'"],
    "nosuch": ["'nosuch'", "'run'"],
    "rum tiny.toml": ["Did you mean 'run'?"],
    "run missing.toml": ["missing.toml", "readable"],
    "run malformed.toml": ["malformed.toml", "valid TOML", "line 2"],
    "run misspelt.toml": ["'pruning.target_sparsty'", "Did you mean 'pruning.target_sparsity'?"],
    "run mistyped.toml": ["training.epochs", "'many'"],
    "run tiny.toml --nosuch 3": ["--nosuch"],
    "run tiny.toml --epoch 3": ["--epoch", "Did you mean --epochs?"],
    "run tiny.toml --target-sparsity 90": ["target_sparsity must be in [0, 1)", "90", "0.9"],
    "run tiny.toml --pruning.target-sparsity=-1": ["target_sparsity", "-1"],
    "run tiny.toml --epochs many": ["--training.epochs", "many"],
    "run tiny.toml --epochs 0": ["epochs must be a whole number of at least 1", "0"],
    "run tiny.toml --epochs": ["--training.epochs"],
    "run tiny.toml --precision half": ["'half'", "mixed_bfloat16"],
    "run tiny.toml --builder resnet": ["'resnet'", "'resnet_cifar'"],
    "run tiny.toml --model.arguments depth=3": ["depth", "units"],
    "run tiny.toml --model.arguments depth": ["KEY=VALUE"],
    "run tiny.toml stray": ["stray"],
    "run tiny.toml --no-pruning --pruning.epochs 3": ["left out has no settings", "--no-pruning with --pruning.epochs"],
    "run resnet_distilled --no-distillation --epochs 0": ["epochs must be a whole number of at least 1"],
    "run --quick": ["The recipe must come first"],
    "export unbuilt.keras out": ["built", "'sequential"],
    "export nowhere out": ["nowhere", "saved_model.pb"],
    "export built.keras out --precision int8": ["calibration_data", "None"],
    "export built.keras out --precision int4": ["'int4'", "int4_weight_only"],
    "export built.keras out --precision int8 --calibration-data nowhere.npy": ["nowhere.npy"],
    "export built.keras out --precision int8 --calibration-data wrong.npy": ["(None, 8)", "(5, 3)"],
    "export": ["IN", "OUT"],
    "export built.keras out --top-k 5": ["at most the number of classes, 4", "top_k=5"],
    "export built.keras out --scale 0.5": ["one input of images", "(None, 8)"],
    "export built.keras out --formats": ["formats must name at least one format"],
    "export built.keras out --formats litert --format onnx": ["--format must not be given with it"],
    "verify nowhere": ["nowhere", "manifest.json"],
    "verify": ["DIR"],
    "publish nowhere repository": ["nowhere", "manifest.json"],
    "devices --gpus-per-host 4": ["--gpus-per-host", "Add --advise NAME"],
}


# The words are right, and it cannot be done here.
FAILED = {
    "run tiny.toml --export-dir tiny.toml/x": ["tiny.toml/x/float32", "writable"],
    "export built.keras tiny.toml/x": ["tiny.toml/x", "writable"],
    "export built.keras . ": ["holds something else"],
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("words", [*WRONG, *FAILED])
def test_wrong_use_is_one_clear_line_and_writes_nothing(words, workplace, unbuilt, built, capfd):
    (workplace / "malformed.toml").write_text('name = "x"\n[training\n')
    (workplace / "misspelt.toml").write_text("[pruning]\ntarget_sparsty = 0.5\n")
    (workplace / "mistyped.toml").write_text('[training]\nepochs = "many"\n')
    np.save(workplace / "wrong.npy", np.zeros((5, 3), np.float32))
    before = sorted(workplace.rglob("*"))
    capfd.readouterr()
    assert main(words.split()) == (2 if words in WRONG else 3)
    error = capfd.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("tfopt:")]
    assert len(lines) == 1, error
    assert all(part in lines[0] for part in (WRONG | FAILED)[words]), lines[0]
    assert "Traceback" not in error
    assert sorted(workplace.rglob("*")) == before


WITHOUT_TENSORFLOW = """
import sys
from tfopt.cli import COMMANDS, entry, main
for words in (
    "--help", "--version", "recipes", "recipes --json", "models", "models --json", "run", "run nosuch", "nosuch",
    "run digits_cnn --nosuch 3", "run digits_cnn --epochs 0", "run digits_cnn --quick --help",
    "export --precision int4 a b", "verify", "launch --workers none x.py", *(f"{name} --help" for name in COMMANDS),
):
    try:
        code = main(words.split())
    except SystemExit as stop:
        code = stop.code
    assert code in (0, 2), (words, code)
    assert not {"tensorflow", "keras"} & set(sys.modules), words
import tfopt.cli.audit_script, tfopt.tuning.script  # a script may set environment variables before its own import
assert not {"tensorflow", "keras"} & set(sys.modules)
"""


def test_tensorflow_is_not_imported_where_no_tensor_is_needed(fresh_python):
    done = fresh_python("-c", WITHOUT_TENSORFLOW, imported="nothing", check=True)
    assert all(line.startswith("tfopt: ") for line in done.stderr.splitlines())


@pytest.mark.parametrize("imported", ["tfopt", pytest.param("nothing", marks=pytest.mark.slow)])
def test_standard_error_holds_the_error_alone(imported, workplace, fresh_python):
    """TensorFlow writes notices at import whatever its log level is; they must not bury the line."""
    done = fresh_python("-m", "tfopt", "export", "nowhere", "out", imported=imported)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tfopt: ")
    assert "nowhere" in line


@pytest.fixture
def failing(monkeypatch):
    """A command that does what it is given."""

    def command(action):
        monkeypatch.setitem(COMMANDS, "fail", action)

    return command


def raising(error):
    """Returns a command that raises an error in a file of tfopt, as a bug of tfopt would."""
    names = {"error": error}
    exec(compile("def action(words):\n    raise error", tfopt.cli.__file__, "exec"), names)
    return names["action"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong"), 2),
        (UnsupportedModelError("wrong"), 2),
        (ArtifactError("wrong"), 2),
        (ExportError("wrong"), 3),
        (TrainingError("wrong"), 3),
        (KeyError("wrong"), 70),
        (OSError(errno.ENOSPC, "wrong"), 3),
        (MemoryError("wrong"), 3),
        (RuntimeError("can't start new thread"), 3),
        (RuntimeError("Resource temporarily unavailable"), 3),
        (RuntimeError("of another: can't start new thread"), 70),
        (ImportError("x.so: failed to map segment from shared object"), 3),
        (FileNotFoundError(errno.ENOENT, "wrong"), 2),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_kind_of_failure_has_its_exit_code_and_one_line(error, code, failing, capsys):
    failing(raising(error))
    assert main(["fail"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert ((str(error) or "wrong") in captured.err) == (code != 130)
    assert (f"unexpected {type(error).__name__}" in captured.err) == (code == 70)

    assert main(["fail", "--json"]) == code
    described = json.loads(capsys.readouterr().out)["error"]
    assert described["type"] == type(error).__name__
    assert described["exit_code"] == code


def test_sigterm_ends_a_command_as_ctrl_c_does(failing, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def waiting(words):
        with scratch_directory():
            signal.raise_signal(signal.SIGTERM)
        return 0

    failing(waiting)
    assert main(["fail"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "tfopt: ended by SIGTERM\n"
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("made_of_it", [SystemError("bad argument to internal function"), ConfigError("a bad file")])
def test_a_signal_ends_a_command_whatever_a_library_makes_of_it(number, code, made_of_it, failing, capsys, monkeypatch):

    def swallowed(words):
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            sys.excepthook(*sys.exc_info())  # as code in C prints what it cannot raise
            raise made_of_it from None

    hook = sys.excepthook
    failing(swallowed)
    with on_signals([signal.SIGINT], signal.default_int_handler):  # which the background of a shell ignores
        assert main(["fail"]) == code
    assert capsys.readouterr().err in ("tfopt: interrupted\n", "tfopt: ended by SIGTERM\n")
    assert sys.excepthook is hook


def test_ctrl_c_while_the_command_is_imported_shows_no_traceback():
    program = """
import builtins, runpy, signal
imported = builtins.__import__
def interrupt(name, *more, **options):
    if name == "tfopt.cli":
        signal.raise_signal(signal.SIGINT)
    return imported(name, *more, **options)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
builtins.__import__ = interrupt
runpy.run_module("tfopt", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_a_module_is_imported_before_the_command_and_the_words_of_a_script_stay(failing, monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    seen = []
    failing(lambda words: seen.append((words, "this" in sys.modules)) or 0)
    assert main(["--import", "this", "fail", "--more"]) == 0
    assert main(["fail", "--import", "json", "--more"]) == 0
    assert seen == [(["--more"], True)] * 2
    for words, expected in [
        ("--import a accelerate train.py --import b", ("accelerate train.py --import b", "a")),
        ("tune --import a --json train.py --import b", ("tune --json train.py --import b", "a")),
        ("doctor --import a train.py", ("doctor train.py", "a")),
        ("launch --import a train.py", ("launch --import a train.py", "")),
        ("monitor --import a -- program --import b", ("monitor -- program --import b", "a")),
    ]:
        left, modules = entry._without_imports(words.split())
        assert (" ".join(left), " ".join(modules)) == expected


def test_a_traceback_is_shown_on_demand_only(failing, capsys):
    failing(raising(KeyError("lost")))
    for words, shown in ((["fail"], False), (["fail", "--traceback"], True), (["--traceback", "fail"], True)):
        assert main(words) == 70
        error = capsys.readouterr().err
        assert ("Traceback (most recent call last)" in error) == shown
        assert ("--traceback shows" in error) != shown
        assert error.splitlines()[-1].startswith("tfopt: unexpected KeyError: 'lost'")


def test_a_long_unexpected_message_is_cut(failing, capsys):
    failing(raising(RuntimeError("graph\n" * 1000)))
    assert main(["fail"]) == 70
    assert len(capsys.readouterr().err) < 500


@pytest.mark.filterwarnings("default")
def test_warnings_are_lines_without_files_and_source(failing, capsys):
    def warn(words):
        warnings.warn("prune changed\nnothing", TfoptWarning, stacklevel=1)
        warnings.warn("of another library", RuntimeWarning, stacklevel=1)
        return 0

    failing(warn)
    shown = warnings.showwarning
    assert main(["fail"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "tfopt: warning: prune changed nothing",
        "tfopt: warning: of another library",
    ]
    assert warnings.showwarning is shown


@pytest.mark.parametrize(
    "words",
    ["recipes", "run digits_cnn --help", pytest.param("run digits_cnn --export-dir None", marks=pytest.mark.slow)],
)
def test_a_reader_that_has_enough_is_no_error(words, tfopt_process):
    reader, writer = os.pipe()
    os.close(reader)  # what `| head` does when it has read its lines
    try:
        done = tfopt_process(*words.split(), capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert done.returncode == 141  # 128 + SIGPIPE
    assert done.stderr == ""


@pytest.mark.slow
def test_another_backend_of_keras_is_refused_with_the_remedy(tmp_path, fresh_python, tfopt_process):
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KERAS_")}
    for settings, name in (({"KERAS_HOME": str(tmp_path)}, "torch"), ({"KERAS_BACKEND": "jax"}, "jax")):
        environment = inherited | settings
        done = tfopt_process("devices", env=environment)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert f"'{name}'" in line
        assert "KERAS_BACKEND=tensorflow" in line
    code = "import tfopt\ntry:\n    tfopt.plan()\nexcept tfopt.ConfigError as error:\n    print(error)"
    python = fresh_python("-c", code, env=environment, check=True)
    assert f"tfopt: {python.stdout}" == done.stderr
    assert tfopt_process("recipes", env=environment).returncode == 0


def test_run_export_verify(workplace, capsys):
    assert main(["run", "tiny.toml", "--json", "--target-sparsity", "0.75", "--no-quantization"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert "tiny" in captured.err
    assert list(report["receipts"]) == ["float32", "pruned"]
    pruned = report["receipts"]["pruned"]
    assert pruned["zero_count"] / pruned["weight_count"] == pytest.approx(0.75, abs=0.01)

    np.save("x.npy", np.random.default_rng(0).random((50, 8), dtype=np.float32))
    np.savez("test.npz", x=np.zeros((6, 8), np.float32), y=np.zeros(6, np.int64))
    words = ["artifacts/pruned", "int8", "--precision", "int8", "--int8-nodes", "all", "--json"]
    words += ["--calibration-data", "x.npy"]
    budget = ["--evaluation-data", "test.npz", "--quantization.max-accuracy-drop", "0.5"]
    assert main(["export", *words, *budget, "--calibration-examples", "40"]) == 0
    exported = json.loads(capsys.readouterr().out)
    assert exported["precision"] == "int8"
    assert set(exported["report"]["metrics"]) == {"float", "int8", "kept"}

    assert main(["verify", "int8", "--data", "test.npz", "--json"]) == 0
    receipt = json.loads(capsys.readouterr().out)
    assert receipt["baseline"] == "artifacts/pruned"
    assert receipt["agreement"] is not None
    assert receipt["kernels"]["_QuantizedMatMul"] == 2

    assert (
        main(["export", "artifacts/pruned", "artifacts/pruned", "--precision", "float16", "--minimum-size", "1"]) == 0
    )
    manifest = json.loads((workplace / "artifacts" / "pruned" / "manifest.json").read_text())
    assert manifest["precision"] == "float16"
    assert manifest["baseline"] is None  # not itself
    capsys.readouterr()

    model = workplace / "int8" / "saved_model.pb"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    assert main(["verify", "int8", "--json"]) == 1
    captured = capsys.readouterr()
    described = json.loads(captured.out)["error"]
    assert (described["type"], described["exit_code"]) == ("ArtifactError", 1)
    assert "has changed" in described["message"]
    assert captured.err == f"tfopt: {described['message']}\n"

    (workplace / "int8" / "manifest.json").write_text("{")
    assert main(["verify", "int8"]) == 1  # damaged as well
    assert "must be readable JSON" in capsys.readouterr().err
    model.unlink()
    assert main(["verify", "int8"]) == 2  # nothing says any more that this is an artifact


def test_devices_are_listed(capsys):
    assert main(["devices", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["logical_cores"] == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("command", ["recipes", "models"])
def test_listings_wrap_at_the_width_of_a_terminal_and_nowhere_else(command, fresh_python, tfopt_process):
    environment = os.environ | {"COLUMNS": "50"}
    controller, terminal = os.openpty()
    with fresh_python.running("-m", "tfopt", command, stdout=terminal, env=environment) as process:
        os.close(terminal)
        on_terminal = read_all(controller).decode().splitlines()
        process.wait()
    os.close(controller)
    piped = tfopt_process(command, env=environment).stdout.splitlines()
    assert process.returncode == 0
    assert max(map(len, on_terminal)) <= 50
    assert max(map(len, piped)) > 50
    assert " ".join(" ".join(on_terminal).split()) == " ".join(" ".join(piped).split())
    starts = ("", "published", "cost", *RECIPES, *BUILDERS, *PUBLISHED_MODELS)  # the other lines are indented
    assert {line.split(" ")[0] for line in on_terminal} <= set(starts)


def read_all(controller):
    """Reads what a process writes to a terminal, which ends with an error of input and output."""
    parts = []
    with contextlib.suppress(OSError):
        while part := os.read(controller, 4096):
            parts.append(part)
    return b"".join(parts)


def test_every_command_has_help(capsys):
    assert main(["--help"]) == 0
    assert main(["run", "--help"]) == 0
    for command in ("export", "verify", "recipes", "models", "devices", "run digits_cnn"):
        with pytest.raises(SystemExit) as stop:
            main([*command.split(), "--help"])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert command in shown
        assert "(default: )" not in shown


def test_the_help_of_each_listing_says_what_it_lists(capsys):
    for command, words in (("recipes", "recipes"), ("models", "model builders"), ("devices", "processor")):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert words in capsys.readouterr().out


def test_help_flows_over_the_line_breaks_of_the_source(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "800")
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    assert "compute in float32 and differ in the stored weights:" in capsys.readouterr().out


def test_flags_come_from_the_dataclasses():
    paths = flag_paths(Recipe)
    assert {"training.epochs", "pruning.target-sparsity", "quantization.observer", "export-dir"} <= set(paths)
    assert list(stages(Recipe)) == ["shrink", "pruning", "clustering", "quantization", "distillation"]
    assert expand(Recipe, ["--epochs", "3"]) == ["--training.epochs", "3"]
    with pytest.raises(ConfigError, match="--exclude"):  # pruning's or quantization's
        expand(Recipe, ["--exclude", "x"])


def test_flags_override_the_recipe_and_keep_the_rest():
    recipe = RECIPES["digits_cnn"]
    words = ["--epochs", "3", "--model.arguments", "filters=[4,8]", "dropout=0.5", "--export-dir", "None"]
    parsed = parse(Recipe, words, "tfopt run digits_cnn", recipe)
    assert parsed.training.epochs == 3
    assert parsed.model.arguments == {"filters": [4, 8], "dropout": 0.5}
    assert parsed.export_dir is None
    assert parsed.pruning == recipe.pruning
    assert parse(Recipe, [], "tfopt run digits_cnn", recipe) == recipe


@pytest.mark.slow
def test_a_stage_that_is_off_is_turned_on_by_its_flag(workplace, capsys):
    (workplace / "plain.toml").write_text(TINY.split("[pruning]")[0])
    assert main(["run", "plain.toml", "--json", "--pruning.target-sparsity", "0.5", "--pruning.epochs", "1"]) == 0
    assert list(json.loads(capsys.readouterr().out)["receipts"]) == ["float32", "pruned"]


def test_the_script_takes_the_flags_of_the_recipe(workplace, fresh_python):
    script = Path(__file__).parents[1] / "recipes" / "digits_cnn.py"
    done = fresh_python(script, "--target-sparsity", "90", imported="keras")
    assert done.returncode == 2
    assert "target_sparsity=90" in done.stderr


def intact(directory):
    """Whether an artifact's directory is absent or whole: its digests hold and TensorFlow serves it."""
    if not directory.exists():
        return True
    manifest = json.loads((directory / "manifest.json").read_text())
    for name, recorded in manifest["files"].items():
        assert hashlib.sha256((directory / name).read_bytes()).hexdigest() == recorded["sha256"]
    serve = tf.saved_model.load(str(directory)).signatures["serving_default"]
    return set(serve.structured_input_signature[1]) == set(manifest["signature"]["inputs"])


@pytest.mark.slow
def test_a_killed_run_leaves_no_half_written_artifact(workplace, fresh_python):
    """SIGKILL at some moment of the run, and as soon as an export has begun to write."""
    generator = random.Random(0)
    killed, began = 0, False
    for attempt in range(2):
        process = subprocess.Popen(
            [fresh_python.interpreters["tfopt"], "-m", "tfopt.cli", "run", "tiny.toml"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        artifacts = workplace / "artifacts"
        deadline = time.monotonic() + (300 if attempt % 2 else generator.uniform(1, 5))
        wanted = "int8"
        while time.monotonic() < deadline and process.poll() is None:
            if attempt % 2 and any(artifacts.glob(f".{wanted}.tmp-*")):
                began = True
                time.sleep(generator.uniform(0, 0.05))
                break
            time.sleep(0.002)
        killed += process.poll() is None
        fresh_python.kill(process)
        for name in ("float32", "pruned", "int8"):
            assert intact(artifacts / name), (attempt, name)
    assert killed
    assert began
    result = tfopt.run("tiny.toml")
    assert result.ok
    assert not [path for path in artifacts.iterdir() if path.name.startswith(".")]
