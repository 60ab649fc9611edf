"""The speed settings of scripts that know nothing of tfopt."""

import itertools
import json
import re
import time
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt import ConfigError, TrainingError, TuneConfig, TuneReport
from tfopt.cli import main
from tfopt.hardware import Gpu, Hardware
from tfopt.trials.process import call_apart
from tfopt.tuning.comparison import Side
from tfopt.tuning.facts import Facts
from tfopt.tuning.first_fit import Fit, facts_of_fit, in_an_epoch, training_of
from tfopt.tuning.script import command, compare, lines
from tfopt.tuning.search import tune_script
from tfopt.tuning.sides import OF_SCRIPT
from tfopt.tuning.space import space_of
from tfopt.tuning.timed import TimedFit, Training

pytest.importorskip("optuna")
CPU = Hardware(logical_cores=2, memory_bytes=2**33, tensorflow_version="2.21.0")
A100 = Gpu(name="NVIDIA A100", compute_capability=(8, 0))
X, Y = np.random.default_rng(0).random((160, 8), np.float32), np.arange(160) % 4

ARRAYS = """
import sys
import keras, numpy as np

x = np.random.default_rng(0).random((1600, 8), np.float32)
y = np.arange(1600) % 4
hidden = [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.2)]
model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(4)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
save = keras.callbacks.ModelCheckpoint("own.keras")
model.fit(x, y, batch_size=8, epochs=int(sys.argv[1]), verbose=2, callbacks=[save])
"""
PIPELINE = """
import keras, numpy as np, tensorflow as tf

x = np.random.default_rng(0).random((400, 8), np.float32)
y = np.arange(400) % 4
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(400).batch(8).map(lambda x, y: (2.0 * x, y)).prefetch(2)

class Log(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        open("callbacks_ran", "w").close()

inputs = keras.Input((8,))
model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Dense(16, "relu")(inputs)))
model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(data, epochs=2, callbacks=[Log()], validation_data=data)
"""


def compiled(**settings):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **settings)
    return model


def facts(model, **given):
    fit = Fit(
        model=model, original=model.fit, given={"x": X, "y": Y, **given}, compiled_at="train.py:7", at="train.py:8"
    )
    training, examples = training_of(fit, rebatches=False)
    return facts_of_fit(fit, training, examples)


def test_the_lines_to_change_train_as_the_settings_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "1"])
    keras_compiles = 'model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))'
    at = ARRAYS.splitlines().index(keras_compiles) + 1
    seen = Facts(
        values={"jit_compile": False}, compiled_at=f"train.py:{at}", compiled_with=["optimizer", "loss", "jit_compile"]
    )
    changes = {"step": "tfopt", "steps_per_execution": 50}
    (line,) = lines(changes, seen)
    begin = f"train.py:{at}, in place of model.compile(...), with its own values for the dots: "
    assert line.startswith(begin)
    assert line.endswith(", optimizer=..., loss=...)")
    values = {"optimizer": "'adam'", "loss": "keras.losses.SparseCategoricalCrossentropy(from_logits=True)"}
    call = re.sub(r"(\w+)=\.\.\.", lambda match: f"{match[1]}={values[match[1]]}", line.removeprefix(begin))
    ran = {}
    exec(ARRAYS.replace(keras_compiles, call).replace("import sys", "import sys, tfopt"), ran)
    assert ran["model"].steps_per_execution == 50
    assert tfopt.ledger(ran["model"]).step_time_ms > 0
    assert "optimizer='rmsprop', loss=..." in lines(changes, replace(seen, compiled_with=["loss"]))[0]  # Keras' default
    half = lines({**changes, "precision": "mixed_bfloat16"}, seen)
    assert half[0].startswith("before the model is built: keras.config.set_dtype_policy('mixed_bfloat16')")
    assert lines({}, seen) == lines(changes, replace(seen, compiled_at="")) == ()


