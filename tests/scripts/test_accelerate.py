"""Under `accelerate` a script computes what it computes alone: weights, history, files, output, exit code."""

import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest

from tfopt.cli import main
from tfopt.errors import ConfigError
from tfopt.scripts import run_script
from tfopt.scripts.accelerate import accelerate

EXAMPLES = Path(__file__).parent / "examples"
ARGUMENTS = {"with_arguments": ["--filters", "6", "--report"]}
CODES = {"custom_loop": 3}


class Nothing:
    def compile(self, model, original, args, kwargs):
        original(*args, **kwargs)

    def fit(self, model, original, args, kwargs):
        return original(*args, **kwargs)


def without_times(text):
    return re.sub(r"- \d+s - \d+ms/step", "", text)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [path.stem for path in sorted(EXAMPLES.glob("*.py"))])
def test_an_unmodified_script_does_the_same_in_a_process_of_its_own(tmp_path, name, fresh_python):
    script, more = EXAMPLES / f"{name}.py", ARGUMENTS.get(name, [])
    ends = {}
    for how, command in (("plain", []), ("accelerated", ["-m", "tfopt", "accelerate", "--report", "report.json"])):
        ends[how] = fresh_python(*command, script, f"{how}.npz", *more, cwd=tmp_path)
    plain, accelerated = ends.values()
    assert accelerated.returncode == plain.returncode == CODES.get(name, 0), accelerated.stderr[-3000:]
    expected = without_times(plain.stdout).replace("plain.npz", "accelerated.npz")
    assert without_times(accelerated.stdout) == expected != ""
    same_arrays(tmp_path / "plain.npz", tmp_path / "accelerated.npz")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(len(report["changed"]), len(report["skipped"]))] == [
        {"own_train_step": (0, 1), "custom_loop": (0, 1), "sequential": (3, 0)}.get(name, (1, 0))
    ]
    for entry in report["changed"] + report["skipped"]:
        file, _, line = entry["name"].rpartition(":")
        text = Path(file).read_text().splitlines()[int(line) - 1]
        assert re.search(r"\.fit\(|def train_step|GradientTape", text)


def same_arrays(first, second):
    with np.load(first) as one, np.load(second) as other:
        assert one.files == other.files != []
        for key in one.files:
            np.testing.assert_allclose(other[key], one[key], rtol=1e-5, atol=1e-5, err_msg=key)


BEGIN = """
import os, sys
import keras, numpy as np, tensorflow as tf
keras.backend.clear_session()
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(150, 4)).astype("float32")
y = x.sum(1, keepdims=True)
found = {}

def build(cls=keras.Sequential):
    hidden = [keras.layers.Dense(6, activation="relu"), keras.layers.Dropout(0.3)]
    model = cls([keras.Input((4,)), *hidden, keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model

def keep(name, model, history):
    found.update({f"{name} {index}": value for index, value in enumerate(model.get_weights())})
    found.update({f"{name} {key}": np.array(values) for key, values in history.history.items()})
    assert model.steps_per_execution == 1
"""
END = """
np.savez(sys.argv[1], **found)
"""
SEVERAL = "10 steps per call into TensorFlow"

REPLICAS = """
from tfopt.training.distributed.strategy import mirrored_strategy

class Noise(keras.layers.Layer):
    def call(self, x, training=False):
        return x + 0.1 * tf.random.normal(tf.shape(x)) if training else x

with mirrored_strategy("auto").scope():
    layers = [keras.layers.Dense(6, activity_regularizer="l2"), keras.layers.BatchNormalization(), Noise()]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.1), "mse", metrics=["mae"])
weights = np.linspace(0, 1, 149)
# the last batch is uneven: 3 examples and 2
history = model.fit(x[:149], y[:149], 16, epochs=2, validation_split=0.3, sample_weight=weights, verbose=0)
keep("strategy", model, history)
found["on batch"] = np.array([model.train_on_batch(x[:16], y[:16]) for _ in range(2)])
"""

