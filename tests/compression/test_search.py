"""Whole searches with real trainings: stopped, continued, cut by time, and what their artifacts are worth."""

import importlib
import json
import time
from dataclasses import replace

import keras
import numpy as np
import pytest
from keras import layers

import tfopt
from tfopt.cli import main
from tfopt.cli.exit_codes import SUCCESS
from tfopt.compression.config import BYTES, DROP, CompressionConfig
from tfopt.compression.front import excess
from tfopt.compression.search import compress
from tfopt.compression.trial import read_losses
from tfopt.errors import ConfigError, TrainingError
from tfopt.pruning import StructuredPruningConfig
from tfopt.recipe import Recipe
from tfopt.trials.study import STARTUP, Study

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.slow
MS = "ms at batch 8"


def proposals(folder):
    return optuna.load_study(study_name="compression", storage=f"sqlite:///{folder / 'study.db'}").trials


def wait_for(happened, process, seconds=180):
    """Waits until something has happened, as long as a process runs."""
    last = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, "the search has ended"
        assert time.monotonic() < last
        time.sleep(0.05)


def test_a_search_that_is_killed_goes_on_with_the_same_trials(tmp_path, fresh_python, capsys):
    data = tfopt.data.digits()
    model = tfopt.models.simple_cnn((32, 32, 1), 10, filters=[16, 32], kernel_size=3)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(data.x_train, data.y_train, epochs=4, verbose=0)
    model.save(tmp_path / "model.keras")
    folder, before = tmp_path / "run", [each.copy() for each in model.get_weights()]
    words = ["compress", str(tmp_path / "model.keras"), str(folder), "--data", "digits", "--batch-sizes", "8"]
    words += ["--shrink.round-to", "8", "--shrink.epochs", "3"]
    config = CompressionConfig(batch_sizes=(8,), shrink=StructuredPruningConfig(round_to=8, epochs=3))
    with fresh_python.running("-m", "tfopt", *words) as process:
        wait_for(lambda: len(list(folder.glob("trials/*/request.json"))) == 2, process)
    (measured,) = folder.glob("trials/*/outcome.json")
    first = [each.params for each in proposals(folder)]
    space = proposals(folder)[0].distributions
    again = Study(tmp_path / "again.db", "again", [DROP, MS, BYTES], space, seed=0).propose(STARTUP)
    assert list(again.values()) == first  # the same seed proposes the same

    # One that takes too long is recorded, and the search goes on.
    short = compress(model, data, replace(config, trial_limit_s=1.0, max_trials=2), directory=folder)
    assert [each.reason for each in short.trials if each.state == "failed"] == ["it took over 1 s"]
    written = measured.stat().st_mtime_ns
    steps = []
    report = compress(model, data, replace(config, max_trials=3), directory=folder, on_step=steps.append)
    assert [words.split(",")[0].rsplit(" ", 1)[0] for words in steps if words.startswith("training")] == [
        "training trial"
    ]
    assert measured.stat().st_mtime_ns == written
    states = [each.state for each in report.trials]
    assert (states.count("measured"), states.count("failed")) == (2, 1)
    assert report.ended == "by max_trials=3; a call with more goes on"
    assert all(each.reason for each in report.trials if each.state == "left out")
    assert [each.settings for each in report.trials][:STARTUP] == first
    for number, each in enumerate(report.trials):
        if each.state == "measured":
            assert len(read_losses(folder / "trials" / f"{number:03d}")) == 3

    small = min(report.front, key=lambda each: each.figures[BYTES])
    assert small.multiply_adds < 1
    assert small.figures[BYTES] < report.baseline[BYTES] / 4
    assert small.receipts[0].precision in ("int8", "int8_weight_only")  # the clock decides over the nodes
    assert Recipe.from_toml(small.recipe).shrink.ratios
    outputs = keras.layers.TFSMLayer(small.artifact, "serving_default")(data.x_test)
    found = np.mean(np.argmax(next(iter(outputs.values())), -1) == data.y_test)
    assert found == pytest.approx(small.receipts[0].scores["accuracy"], abs=0.01)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ConfigError, match="a compression with seed=0 in place of 1"):
        compress(model, data, replace(config, seed=1), directory=folder)

    # Another budget judges the same trials, and leaves out what they show to be too large.
    bound = int((report.baseline[BYTES] + small.figures[BYTES]) / 4)
    assert main([*words, "--max-trials", "3", "--max-bytes", str(bound), "--json"]) == SUCCESS
    narrow = json.loads(capsys.readouterr().out)
    assert narrow["budget"] == {BYTES: bound}
    assert any(not excess(each["figures"], narrow["budget"]) for each in narrow["front"])