def test_no_line_is_named_where_tfopts_step_cannot_be_put():
    model = compiled()
    fit = Fit(model=model, original=model.fit, given={"x": X, "y": Y}, compiled_at="train.py:7", at="train.py:8")
    training, examples = training_of(fit, rebatches=False)
    assert facts_of_fit(fit, training, examples).compiled_at == ""  # a model that was loaded
    seen = facts_of_fit(replace(fit, compiled_with=["loss"]), training, examples)
    assert (seen.compiled_at, seen.compiled_with) == ("train.py:7", ["loss"])
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        there = compiled()
    fit = replace(fit, model=there, original=there.fit, compiled_with=["loss"])
    assert facts_of_fit(fit, training, examples).compiled_at == ""


def test_only_what_accelerate_sets_and_has_a_choice_is_searched():
    plain = space_of(facts(compiled(), batch_size=2), CPU)
    assert plain.choices == {"step": ("keras", "tfopt"), "steps_per_execution": ("auto", 50)}
    assert plain.left_out["jit_compile"].startswith("train.py:7 leaves the model without XLA")
    assert "no GPU" in plain.left_out["precision"]
    kept = {"strategy", "augment", "cache", "accumulate", "global_batch_size", "remat", "communication", "prefetch"}
    assert plain.left_out.keys() == kept | {"threads", "jit_compile", "precision"}
    assert "other_batches" not in "".join(plain.left_out.values())
    assert plain.singles() == [{"step": "tfopt"}, {"step": "tfopt", "steps_per_execution": 50}]
    on_gpu = space_of(
        facts(compiled(jit_compile=True)),
        Hardware(logical_cores=8, memory_bytes=2**36, tensorflow_version="2.21.0", gpus=(A100,)),
    )
    assert on_gpu.choices["jit_compile"] == (True, False)
    assert on_gpu.choices["precision"] == ("float32", "mixed_bfloat16", "mixed_float16")
    assert {"step": "tfopt", "precision": "mixed_bfloat16"} in on_gpu.singles()
    assert on_gpu.left_out["steps_per_execution"] == "an epoch has 5 steps, too few for 50 in a call"  # of 32 examples


def test_what_keeps_tfopts_step_away_is_the_reason_with_its_line():
    log = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    found = space_of(facts(compiled(), batch_size=2, callbacks=[log]), CPU)
    assert list(found.choices) == ["step"]
    assert (
        found.left_out["steps_per_execution"]
        == "train.py:8 has one step per call because LambdaCallback acts on each batch"
    )
    eager = space_of(facts(compiled(run_eagerly=True)), CPU)
    assert not eager.choices
    assert eager.left_out["step"].startswith("train.py:7: run_eagerly=True runs each operation from Python")


def test_the_data_stays_as_the_script_made_it():
    def training(**given):
        model = compiled()
        return training_of(Fit(model=model, original=model.fit, given=given, compiled_at="", at=""), rebatches=False)[0]

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(48)
    of_dataset = training(x=data, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=print)])
    assert (of_dataset.batch, of_dataset.epoch_steps, len(of_dataset.callbacks)) == (48, None, 1)
    sizes = [len(each[1]) for each in of_dataset.data(48, 9)["x"].take(5)]
    assert sizes == [48, 48, 48, 16, 48]
    of_arrays = training(x=X, y=Y, batch_size=16, callbacks=[keras.callbacks.EarlyStopping()], class_weight={0: 2.0})
    assert (of_arrays.batch, of_arrays.epoch_steps, of_arrays.callbacks) == (16, 10, [])
    assert {name: len(each) for name, each in of_arrays.data(16, 4).items() if name in "xy"} == {"x": 64, "y": 64}
    of_parts = training(x=Parts())
    assert (of_parts.batch, of_parts.epoch_steps) == (16, 10)
    assert {name: each for name, each in of_parts.data(16, 4).items() if name != "x"} == {"steps_per_epoch": 4}
    assert of_parts.data(16, 99)["steps_per_epoch"] == 10
    with pytest.raises(ConfigError, match=r"a keras\.utils\.PyDataset or a generator\. Received: list"):
        training(x=[[1.0], [2.0]])


