"""Real searches for speed settings, whose trials are processes of their own."""

import subprocess
import time

import keras
import numpy as np
import psutil
import pytest
from pydantic import TypeAdapter
from stubborn import Stubborn

import tfopt
from tfopt import TrainingConfig, TrainingError, TuneConfig, TuneReport
from tfopt.cli import main
from tfopt.tuning.tune_report import TuneTrial

pytest.importorskip("optuna")
SEEN = {"window_s": 0.02, "turns": 6}
RECIPE = tfopt.Recipe(
    name="tiny",
    model=tfopt.ModelConfig(builder="mlp", arguments={"units": [8]}),
    data=tfopt.DataConfig(source="synthetic", arguments={"examples": 256, "input_shape": [4]}),
    training=TrainingConfig(precision="float32", jit_compile=False, global_batch_size=2, steps_per_execution=1),
)


@pytest.mark.slow
def test_the_command_finds_settings_that_are_faster_and_that_a_run_takes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TFOPT_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "tiny.toml"
    file.write_text(RECIPE.to_toml())
    words = ["--window-s", "0.05", "--turns", "8", "--max-trials", "3", "--json", "--directory", str(tmp_path / "run")]
    assert main(["tune", *words, str(file)]) == 0
    report = TuneReport.from_json(capsys.readouterr().out)
    assert report == TuneReport.from_json((tmp_path / "run" / "tune.json").read_bytes())
    if not report.changes:
        pytest.skip("this machine is too busy to tell one setting from another")
    # a step of so small a model is the way through Python, which several steps in one call save
    assert report.changes["steps_per_execution"] > 1
    assert report.speedup.least > 1
    assert {each.setting for each in report.contributions} == (
        set(report.changes) if len(report.changes) > 1 else set()
    )
    assert report.kept == ""  # it changes what the recipe asks for
    assert not (tmp_path / "cache").exists()
    (tmp_path / "fast.toml").write_text(report.to_toml())
    changed = tfopt.recipes.compose(file, tmp_path / "fast.toml")
    assert changed.training.steps_per_execution == report.changes["steps_per_execution"]
    assert main(["run", str(file), str(tmp_path / "fast.toml"), "--quick"]) == 0


@pytest.mark.slow
def test_a_trial_that_always_fails_is_recorded_and_the_search_goes_on(tmp_path):
    model = keras.Sequential([keras.Input((8,)), Stubborn(), keras.layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = [each.numpy() for each in model.weights]
    data = np.random.default_rng(0).random((256, 8), np.float32), np.arange(256) % 4
    training = TrainingConfig(precision="float32", jit_compile=False, global_batch_size=32, steps_per_execution=1)
    config = TuneConfig(max_trials=2, **SEEN)
    report = tfopt.tune(model, data, config, training=training, directory=tmp_path / "run")
    assert [each.changes for each in report.trials] == [{"jit_compile": True}, {"accumulate": 2}]
    assert [each.state for each in report.trials][-1] == "failed"
    assert "a batch must have 32 examples" in report.trials[1].reason
    assert "accumulate" not in report.changes
    assert all((one == other.numpy()).all() for one, other in zip(before, model.weights, strict=True))


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on_with_the_same_trials(tmp_path, fresh_python):
    (tmp_path / "tiny.toml").write_text(RECIPE.to_toml())
    run = tmp_path / "run"
    words = ["-m", "tfopt", "tune", "--json", "--window-s", "0.02", "--turns", "6", "--directory", str(run)]
    command = [str(fresh_python.interpreters["tfopt"]), *words]
    first = run / "trials" / "000" / "trial.json"
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen([*command, "tiny.toml"], cwd=tmp_path, stdout=log, stderr=log)
        end = time.monotonic() + 300
        while time.monotonic() < end and process.poll() is None and not first.is_file():
            time.sleep(0.05)
        fresh_python.kill(process)
    assert first.is_file(), (tmp_path / "log.txt").read_text()
    end = time.monotonic() + 60
    while trials := [
        each for each in psutil.process_iter(["cmdline"]) if str(run) in " ".join(each.info["cmdline"] or [])
    ]:
        assert time.monotonic() < end, trials
        time.sleep(0.1)
    written = first.stat().st_mtime_ns
    again = subprocess.run(
        [*command, "--max-trials", "2", "tiny.toml"], cwd=tmp_path, capture_output=True, check=True, text=True
    )
    report = TuneReport.from_json(again.stdout)
    assert first.stat().st_mtime_ns == written
    assert [each.number for each in report.trials] == [0, 1]
    assert report.trials[0] == TypeAdapter(TuneTrial).validate_json(first.read_bytes())
    with pytest.raises(tfopt.ConfigError, match="which has another search"):
        tfopt.tune(tmp_path / "tiny.toml", config=TuneConfig(seed=1, **SEEN), directory=run)


@pytest.mark.slow
def test_a_training_that_fails_as_it_is_has_the_cause():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    with pytest.raises(TrainingError, match="must run as it is"):
        tfopt.tune(model, (np.zeros((64, 8), np.float32), np.zeros((64, 5), np.float32)))
    with pytest.raises(tfopt.ConfigError, match="must be enough to train"):
        tfopt.tune(model, (np.zeros((64, 8)), np.zeros((64, 4))), TuneConfig(minutes=0.001))