# These run in .ci/run, so that the others stay short.
LONGER = (
    "two replicas",
    "checkpoints by batches",
    "data that ends early",
    "a generator with steps_per_epoch",
    "own steps per execution",
    "fit that drops its callbacks",
    "two losses",
    "TerminateOnNaN that raises or sees none",
    "TensorBoard by epochs",
    "an optional input that is missing",
    "a PyDataset with sample weights",
    "a train_on_batch loop between fits",
    "fit without callbacks",
)
TERMINATES = """
from contextlib import redirect_stdout
from io import StringIO
y[101] = np.nan  # in batch 6 of 10
for name, options in CASES.items():
    model, terminate = build(), keras.callbacks.TerminateOnNaN(**options)
    part = slice(0, 96 if name == "sees none" else 150)
    with redirect_stdout(StringIO()) as printed:
        try:
            history = model.fit(x[part], y[part], 16, epochs=2, shuffle=False, validation_data=(x[:32], y[:32]),
                                callbacks=[terminate], verbose=0)
            keep(name, model, history)
        except RuntimeError as error:
            print(error)
    found["words " + name] = np.array(list(printed.getvalue().encode()))
    found["iterations " + name] = np.array(model.optimizer.iterations)
    assert model.optimizer.iterations == (12 if name == "sees none" else 7)
    assert ("atch 6" in printed.getvalue()) == (name != "sees none")
    assert "on_train_batch_end" not in vars(terminate)
"""
FITS = {
    # The strategy of this process, since a second one would collide with it.
    "two replicas": (REPLICAS, "Keras' step on 2 replicas of MirroredStrategy, " + SEVERAL),
    "two losses": (
        """
inputs = keras.Input((4,))
model = keras.Model(inputs, {"a": keras.layers.Dense(1)(inputs), "b": keras.layers.Dense(1)(inputs)})
model.compile("adam", {"a": "mse", "b": "mae"}, loss_weights={"a": 1.0, "b": 0.3})
keep("two", model, model.fit(x=x, y={"a": y, "b": y}, batch_size=16, epochs=2, validation_split=0.2, verbose=0))
""",
        SEVERAL,
    ),
    "data of unknown length": (
        """
model = build()
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(20).filter(lambda x, y: True)
keep("unknown", model, model.fit(data, epochs=3, verbose=0))
found["iterations"] = np.array(model.optimizer.iterations)  # Keras counts one more in each epoch
""",
        "one step per call because the number of batches is unknown",
    ),
    "callbacks that write files": (
        """
model = build()
os.makedirs(sys.argv[2])
callbacks = [
    keras.callbacks.ModelCheckpoint(sys.argv[2] + "/best.weights.h5", save_best_only=True, save_weights_only=True),
    keras.callbacks.CSVLogger(sys.argv[2] + "/log.csv"),
    keras.callbacks.BackupAndRestore(sys.argv[2] + "/backup"),
    keras.callbacks.EarlyStopping(patience=0, min_delta=10.0),
]
keep("files", model, model.fit(x, y, 16, epochs=4, validation_data=(x, y), callbacks=callbacks, verbose=0))
found["csv"] = np.loadtxt(sys.argv[2] + "/log.csv", delimiter=",", skiprows=1)
model.load_weights(sys.argv[2] + "/best.weights.h5")
found["best"] = model.get_weights()[0]
""",
        SEVERAL,
    ),
    "TerminateOnNaN": ("CASES = {'ends': {}}" + TERMINATES, SEVERAL),
    "TerminateOnNaN that raises or sees none": (
        "CASES = {'raises': {'raise_error': True}, 'sees none': {}}" + TERMINATES,
        SEVERAL,
    ),
    "TensorBoard by epochs": (
        """
model = build()
board = keras.callbacks.TensorBoard(sys.argv[2], histogram_freq=1, write_steps_per_second=True)
keep("board", model, model.fit(x, y, 16, epochs=2, validation_split=0.3, callbacks=[board], verbose=0))
for part in ("train", "validation"):
    [events] = [os.path.join(sys.argv[2], part, name) for name in os.listdir(os.path.join(sys.argv[2], part))]
    for event in tf.compat.v1.train.summary_iterator(events):
        for value in event.summary.value:
            number = tf.make_ndarray(value.tensor) if value.tag.startswith(("epoch_l", "eval")) else 0.0
            found[f"{part} {value.tag} {event.step}"] = number
assert "train epoch_loss 1" in found and "validation evaluation_loss_vs_iterations 14" in found
""",
        SEVERAL,
    ),
    "an optional input that is missing": (
        """
class Either(keras.layers.Layer):
    def call(self, pair):
        return pair["a"] if pair.get("b") is None else pair["a"] + pair["b"]

given = {"a": keras.Input((4,), name="a"), "b": keras.Input((4,), name="b", optional=True)}
model = keras.Model(given, keras.layers.Dense(1)(Either()(given)))
model.compile("adam", "mse")
def batches():
    while True:
        yield {"a": x[:16], "b": None}, y[:16]

for name, options in {
    "array": {"x": {"a": x, "b": None}, "y": y, "batch_size": 16},
    "dataset": {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(16).map(lambda x, y: ({"a": x, "b": None}, y))},
    "generator": {"x": batches(), "steps_per_epoch": 11},
}.items():
    keep(name, model, model.fit(**options, epochs=2, verbose=0))
""",
        SEVERAL,
    ),
    "a callback on each batch": (
        """
class Batches(keras.callbacks.Callback):
    seen = []
    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((batch, logs["loss"]))

model = build()
keep("batches", model, model.fit(x, y, 16, epochs=2, callbacks=[Batches()], verbose=0))
found["seen"] = np.array(Batches.seen)
assert len(found["seen"]) == 20
""",
        "one step per call because Batches acts on each batch",
    ),
    "checkpoints by batches": (
        """
model = build()
saves = keras.callbacks.ModelCheckpoint(sys.argv[2] + "{batch}.weights.h5", save_freq=4, save_weights_only=True)
keep("saves", model, model.fit(x, y, 16, callbacks=saves, verbose=0))
found["files"] = np.array(sorted(int(name[len(sys.argv[2]):].split(".")[0]) for name in os.listdir() if ".h5" in name
                                 and name.startswith(sys.argv[2])))
""",
        "one step per call because ModelCheckpoint acts on each batch",
    ),
    "a generator with steps_per_epoch": (
        """
def batches():
    while True:
        for begin in range(0, 150, 25):
            yield x[begin:begin + 25], y[begin:begin + 25]

model = build()
keep("generator", model, model.fit(batches(), steps_per_epoch=13, epochs=3, initial_epoch=1, verbose=0))
""",
        SEVERAL,
    ),
    "a PyDataset with sample weights": (
        """
class Parts(keras.utils.PyDataset):
    def __len__(self):
        return 5
    def __getitem__(self, index):
        part = slice(30 * index, 30 * index + 30)
        return x[part], y[part], np.linspace(0, 1, 30)

model = build()
keep("parts", model, model.fit(Parts(), epochs=2, validation_data=Parts(), validation_steps=3, verbose=0))
""",
        SEVERAL,
    ),
    "own compute_loss, compile and fit": (
        """
class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
    def call(self, x):
        return self.dense(x)
    def compile(self, rate):
        super().compile(keras.optimizers.SGD(rate), loss="mse")
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.abs(y - y_pred))
    def fit(self, x, *, twice=False, **kwargs):
        return super().fit(x, x[:, :1], epochs=2 if twice else 1, **kwargs)

model = Own()
model.compile(rate=0.1)
keep("own", model, model.fit(x, twice=True, verbose=0))
""",
        SEVERAL,
    ),
    "a train_on_batch loop between fits": (
        """
model = build()
model.fit(x, y, verbose=0)
found["on batch"] = np.array([model.train_on_batch(x[:16], y[:16]) for _ in range(3)])
keep("loop", model, model.fit(x, y, verbose=0))
found["predicted"], found["evaluated"] = model.predict(x, verbose=0), np.array(model.evaluate(x, y, verbose=0))
""",
        SEVERAL,
    ),
    "data that ends early": (
        """
model = build()
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
keep("early", model, model.fit(data, steps_per_epoch=5, epochs=3, verbose=0))
""",
        SEVERAL,
    ),
}


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Runs a script alone and accelerated, compares what it saved, and returns the report."""
    monkeypatch.chdir(tmp_path)

    def run(text):
        Path("script.py").write_text(BEGIN + text + END)
        before = keras.Model.compile, keras.Model.fit
        assert run_script("script.py", ["plain.npz", "plain"], Nothing()) == 0
        done = accelerate("script.py", ["accelerated.npz", "accelerated"])
        assert done.exit_code == 0
        assert (keras.Model.compile, keras.Model.fit) == before
        same_arrays("plain.npz", "accelerated.npz")
        return done.report

    return run


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:.*ran out of data", "ignore:.*__array__ implementation")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONGER)) for name in FITS])
def test_a_fit_gives_the_same_weights_history_and_files(both, name):
    if name.startswith("TensorBoard"):
        pytest.importorskip("tensorboard", reason="Keras' TensorBoard callback needs the package tensorboard")
    text, decision = FITS[name]
    report = both(text)
    assert report.skipped == []
    assert decision in report.changed[-1].detail
    if name == "a train_on_batch loop between fits":
        assert len(report.changed) == 2


LEFT = {
    "eager": (
        'model = build()\nmodel.compile("adam", "mse", run_eagerly=True)\nmodel.fit(x, y, verbose=0)',
        "run_eagerly",
    ),
    "fit without callbacks": (
        "class Own(keras.Sequential):\n    def fit(self, x, y):\n        return super().fit(x, y, verbose=0)\n"
        "model = build(Own)\nmodel.fit(x, y)",
        "its fit takes no callbacks",
    ),
    "fit that drops its callbacks": (
        "class Own(keras.Sequential):\n    def fit(self, x, y, callbacks=None):\n"
        "        return super().fit(x, y, verbose=0)\n"
        "model = build(Own)\nmodel.fit(x, y)",
        "must pass its callbacks to super().fit",
    ),
    "own compute_metrics": (
        "class Own(keras.Sequential):\n    def compute_metrics(self, *args, **kwargs):\n"
        "        return {**super().compute_metrics(*args, **kwargs), 'more': 1.0}\n"
        "model = build(Own)\nassert 'more' in model.fit(x, y, verbose=0).history",
        "it has its own compute_metrics. Add values to those of get_metrics_result",
    ),
    "own steps per execution": (
        "model = build()\nmodel.compile('sgd', 'mse', steps_per_execution=4)\n"
        "data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16).repeat()\n"
        "model.fit(data, steps_per_epoch=10, verbose=0)",
        "it asks for steps_per_execution=4 itself. Leave it out",
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONGER)) for name in LEFT])
def test_what_cannot_have_the_step_is_left_to_keras_and_listed_with_the_line(both, name):
    text, reason = LEFT[name]
    report = both(text + "\nfound['weights'] = model.get_weights()[0]\n")
    assert report.changed == []
    skip = report.skipped[-1]
    assert reason in skip.reason
    lines = Path("script.py").read_text().splitlines()
    file, _, line = skip.name.rpartition(":")
    assert file == "script.py"
    assert re.search(r"compile\(|fit\(|def (fit|compute_metrics)", lines[int(line) - 1])


def test_errors_of_the_script_stay_and_the_report_still_comes(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(BEGIN + "build().fit(x, y, verbose=0)\nraise ValueError('of the script')")
    assert main(["accelerate", str(script), "--xla"]) == 1
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "ValueError: of the script\n\ntfopt: accelerate: 1 changed" in shown.err.replace("\ntfopt", "\n\ntfopt")
    assert "tfopt/scripts" not in shown.err


def test_wrong_words_are_refused_before_the_script_runs(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    for words, message in (
        ([], "The script must follow the options"),
        (["--report", "no/such/directory/a.json", str(script)], "--report must be a file that can be written"),
        (["nowhere.py"], "nowhere.py, which does not exist"),
        (["--precision", "float8", str(script)], "float8"),
        (["--steps-per-execution", "0", str(script)], "steps_per_execution must be"),
    ):
        assert main(["accelerate", *words]) == 2
        shown = capfd.readouterr()
        assert message in shown.err
        assert shown.out == ""


OTHER_POLICY = """
keras.config.set_dtype_policy("float32")
with tf.distribute.OneDeviceStrategy("CPU:0").scope():
    model = build()