class Parts(keras.utils.PyDataset):
    def __len__(self):
        return 10

    def __getitem__(self, place):
        part = slice(16 * place, 16 * place + 16)
        return [X[part, :4], X[part, 4:]], Y[part]


def numbered(end=None):
    for number in itertools.count() if end is None else range(end):
        yield np.full((4, 8), number, np.float64), np.arange(4)


def test_all_fits_read_a_generator_on_and_its_end_is_an_error():
    model = compiled()

    def training(batches, rebatches=False, **given):
        given = {"x": batches, "steps_per_epoch": 5, **given}
        fit = Fit(model=model, original=model.fit, given=given, compiled_at="", at="")
        return training_of(fit, rebatches=rebatches)[0]

    endless = training(numbered())
    assert (endless.batch, endless.epoch_steps) == (4, None)
    seen = [next(endless.data(4, 5)["x"])[0][0, 0] for _ in range(3)]
    assert seen == [1, 2, 3]
    endless.fit(**endless.data(4, 5), epochs=2, verbose=0)
    other_sizes = training(numbered(), rebatches=True)
    images, labels = next(iter(other_sizes.data(6, 5)["x"]))
    assert (images.dtype, images.shape[1:], images[:, 0].numpy().tolist()) == ("float32", [8], [2, 2, 2, 2, 3, 3])
    assert labels.shape == (6,)
    for rebatches in (False, True):
        short = training(numbered(7), rebatches)
        with pytest.raises(ConfigError, match=r"must have no end, .* one that has ended\. Let it begin again"):
            short.fit(**short.data(4, 9), epochs=1, verbose=0)
    with pytest.raises(ConfigError, match="steps_per_epoch=None"):
        training(numbered(), steps_per_epoch=None)
    with pytest.raises(ConfigError, match="one that has ended"):
        training(numbered(0))


class Words(keras.utils.PyDataset):
    """Sentences of two to four words."""

    def __len__(self):
        return 3

    def __getitem__(self, place):
        return np.full((2, place + 2), place + 1), np.zeros(2)


def test_sentences_of_any_length_are_padded_where_a_batch_has_other_ones():
    layers = [
        keras.layers.Embedding(9, 4, mask_zero=True),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)  # it is built by its data
    model.compile("sgd", "mse")
    words = tf.data.Dataset.from_generator(
        lambda: (Words()[place] for place in range(3)),
        output_signature=(tf.TensorSpec([None, None], tf.int64), tf.TensorSpec([None], tf.float64)),
    )
    for data in (Words(), words):
        given = {"x": data, "steps_per_epoch": None}
        fit = Fit(model=model, original=model.fit, given=given, compiled_at="", at="")
        training, _ = training_of(fit, rebatches=True)
        inputs, labels = next(iter(training.data(5, 1)["x"]))
        assert inputs.numpy().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [2, 2, 2, 0], [2, 2, 2, 0], [3, 3, 3, 3]]
        assert labels.shape == (5,)
        training.fit(**training.data(5, 2), epochs=1, verbose=0)


def test_the_examples_of_an_epoch_are_those_that_the_fit_trains_on():
    model = compiled()
    for given, count in (
        ({"x": X, "y": Y, "validation_split": 0.25}, 120),
        ({"x": X, "y": Y, "batch_size": 8, "steps_per_epoch": 3}, 24),
        ({"x": Parts()}, 160),
    ):
        fit = Fit(model=model, original=model.fit, given=given, compiled_at="", at="")
        assert in_an_epoch(fit, *training_of(fit, rebatches=True)) == count


