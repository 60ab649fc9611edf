"""Running a user's script in this process: as Python would run it, with a hook on Keras only while it runs."""

import importlib
import importlib.util
import sys

import keras
import numpy as np
import pytest

from tfopt.errors import ConfigError
from tfopt.scripts import run_script
from tfopt.scripts.hook import _AfterImport, hooked, script_line


class Recorder:
    """Notes the calls, with the line of the script, and changes nothing."""

    def __init__(self):
        self.calls = []

    def compile(self, model, original, args, kwargs):
        self.calls.append(("compile", type(model).__name__, script_line()))
        original(*args, **kwargs)

    def fit(self, model, original, args, kwargs):
        self.calls.append(("fit", type(model).__name__, script_line()))
        return original(*args, **kwargs)


@pytest.fixture
def methods_stay():
    before = keras.Model.compile, keras.Model.fit, sys.argv, sys.path, sys.excepthook
    yield
    assert (keras.Model.compile, keras.Model.fit, sys.argv, sys.path, sys.excepthook) == before
    assert "fit" not in vars(keras.Model)


def write(directory, text, name="script.py"):
    path = directory / name
    path.write_text(text)
    return str(path)


MODELS = """
from keras import Model
import keras, numpy as np

x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")

class Own(Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
    def call(self, x):
        return self.dense(x)
    def compile(self, rate):
        super().compile(keras.optimizers.SGD(rate), "mse")
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)

sequential = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
sequential.compile("sgd", "mse")
inputs = keras.Input((2,))
functional = Model(inputs, keras.layers.Dense(1)(inputs))
functional.compile("sgd", "mse")
own = Own()
own.compile(0.1)

class Nested(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        functional.fit(x, y, verbose=0)

history = sequential.fit(x, y, verbose=0, callbacks=[Nested()])
assert history.epoch == [0]
functional.fit(x, y, verbose=0)
own.fit(x, y, verbose=0)
"""


def test_the_hook_sees_every_kind_of_model_once_with_the_line_of_the_script(tmp_path, methods_stay):
    script = write(tmp_path, MODELS)
    recorder = Recorder()
    assert run_script(script, [], recorder) == 0
    lines = MODELS.splitlines()
    seen = [
        (what, kind, lines[int(place.removeprefix(f"{script}:")) - 1].strip()) for what, kind, place in recorder.calls
    ]
    assert seen == [
        ("compile", "Sequential", 'sequential.compile("sgd", "mse")'),
        ("compile", "Functional", 'functional.compile("sgd", "mse")'),
        ("compile", "Own", 'super().compile(keras.optimizers.SGD(rate), "mse")'),
        ("fit", "Sequential", "history = sequential.fit(x, y, verbose=0, callbacks=[Nested()])"),
        ("fit", "Functional", "functional.fit(x, y, verbose=0)"),
        ("fit", "Own", "return super().fit(*args, **kwargs)"),
    ]


def test_a_loaded_model_is_compiled_as_it_was_saved(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.save(tmp_path / "model.keras")
    recorder = Recorder()
    with hooked(recorder):
        loaded = keras.models.load_model(tmp_path / "model.keras")
        loaded.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert [what for what, *_ in recorder.calls] == ["compile", "fit"]


@pytest.mark.parametrize(
    ("text", "code", "stderr"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, None),
        (
            "def f():\n    raise ValueError('no')\ntry:\n    f()\nexcept ValueError as e:\n    raise OSError(1) from e",
            1,
            None,
        ),
        ("1 +", 1, None),
        ("import sys; sys.excepthook = lambda *_: sys.stderr.write('own hook\\n')\n1 / 0", 1, "own hook\n"),
    ],
)
def test_exit_code_and_error_are_those_of_python(tmp_path, capfd, methods_stay, text, code, stderr, fresh_python):
    script = write(tmp_path, text)
    plain = fresh_python(script, imported="nothing")
    assert run_script(script, [], Recorder()) == code
    shown = capfd.readouterr().err
    assert shown == plain.stderr
    assert plain.returncode in (code, -2)  # Python itself ends by the signal after Ctrl-C
    if stderr is not None:
        assert shown == stderr


def test_words_path_and_name_are_those_of_python(tmp_path, capfd, monkeypatch, methods_stay, fresh_python):
    write(tmp_path, "NAME = 'beside'", "beside.py")
    text = (
        "import beside, sys, os\n"
        "if __name__ == '__main__':\n    print(beside.NAME, sys.argv, sys.path[0], os.getcwd(), __file__)"
    )
    write(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    script = "script.py"
    plain = fresh_python(script, "--json", "a b", imported="nothing", check=True)
    assert run_script(script, ["--json", "a b"], Recorder()) == 0
    assert capfd.readouterr().out == plain.stdout
    del sys.modules["beside"]


def test_a_module_runs_with_m(tmp_path, capfd, monkeypatch, methods_stay):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "import sys; print(__name__, sys.argv[1:])", "as_module.py")
    assert run_script("-m", ["as_module", "-x"], Recorder()) == 0
    assert capfd.readouterr().out == "__main__ ['-x']\n"


def test_what_is_no_script_is_refused():
    with pytest.raises(ConfigError, match=r"Received: nowhere.py, which does not exist"):
        run_script("nowhere.py", [], Recorder())
    with pytest.raises(ConfigError, match="Write -m MODULE"):
        run_script("-m", [], Recorder())


def test_a_module_is_known_once_it_has_been_imported(tmp_path, monkeypatch):
    write(tmp_path, "VALUE = 1", "imported_late.py")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    monkeypatch.setattr(sys, "meta_path", [_AfterImport("imported_late", seen.append), *sys.meta_path])
    assert importlib.util.find_spec("imported_late") is not None
    assert seen == []
    module = importlib.import_module("imported_late")
    assert [each.VALUE for each in seen] == [1]
    assert seen == [module]
    del sys.modules["imported_late"]


@pytest.mark.slow
def test_keras_is_hooked_when_the_script_imports_it_and_not_before(tmp_path, fresh_python):
    """In a process of its own, since Keras is imported here. TensorFlow looks for Keras, and imports it later."""
    write(tmp_path, "import sys; assert 'keras' not in sys.modules\nimport tensorflow\n" + MODELS, "late.py")
    program = (
        "import sys; sys.path.insert(0, 'HERE')\nfrom tfopt.scripts import run_script\n"
        "class Hook:\n"
        "    def compile(self, model, original, args, kwargs): original(*args, **kwargs)\n"
        "    def fit(self, model, original, args, kwargs): print('fit'); return original(*args, **kwargs)\n"
        "code = run_script(sys.argv[1], [], Hook())\n"
        "import keras; print(code, keras.Model.fit.__code__.co_name)\n"
    )
    done = fresh_python("-c", program, tmp_path / "late.py", imported="nothing")
    assert done.stdout.split() == ["fit"] * 3 + ["0", "error_handler"], done.stderr[-2000:]