"""


def test_precision_changes_only_when_asked(tmp_path):
    script = tmp_path / "script.py"
    text = BEGIN.replace("keras.backend.clear_session()\n", "") + "model = build()\nmodel.fit(x, y, verbose=0)"
    script.write_text(text)
    done = accelerate(str(script), [], precision="mixed_bfloat16")
    details = [each.detail for each in done.report.changed]
    assert details[0].startswith("mixed_bfloat16")
    assert "mixed_bfloat16 -> float32" in details
    assert done.report.skipped == []
    assert keras.config.dtype_policy().name == "float32"
    assert [each.kind.split()[0] for each in accelerate(str(script), []).report.changed] == ["fit"]
    script.write_text(text.replace("model = build()", OTHER_POLICY))
    (skip,) = accelerate(str(script), [], precision="mixed_bfloat16").report.skipped
    assert "the script itself chose float32" in skip.reason


def test_the_steps_of_a_call_can_be_asked_for(tmp_path):
    script = tmp_path / "script.py"
    per_batch = "keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)"
    fit = f"build().fit(x, y, verbose=0, shuffle=False)\nbuild().fit(x, y, verbose=0, callbacks=[{per_batch}])"
    script.write_text(BEGIN + fit)
    details = [each.detail for each in accelerate(str(script), [], steps_per_execution=3).report.changed]
    assert "3 steps per call" in details[0]
    assert "one step per call because LambdaCallback" in details[1]


def test_a_missing_script_is_refused():
    with pytest.raises(ConfigError, match="does not exist"):
        accelerate("nowhere.py", [])
