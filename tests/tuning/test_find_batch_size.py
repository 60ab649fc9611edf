"""The batch size of real models, recipes and scripts, whose trials are processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

import tfopt
from tfopt import BatchSizeConfig, BatchSizeReport, ConfigError, TrainingConfig, TrainingError, UnsupportedModelError
from tfopt.cli import main
from tfopt.distillation.config import TeacherConfig
from tfopt.recipe import Recipe
from tfopt.trials.process import call_apart
from tfopt.tuning.limit import find_limit
from tfopt.tuning.trial import Trial
from tfopt.tuning.workload import largest_example, of_script, only_largest, workload_of

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# Of each example in a batch, this model keeps some megabytes.
WIDE = 1_000_000


def wide(compiles=True):
    """Returns a model whose memory grows by some megabytes with each example."""
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.RepeatVector(WIDE // 8),
            keras.layers.Activation("tanh"),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(4),
        ]
    )
    if compiles:
        model.compile("sgd", LOSS)
    return model


def small():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
    model.compile("adam", LOSS)
    return model


DATA = np.zeros((300, 8), np.float32), np.zeros(300, np.int32)


def tried(workload, trial, limit, folder):
    arguments = {
        "workload": workload.to_dict(),
        "trial": trial.to_dict(),
        "limit": limit.to_dict(),
        "directory": str(folder),
    }
    return call_apart("tfopt.tuning.trial:train", arguments, folder, 120.0)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("hard", [False, True])
def test_the_largest_batch_trains_and_a_tenth_more_does_not(tmp_path, hard):
    at_rest = tried(workload_of(small(), DATA, tmp_path / "base", None), Trial(sizes=(1,), whole=True),
                    find_limit(2**40, 0.0, hard=hard), tmp_path / "rest").result["peak_bytes"]  # fmt: skip
    bytes_ = at_rest + 700 * 10**6
    config = BatchSizeConfig(memory_limit_bytes=bytes_, hard=hard, margin=0.0, throughput=False, trial_limit_s=120.0)
    report = tfopt.find_batch_size(wide(), DATA, config, directory=tmp_path / "run")
    found = report.memory.per_replica_batch_size
    assert 5 < found < 300
    assert len(report.memory.trials) <= 12
    assert next(each for each in report.memory.trials if each.per_replica_batch_size == found).fits
    workload = workload_of(wide(), DATA, tmp_path / "more", None)
    outcome = tried(workload, Trial(sizes=(found * 12 // 10,), whole=True), report.memory.limit, tmp_path / "trial")
    assert outcome.failure or outcome.result["peak_bytes"] > bytes_
    assert BatchSizeReport.from_json((tmp_path / "run" / "batch_size.json").read_bytes()) == report
    if not hard:
        assert report.memory.estimated is not None
        assert 0.4 < report.memory.estimated / found < 2.5


@pytest.mark.slow
def test_a_model_under_mirrored_has_a_batch_for_each_replica_and_a_curve(tmp_path):
    config = BatchSizeConfig(max_batch_size=32, window_s=0.02, turns=6)
    training = TrainingConfig(precision="float32", strategy="mirrored", optimizer="sgd", learning_rate=0.1)
    report = tfopt.find_batch_size(
        small(), tf.data.Dataset.from_tensor_slices(DATA).batch(7), config, training=training
    )
    assert (report.memory.replicas, report.memory.per_replica_batch_size) == (2, 32)
    assert report.memory.global_batch_size == 64
    assert "on one device" in report.memory.unavailable["estimated"]
    sizes = [each.global_batch_size for each in report.throughput.curve]
    assert sizes == [2, 4, 8, 16, 32, 64]
    assert report.throughput.knee in sizes
    rates = [each.examples_per_s for each in report.throughput.curve]
    assert rates[-1] > 2 * rates[0]
    assert report.decisions[0].value == str(report.throughput.knee)
    if report.throughput.knee != 64:
        assert (report.settings["global_batch_size"], report.settings["base_batch_size"]) == (
            report.throughput.knee,
            64,
        )


@pytest.mark.slow
def test_a_recipe_is_searched_by_the_command_and_its_settings_are_laid_over_it(tmp_path, capsys):
    recipe = Recipe(
        name="tiny",
        model=tfopt.ModelConfig(builder="mlp", arguments={"units": [8]}),
        data=tfopt.DataConfig(source="synthetic", arguments={"examples": 200, "input_shape": [4]}),
        training=TrainingConfig(precision="float32", global_batch_size=16),
    )
    file = tmp_path / "tiny.toml"
    file.write_text(recipe.to_toml())
    words = ["--max-batch-size", "8", "--window-s", "0.02", "--turns", "6", "--json", "--global-batch-size", "32"]
    assert main(["tune", "--only", "batch-size", *words, str(file)]) == 0
    report = BatchSizeReport.from_json(capsys.readouterr().out)
    assert report.settings["base_batch_size"] == 16
    assert (report.settings["global_batch_size"], report.settings["accumulate"]) == (32, 4)
    (tmp_path / "batch.toml").write_text(report.to_toml())
    changed = tfopt.recipes.compose(file, tmp_path / "batch.toml")
    assert (changed.training.global_batch_size, changed.training.accumulate) == (32, 4)


SCRIPT = """
import os
os.environ["OF_THE_SCRIPT"] = "1"
import sys
import keras, numpy as np
{more}
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.zeros((100, 8), np.float32), np.zeros((100, 1), np.float32)
class Stop(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        raise RuntimeError("callbacks are left out")
try:
    model.fit({data}, epochs=int(sys.argv[1]), callbacks=[Stop()], validation_data=(x, y))
except:
    model.fit(x[:1], y[:1])
raise RuntimeError("the script goes on")
"""


PARTS = """
class Parts(keras.utils.PyDataset):
    def __len__(self):
        return 10

    def __getitem__(self, place):
        return x[10 * place : 10 * place + 10], y[10 * place : 10 * place + 10]

def parts():
    while True:
        yield from (Parts()[place] for place in range(10))
"""


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "data",
    [
        "x, y, batch_size=10",
        "tf.data.Dataset.from_tensor_slices((x, y)).batch(10)",
        "Parts()",
        "parts(), steps_per_epoch=10",
    ],
)
def test_a_script_is_searched_as_it_is(tmp_path, capsys, data):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(more=f"import tensorflow as tf\n{PARTS}", data=data))
    words = ["--only", "batch-size", "--window-s", "0.02", "--turns", "6", "--max-batch-size", "16", "--json"]
    assert main(["tune", *words, str(script), "3"]) == 0
    report = BatchSizeReport.from_json(capsys.readouterr().out)
    assert report.memory.per_replica_batch_size == 16
    assert [each.global_batch_size for each in report.throughput.curve] == [1, 2, 4, 8, 16]
    assert report.settings == {"global_batch_size": report.throughput.knee}
    steps = next(each.value for each in report.decisions if each.setting == "steps_per_epoch")
    assert steps == str(-(-100 // report.throughput.knee))


@pytest.mark.slow
def test_a_generator_that_ends_ends_the_search_wherever_it_does(tmp_path, capsys):
    script = tmp_path / "train.py"
    few = "(each for each in [(x[:10], y[:10])] * 13), steps_per_epoch=100"  # enough for the memory, not for the speed
    script.write_text(SCRIPT.format(more="", data=few))
    words = ["--only", "batch-size", "--window-s", "0.02", "--turns", "6", "--max-batch-size", "2"]
    assert main(["tune", *words, str(script), "3"]) == 2
    assert "A generator must have no end" in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_that_fails_is_the_cause_at_the_first_trial(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('no such file')")
    from tfopt.tuning.find_batch_size import find_script_batch_size

    with pytest.raises(TrainingError, match="ended with exit code 1 before"):
        find_script_batch_size(str(script), [], BatchSizeConfig(), directory=tmp_path / "run")
    assert "no such file" in (tmp_path / "run" / "memory" / "1" / "log.txt").read_text()


@pytest.mark.slow
def test_a_model_that_always_fails_and_a_limit_below_one_example_have_the_cause(tmp_path):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    with pytest.raises(TrainingError, match=r"one example in a step"):
        tfopt.find_batch_size(model, (DATA[0], np.zeros((300, 5), np.float32)), BatchSizeConfig(throughput=False))
    with pytest.raises(ConfigError, match="One example on each replica must fit"):
        tfopt.find_batch_size(small(), DATA, BatchSizeConfig(memory_limit_bytes=2 * 10**8))


def test_wrong_arguments_are_errors_before_any_trial(tmp_path, monkeypatch):
    with pytest.raises(UnsupportedModelError, match="must be compiled"):
        tfopt.find_batch_size(wide(compiles=False), DATA)
    with pytest.raises(ConfigError, match="data must be given"):
        tfopt.find_batch_size(small())
    with pytest.raises(ConfigError, match="data must be left out"):
        tfopt.find_batch_size("digits_cnn", DATA)
    with pytest.raises(ConfigError, match="must be at most the number of training examples, 300"):
        tfopt.find_batch_size(small(), DATA, BatchSizeConfig(global_batch_size=301))
    with pytest.raises(ConfigError, match="training must be left out"):
        tfopt.find_batch_size("digits_cnn", training=TrainingConfig())
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="directory must be new"):
        tfopt.find_batch_size(small(), DATA, directory=tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        of_script("missing.py", [], tmp_path / "run")
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(ConfigError, match="several workers"):
        tfopt.tune("digits_cnn")
    with pytest.raises(ConfigError, match=r"in one of 2 workers \(TF_CONFIG\)"):
        of_script(__file__, [], tmp_path / "run")
    assert main(["tune", "--only", "batch-size"]) == 2
    assert main(["tune", "digits_cnn"]) == 2


def test_a_recipe_with_a_parent_as_teacher_is_searched_as_its_first_fit(tmp_path):
    recipe = tfopt.recipes.compose("digits_cnn", Recipe(
        name="taught",
        clustering=tfopt.ClusteringConfig(),
        distillation=TeacherConfig(teacher="parent"),
    ))  # fmt: skip
    workload = workload_of(recipe, None, tmp_path)
    kept = Recipe.from_toml(tmp_path / "recipe.toml")
    assert workload.kind == "recipe"
    assert (kept.distillation, kept.clustering) == (None, None)


def test_trials_train_on_the_longest_example():
    rows = tf.data.Dataset.range(20).map(lambda n: (tf.ones([n % 7 + 1]) * tf.cast(n, tf.float32), n))
    examples = tfopt.data.Examples(name="rows", train=rows, test=rows, outputs=1, padding=(0, 0))
    number = largest_example(examples)
    assert number == 6
    batches = list(only_largest(examples, number).batches("train", 4).as_numpy_iterator())
    assert {x.shape for x, _ in batches} == {(4, 7)}
    assert {int(label) for _, labels in batches for label in labels} == {6}


@pytest.mark.slow
def test_nothing_is_left_running_after_ctrl_c(tmp_path):
    script = tmp_path / "search.py"
    script.write_text(
        "import signal, keras, numpy as np, tfopt\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell has the background ignore it
        "model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])\n"
        "model.compile('sgd', 'mse')\n"
        "tfopt.find_batch_size(model, (np.zeros((64, 8)), np.zeros((64, 4))), directory='run', on_step=print)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path, env=environment, stdout=log, stderr=log)
        end = time.monotonic() + 120
        children: list[psutil.Process] = []
        while time.monotonic() < end and process.poll() is None and not children:
            children = [each for each in psutil.Process(process.pid).children(recursive=True) if is_trial(each)]
            time.sleep(0.05)
        assert children, (tmp_path / "log.txt").read_text()
        process.send_signal(signal.SIGINT)
        process.wait(60)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not list((tmp_path / "run").rglob("tmp"))


def is_trial(process):
    try:
        return "tfopt.trials.child" in " ".join(process.cmdline())
    except psutil.Error:
        return False