def test_a_py_dataset_is_read_again_in_batches_of_any_size():
    inputs = [keras.Input((4,)), keras.Input((4,))]
    model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Concatenate()(inputs)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit = Fit(model=model, original=model.fit, given={"x": Parts()}, compiled_at="", at="")
    training, examples = training_of(fit, rebatches=True)
    assert (training.batch, training.epoch_steps, examples) == (16, None, 160)
    batches = list(training.data(64, 5)["x"].take(5))
    np.testing.assert_array_equal(np.concatenate([each[0][1] for each in batches])[:160], X[:, 4:])
    np.testing.assert_array_equal(np.concatenate([each[1] for each in batches])[160:], Y)
    training.fit(**training.data(64, 5), epochs=1, verbose=0)


@pytest.mark.slow
def test_a_stall_makes_no_short_epoch_a_window():
    model, asked = compiled(), []

    class Stall(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if asked[-1] == 4 and asked.count(4) == 1:
                time.sleep(2.0)

    def data(examples, steps):
        asked.append(steps)
        return {"x": X[: examples * steps], "y": Y[: examples * steps], "batch_size": examples}

    training = Training(
        model=model, fit=model.fit, data=data, validation=data, replicas=1, callbacks=[Stall()], epoch_steps=160
    )
    fit = TimedFit(training, 1)
    fit.prepare(0.2)  # far longer than four steps, also on a busy machine, and shorter than the stall
    assert fit.rate() > 0
    assert asked.count(4) == 2
    assert asked[-1] > 4


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"step": "tfopt"}, ""),
        ({"step": "tfopt", "steps_per_execution": 50}, "--steps-per-execution 50 "),
        ({"step": "tfopt", "precision": "mixed_float16", "jit_compile": False}, "--precision mixed_float16 --no-xla "),
    ],
)
def test_the_result_is_a_command(settings, flags):
    assert command(settings, "my train.py", ["--lr", "0.1"]) == f"tfopt accelerate {flags}'my train.py' --lr 0.1"
    assert command(settings, "-m", ["pkg.train"]) == f"tfopt accelerate {flags}-m pkg.train"


def alone(tmp_path, text, settings, *words):
    """Runs a script in this process as one of the trials does, for a turn."""
    script, baton = tmp_path / "script.py", tmp_path / "turns.json"
    script.write_text(text)
    baton.write_text(json.dumps({"calls": 0, "rates": [[]], "losses": [[]], "over": ""}))
    side = Side(number=0, sides=1, baton=str(baton), settings=settings, window_s=0.01, turns=1)
    return compare({"name": str(script), "words": list(words)}, side.to_dict(), None, str(tmp_path))


@pytest.mark.slow
def test_a_trial_trains_as_the_script_does_without_its_callbacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = alone(tmp_path, ARRAYS, {}, "1")
    fast = alone(tmp_path, ARRAYS, {"step": "tfopt", "steps_per_execution": 4}, "1")
    assert np.isfinite(plain["losses"]).all()
    np.testing.assert_allclose(fast["losses"], plain["losses"], rtol=1e-5)  # dropout and the order of the data too
    assert len(plain["rates"]) == len(fast["rates"]) == 1
    found = Facts(**plain["facts"])
    assert (found.examples, found.steps, found.values["steps_per_execution"]) == (1600, 200, "auto")
    assert not (tmp_path / "own.keras").exists()


NO_FIT = "import keras\nprint('no fit')"
OWN_FIT = """
import keras, numpy as np

class Own(keras.Sequential):
    def fit(self, *args, callbacks=None, **kwargs):
        return super().fit(*args, **kwargs)

model = Own([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.zeros((32, 8)), np.zeros((32, 1)))
"""


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (NO_FIT, {}, "must train with keras.Model.fit. Received: no call of it"),
        ("raise ValueError('no such\\nfile')", {}, "ended with exit code 1 before: ValueError: no such file"),
        ("import sys; sys.exit(3)", {}, "ended with exit code 3 before. Run it without tfopt first"),
        ("import sys; sys.exit('No images in data')", {}, "exit code 1 before: No images in data. Run it without"),
        (OWN_FIT, {"step": "tfopt"}, "must fit under the script. Received: the fit of Own must pass its callbacks"),
    ],
)
def test_a_script_that_cannot_be_measured_has_the_cause(tmp_path, text, settings, message):
    with pytest.raises(TrainingError, match=message):
        alone(tmp_path, text, settings)


