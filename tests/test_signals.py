"""Signals that are raised as exceptions where no library loses them: in commands, in a fit and in an export."""

import contextlib
import signal
import sys
import time
import traceback
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt import signals
from tfopt.signals import CTRL_C, on_signals, raised_safely


@pytest.fixture(autouse=True)
def as_in_the_foreground():
    with on_signals([signal.SIGINT], signal.default_int_handler):  # which the background of a shell ignores
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def of_a_library(source, **names):
    """Runs code as if it stood in a file of a package that is installed."""
    exec(compile(source, np.__file__, "exec"), names)
    return names


def test_it_waits_until_a_library_has_ended(monkeypatch):
    monkeypatch.setattr(signals, "LONGEST_WAIT_S", 60.0)
    calls = of_a_library(
        """
def calls(met):
    signal.raise_signal(signal.SIGINT)
    met.append("the library goes on")
    while True:
        own()
""",
        signal=signal,
        own=lambda: None,
    )["calls"]
    met, begin = [], time.monotonic()
    with pytest.raises(KeyboardInterrupt), raised_safely(CTRL_C):
        calls(met)
    assert met == ["the library goes on"]
    assert time.monotonic() - begin < 50


def test_it_does_not_wait_for_longer_than_a_second_or_when_it_comes_again(monkeypatch):
    never_ends = of_a_library(
        """
def never_ends(times):
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)
    while True:
        pass
""",
        signal=signal,
    )["never_ends"]
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), raised_safely(CTRL_C):
        never_ends(1)
    assert time.monotonic() - begin > 0.9
    monkeypatch.setattr(signals, "LONGEST_WAIT_S", 50.0)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), raised_safely(CTRL_C):
        never_ends(2)
    assert time.monotonic() - begin < 40


def test_it_waits_where_tensorflow_has_called_the_code():
    met = []

    def of_the_user():
        signal.raise_signal(signal.SIGINT)
        met.append("goes on")

    @raised_safely(CTRL_C)
    def program():
        tf.nest.map_structure(lambda _: of_the_user(), 1)
        time.sleep(20)
        met.append("is not reached")

    with pytest.raises(KeyboardInterrupt):
        program()
    assert met == ["goes on"]


def test_an_error_that_a_library_makes_of_it_gives_way():
    shown = sys.unraisablehook

    @raised_safely(CTRL_C)
    def trace():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise TypeError("Could not generate a generic TraceType") from None

    with pytest.raises(KeyboardInterrupt) as raised:
        trace()
    assert isinstance(raised.value.__cause__, TypeError)
    assert sys.unraisablehook is shown


def test_an_exception_that_the_user_catches_is_not_raised_again():
    with raised_safely(CTRL_C) as received, contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert received == [KeyboardInterrupt]


def test_a_handler_of_the_user_is_kept():
    received = []
    with on_signals([signal.SIGINT], lambda number, frame: received.append(number)), raised_safely(CTRL_C):
        signal.raise_signal(signal.SIGINT)
    assert received == [signal.SIGINT]


def test_an_error_after_the_user_has_caught_it_is_its_own(monkeypatch):
    monkeypatch.setattr(signals, "LOST_WITHIN_S", 0.0)

    @raised_safely(CTRL_C)
    def program():
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        program()


def test_what_a_library_drops_is_raised_at_the_end(monkeypatch):
    monkeypatch.setattr(signals, "LONGEST_WAIT_S", 0.0)
    drops = of_a_library(
        """
def drops():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pass
""",
        signal=signal,
    )["drops"]
    with pytest.raises(KeyboardInterrupt), raised_safely(CTRL_C):
        drops()


class Interrupted(keras.layers.Layer):
    """Ctrl-C comes once, while TensorFlow traces it."""

    coming = goes_on = False

    def call(self, inputs):
        of_tensorflow = str(Path(tf.__file__).parent)
        if self.coming and any(each.filename.startswith(of_tensorflow) for each in traceback.extract_stack()):
            self.coming = False
            signal.raise_signal(signal.SIGINT)
            self.goes_on = True
        return inputs


@pytest.mark.parametrize("act", ["fit", "evaluate", "predict", "export", "quantize"])
def test_ctrl_c_during_a_trace_ends_what_the_user_called(act, tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "LONGEST_WAIT_S", 60.0)
    layer = Interrupted()
    model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
    plan = tfopt.plan(tfopt.TrainingConfig(precision="float32", jit_compile=False, global_batch_size=4))
    tfopt.compile(model, plan, optimizer="sgd", loss="mse")
    data = [np.zeros((8, 2), "float32"), np.zeros((8, 1), "float32")]
    acts = {
        "fit": lambda: model.fit(*data, verbose=0),
        "evaluate": lambda: model.evaluate(*data, verbose=0),
        "predict": lambda: model.predict(data[0], verbose=0),
        "export": lambda: tfopt.export(model, tmp_path / "model"),
        "quantize": lambda: tfopt.quantize(model, calibration_data=data[0]),
    }
    layer.coming = True
    with pytest.raises(KeyboardInterrupt):
        acts[act]()
    assert layer.goes_on
    assert {each.name for each in tmp_path.iterdir()} <= {"model"}  # nothing temporary; a short export has ended


def test_ctrl_c_in_a_callback_is_raised_there():
    caught = []

    class Stopper(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                caught.append(epoch)
                self.model.stop_training = True

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    tfopt.compile(model, tfopt.plan(tfopt.TrainingConfig(precision="float32")), optimizer="sgd", loss="mse")
    history = model.fit(np.zeros((8, 2)), np.zeros((8, 1)), epochs=3, verbose=0, callbacks=[Stopper()])
    assert (caught, history.epoch) == ([0], [0])
