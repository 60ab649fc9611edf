"""`tfopt doctor` on scripts that know nothing of tfopt: they do what they do without it."""

import json

import keras
import numpy as np
import pytest
from test_accelerate import CODES, EXAMPLES, without_times

from tfopt.cli import main
from tfopt.diagnosis import experiments
from tfopt.errors import ConfigError, TrainingError
from tfopt.scripts.doctor import diagnose_script


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["functional", "own_train_step", "custom_loop"])
def test_an_unmodified_script_computes_the_same(tmp_path, name, fresh_python):
    script = EXAMPLES / f"{name}.py"
    ends = {}
    for how, command in (("plain", []), ("watched", ["-m", "tfopt", "doctor", "--steps", "20", "--out", "found"])):
        ends[how] = fresh_python(*command, script, f"{how}.npz", cwd=tmp_path)
    plain, watched = ends.values()
    assert watched.returncode == plain.returncode == CODES.get(name, 0), watched.stderr[-3000:]
    assert without_times(watched.stdout) == without_times(plain.stdout).replace("plain.npz", "watched.npz") != ""
    with np.load(tmp_path / "plain.npz") as one, np.load(tmp_path / "watched.npz") as other:
        assert one.files == other.files != []
        assert all(np.array_equal(one[key], other[key]) for key in one.files)
    if name == "custom_loop":
        assert "must train with keras.Model.fit" in watched.stderr
        return
    found = json.loads((tmp_path / "found" / "diagnosis.json").read_text())
    assert found["breakdown"]["steps"] >= 13
    assert f"{name}.py:" in found["name"]
    assert (tmp_path / "found" / "report.html").stat().st_size > 1000


TRAIN = """
import sys
import keras, numpy as np
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", run_eagerly=True)
model.fit(np.zeros((256, 4)), np.zeros((256, 1)), batch_size=16, verbose=0)
print("trained", sys.argv[1:])
sys.exit(3)
"""


@pytest.mark.slow
def test_the_words_after_a_script_are_its_own(tmp_path, capsys, monkeypatch):
    for name, value in {"SECONDS": 0.1, "SETTLES": 0.02, "TURNS": 4}.items():
        monkeypatch.setattr(experiments, name, value)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    before = keras.Model.fit
    assert main(["doctor", "--steps", "12", "--json", str(script), "--json", "--steps", "x"]) == 3
    assert keras.Model.fit is before
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first == "trained ['--json', '--steps', 'x']"
    found = json.loads(rest)
    assert found["diagnoses"][0]["cause"] == "eager"
    assert found["name"].endswith(f"{script}:6")


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("print(1)", 0, "must train with keras.Model.fit"),
        ("raise SystemExit(4)", 4, "must train with keras.Model.fit"),
        (TRAIN.replace("256", "16"), 3, "fit must run at least 2 steps. Received: 1 steps"),
    ],
)
def test_a_script_that_cannot_be_measured_keeps_its_exit_code(tmp_path, text, code, message):
    script = tmp_path / "train.py"
    script.write_text(text)
    ended, found = diagnose_script(str(script), [])
    assert ended == code
    assert isinstance(found, TrainingError)
    assert message in str(found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "2", "x.py"], "steps must be at least 4"),
        (["--apply", "x.py"], "--apply is for recipes"),
        (["--json"], "A script or a recipe must be named"),
        (["--bogus", "x.py"], "Received: --bogus"),
        (["."], "Received: ., a directory"),
        (["digits_cnn", "more"], "A recipe takes no further words"),
        (["no-such-script.py"], "no-such-script.py, which does not exist"),
    ],
)
def test_wrong_words(words, message, capsys):
    assert main(["doctor", *words]) == 2
    shown = capsys.readouterr()
    assert message in shown.err


def test_a_missing_script_is_refused():
    with pytest.raises(ConfigError, match="does not exist"):
        diagnose_script("missing.py", [])