def dense(*more):
    keras.utils.set_random_seed(0)
    body = [layers.Dense(32, "relu", name="a"), layers.Dense(32, "relu", name="b"), layers.Dense(3), *more]
    model = keras.Sequential([keras.Input((6,)), *body])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).normal(size=(120, 6)).astype("float32")
    return model, tfopt.data.arrays(x, (x[:, 0] > 0).astype(int) + (x[:, 1] > 0))


def test_a_training_that_never_ends_is_cut_by_the_time_and_may_be_tried_again(tmp_path):
    model, data = dense()
    endless = StructuredPruningConfig(round_to=8, epochs=10**6)
    config = CompressionConfig(batch_sizes=(8,), shrink=endless, quantization=None, max_trials=0)
    report = compress(model, data, config, directory=tmp_path / "run")
    assert [each.name for each in report.front] == ["unshrunk"]
    assert {each.state for each in report.trials} <= {"open", "left out"}
    start, limit = time.monotonic(), 25.0
    report = compress(model, data, replace(config, time_limit_s=limit, max_trials=None), directory=tmp_path / "run")
    assert time.monotonic() - start < 2 * limit
    assert [each.name for each in report.front] == ["unshrunk"]
    assert {each.state for each in report.trials} <= {"open", "left out"}
    assert any("its time was over after" in each.reason for each in report.trials)
    assert f"by time_limit_s={limit:g}; the same call goes on" in str(report)
    assert (tmp_path / "run" / "front.svg").is_file()
    assert not list((tmp_path / "run").glob("trials/*/outcome.json"))


OWN = """
import keras, numpy as np, tfopt
@keras.saving.register_keras_serializable('mine')
class Twice(keras.layers.Layer):
    def call(self, inputs):
        return 2 * inputs
def examples():
    x = np.random.default_rng(0).normal(size=(120, 6)).astype("float32")
    return tfopt.data.arrays(x, (x[:, 0] > 0).astype(int) + (x[:, 1] > 0))
"""


def test_a_layer_of_the_users_own_module_is_known_to_the_command_and_in_its_trials(tmp_path, monkeypatch, fresh_python):
    (tmp_path / "own_layers_of_a_user.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    model, _ = dense(importlib.import_module("own_layers_of_a_user").Twice())
    model.save(tmp_path / "model.keras")
    words = ["compress", "model.keras", "run", "--data", "own_layers_of_a_user:examples", "--max-trials", "0"]
    words += ["--batch-sizes", "8", "--shrink.round-to", "8", "--json"]
    monkeypatch.chdir(tmp_path)
    refused = fresh_python("-m", "tfopt", *words, check=False)
    assert "in own_layers_of_a_user (--import of the command)" in refused.stdout + refused.stderr
    report = json.loads(fresh_python("-m", "tfopt", *words, "--import", "own_layers_of_a_user").stdout)
    assert [each["name"] for each in report["front"]] == ["unshrunk"]


def test_a_layer_that_another_process_does_not_know_is_named(tmp_path):
    class Unknown(layers.Layer):
        def call(self, inputs):
            return inputs

    model, data = dense(Unknown())
    config = CompressionConfig(batch_sizes=(8,), shrink=StructuredPruningConfig(round_to=8))
    with pytest.raises(TrainingError, match=r"(?s)The smallest model must be measured.*register_keras_serializable"):
        compress(model, data, config, directory=tmp_path / "run")