def test_a_trial_that_is_ended_is_told_from_a_script_that_ends(tmp_path):
    script, log = tmp_path / "script.py", tmp_path / "trial" / "log.txt"
    script.write_text("import time\nprint('hangs', flush=True)\ntime.sleep(600)")
    side = Side(number=0, sides=1, baton="").to_dict()
    workload = {"name": str(script), "words": []}
    arguments = {"workload": workload, "side": side, "limit": None, "directory": str(log.parent)}
    outcome = call_apart(OF_SCRIPT, arguments, log.parent, 300.0, lambda: "it hangs" * ("hangs" in log.read_text()))
    assert (outcome.failure, outcome.given_up) == ("it hangs", True)


def test_wrong_use_is_an_error_before_any_trial(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('it ran')")
    for words, message in (
        (["--toml", str(script)], "--toml must be left out with a script"),
        (["--other-batches", str(script)], "other_batches must be left out with a script"),
        ([str(tmp_path / "nowhere.py")], "which does not exist"),
    ):
        assert main(["tune", *words]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(TrainingError, match=r"before: ValueError: it ran\. Run it without tfopt first"):
        tune_script(str(script), [], TuneConfig(), directory=tmp_path / "run")
    strict = tmp_path / "strict.py"
    strict.write_text("import argparse; argparse.ArgumentParser(prog='strict').error('no --out')")
    with pytest.raises(TrainingError, match=r"exit code 2 before: strict: error: no --out\. Run it without tfopt"):
        tune_script(str(strict), [], TuneConfig())
    for changed in (["--epochs", "2"], []):  # other arguments, then other contents
        with pytest.raises(ConfigError, match="which has another search"):
            tune_script(str(script), changed, TuneConfig(), directory=tmp_path / "run")
        script.write_text("raise ValueError('it ran again')")


@pytest.mark.slow
def test_a_script_with_short_steps_gets_several_in_a_call(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(ARRAYS.replace("verbose=2, ", ""))
    words = ["--json", "--window-s", "0.05", "--turns", "6", "--max-trials", "1", "--directory", "run"]
    assert main(["tune", *words, "train.py", "2"]) == 0
    report = TuneReport.from_json(capsys.readouterr().out)
    assert report == TuneReport.from_json((tmp_path / "run" / "tune.json").read_bytes())
    assert report.kind == "script"
    assert [each.changes for each in report.trials] == [{"step": "tfopt"}]
    assert report.trials[0].state == "measured"
    assert (report.speedup is None) == (report.changes == {})  # on a busy machine the last comparison may not tell
    assert report.command == ("tfopt accelerate train.py 2" if report.changes else "python train.py 2")
    assert not report.changes or report.command in str(report)
    assert not (tmp_path / "own.keras").exists()
    assert main(["accelerate", "train.py", "2"]) == 0
    assert (tmp_path / "own.keras").exists()


@pytest.mark.slow
def test_a_pipeline_of_the_users_own_stays_and_its_callback_decides_over_the_calls(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PIPELINE)
    assert main(["tune", "--json", "--window-s", "0.05", "--turns", "6", "train.py"]) == 0
    report = TuneReport.from_json(capsys.readouterr().out)
    assert [each.changes for each in report.trials] == [{"step": "tfopt"}]
    (trial,) = report.trials
    assert trial.speedup is not None
    np.testing.assert_allclose(trial.losses[1], trial.losses[0], rtol=1e-5)
    assert "Log acts on each batch" in report.left_out["steps_per_execution"]
    assert report.ended_by == "all settings that were proposed have been tried"
    assert not (tmp_path / "callbacks_ran").exists()
