"""`tfopt init`, the run of what it writes, runs of several recipes, and `tfopt recipes diff`."""

import json
import resource
import sys
from pathlib import Path

import pytest

from tfopt.cli import commands, main
from tfopt.cli.commands import write_project
from tfopt.cli.example_data import find_example_data
from tfopt.errors import ConfigError

SHORT = ["--no-pruning", "--no-quantization", "--epochs", "1", "--max-examples", "64"]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("train", None)


def test_init_tells_how_to_run_its_files_and_code_must_be_allowed(workplace, capsys):
    assert main(["init", "mine/project"]) == 0
    said = capsys.readouterr().out
    assert "Run it: python mine/project/train.py" in said
    assert "tfopt run mine/project/recipe.toml --allow-code" in said
    assert main(["run", "mine/project/recipe.toml", *SHORT]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "model.builder must be a registered name unless you allow the file to run code" in line
    assert "--allow-code" in line


@pytest.mark.slow
def test_own_code_runs_from_the_command_and_works_wherever_a_name_does(workplace, monkeypatch, capsys):
    write_project("mine/project")
    with Path("mine/project/train.py").open("a") as file:
        file.write("\n\nfrom tfopt.tasks import TASKS\n\nOWN = TASKS['regression']\n")
    assert main(["run", "mine/project/recipe.toml", "--allow-code", *SHORT]) == 0
    artifact = str(workplace / "saved_models/mine/float32")
    capsys.readouterr()
    monkeypatch.chdir("mine/project")
    assert main(["data", "measure", "train:load", "--seconds", "0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples_per_second"] > 0
    assert main(["data", "measure", "recipe.toml", "--seconds", "0.1"]) == 2
    assert "--allow-code" in capsys.readouterr().err
    assert main(["data", "measure", "recipe.toml", "--seconds", "0.1", "--allow-code"]) == 0
    capsys.readouterr()
    assert main(["verify", artifact, "--json", "--data", "recipe.toml", "--allow-code"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] > 0
    scored = find_example_data("train:load").metric(None, "train:OWN")
    assert scored.name == "mean_absolute_error"
    assert main(["data", "convert", "train:load", "records"]) == 0
    assert list(Path("records").glob("*train*"))


@pytest.mark.slow
def test_the_script_runs_as_written(workplace, fresh_python):
    script, _ = write_project("project")
    fresh_python(script, imported="keras", check=True)
    receipts = json.loads((workplace / "saved_models/mine/receipts.json").read_text())
    assert list(receipts) == ["float32", "pruned", "int8"]
    assert receipts["int8"]["accuracy"] > 0.95


def test_init_keeps_what_is_there(workplace, capsys):
    Path("recipe.toml").write_text("mine")
    assert main(["init", "."]) == 2
    assert "must not have its files yet. Received: . with recipe.toml" in capsys.readouterr().err
    assert [path.name for path in workplace.iterdir()] == ["recipe.toml"]
    with pytest.raises(ConfigError, match="directory must be a directory"):
        write_project("recipe.toml")
    assert main(["init", "new", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ["new/train.py", "new/recipe.toml"]


def test_no_half_project_is_left_on_a_full_disk(workplace, monkeypatch, capsys):
    monkeypatch.setattr(commands, "FILES", dict(reversed(commands.FILES.items())))  # the longer file comes last
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1300, limits[1]))
    try:
        assert main(["init", "mine"]) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "train.py" in capsys.readouterr().err
    assert list(Path("mine").iterdir()) == []
    assert main(["init", "mine"]) == 0
    assert main(["init", "/proc/no"]) == 3
    assert "must be writable and have room. Received: /proc/no" in capsys.readouterr().err


def test_diff_lists_each_setting_once(workplace, capsys):
    changes = ["quantization = false", "[training]", "epochs = 3", "ema_momentum = 0.9"]
    Path("mine.toml").write_text("\n".join(['base = "digits_cnn"', *changes]))
    assert main(["recipes", "diff", "digits_cnn", "mine.toml"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (rows["name"], rows["quantization"]) == ("digits_cnn -> mine", "on -> off")
    assert rows["training.epochs"].endswith(" -> 3")
    assert rows["training.ema_momentum"] == "not set -> 0.9"
    assert main(["recipes", "diff", "digits_cnn", "mine.toml", "--json"]) == 0
    found = {each["setting"]: each["second"] for each in json.loads(capsys.readouterr().out)}
    assert found["training.epochs"] == 3
    assert main(["recipes", "diff", "mine.toml", "mine.toml"]) == 0
    assert capsys.readouterr().out == "mine.toml and mine.toml have the same settings\n"
    assert main(["recipes", "diff", "mine.toml", "nosuch"]) == 2


@pytest.mark.slow
def test_several_recipes_run_as_one(workplace, capsys):
    Path("small.toml").write_text(
        "pruning = false\nquantization = false\n[training]\nepochs = 1\n[data]\nmax_examples = 40\n"
        '[model]\nbuilder = "mlp"\narguments = {units = [4]}'
    )
    assert main(["run", "digits_cnn", "small.toml", *SHORT]) == 0
    assert "digits_cnn+small" in capsys.readouterr().out
    assert Path("saved_models/digits_cnn+small/float32").is_dir()


def test_a_run_has_one_form(workplace, capsys):
    assert main(["run", "digits_cnn", "--quick", "--form", "full"]) == 2
    assert "A run has one form at most. Received: quick, full" in capsys.readouterr().err
    assert main(["run", "digits_cnn", "--form", "nosuch"]) == 2
    assert "Unknown form 'nosuch'" in capsys.readouterr().err


OWN_CODE = """
import sys
import keras

def raises(input_shape, outputs):
    raise KeyError("boom")

def exits(input_shape, outputs):
    sys.exit(5)

def too_few():
    pass

def other_shape(input_shape, outputs):
    inputs = keras.Input((9,))
    return keras.Model(inputs, keras.layers.Dense(outputs)(inputs))
"""


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("raises", OWN_CODE, "own_code.py, line 6, raised KeyError: 'boom'"),
        ("exits", OWN_CODE, "builder must not end the process. Received: builder='own_code:exits', which calls sys.ex"),
        ("too_few", OWN_CODE, "builder must be a function of (input_shape, outputs, **arguments)"),
        ("other_shape", OWN_CODE, "must have the shape of the examples, (8,). Received: 'functional"),
        ("build", "import no_such_package", "builder must name a module whose own imports work"),
        ("build", "1 / 0", "own_code.py, line 1, raised ZeroDivisionError"),
        ("build", "def build(:", "own_code.py, line 1, raised SyntaxError"),
        ("build", "raise SystemExit(3)", "builder must not end the process"),
        ("build", "build = [1]", "builder must be a name or a function"),
    ],
)
def test_an_error_in_own_code_is_wrong_use_and_names_its_place(workplace, capsys, name, code, words):
    Path("own_code.py").write_text(code)
    Path("mine.toml").write_text(
        f'[model]\nbuilder = "own_code:{name}"\n[data]\nsource = "synthetic"\n'
        "arguments = { examples = 40, input_shape = [8], num_classes = 2 }\n"
    )
    sys.modules.pop("own_code", None)
    assert main(["run", "mine.toml", "--allow-code"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert "bug" not in line


def test_init_quotes_paths_and_needs_one(workplace, capsys):
    assert main(["init", "a b/mine"]) == 0
    assert "python 'a b/mine/train.py'" in capsys.readouterr().out
    assert main(["init", ""]) == 2
    assert "directory must be a path" in capsys.readouterr().err
