"""FitProgress in real fits, on a terminal and where there is none."""

import io
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from rich.console import Console

from tfopt.reporting.terminal import FitProgress, fitted

WIDTH = 100
X, Y = np.random.default_rng(0).normal(size=(32, 4)).astype("float32"), np.arange(32) % 2


@pytest.fixture(scope="module")
def model():
    """One for all, since its weights do not matter."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(1, name="top1")])
    return model


def plain(model, data=X, labels=Y, callbacks=(), **arguments):
    """The lines of a fit whose console is not a terminal."""
    file = io.StringIO()
    progress = FitProgress("train", console=Console(file=file))
    model.fit(data, labels, verbose=0, callbacks=[progress, *callbacks], **arguments)
    return file.getvalue().splitlines()


def terminal(width=WIDTH):
    file = io.StringIO()
    return file, FitProgress("train", console=Console(file=file, force_terminal=True, width=width, color_system=None))


def drawings(file):
    """The states of the bar, one after the other, without control codes."""
    return [re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", state) for state in file.getvalue().split("\r")[1:]]


def test_a_terminal_gets_one_line_drawn_over_itself(model):
    file, progress = terminal()
    model.fit(X, Y, epochs=3, batch_size=8, validation_data=(X, Y), verbose=0, callbacks=[progress])
    states = drawings(file)
    assert len(states) >= 3
    assert file.getvalue().count("\n") == 1
    assert file.getvalue().endswith("\n")
    last = states[-1]
    assert "train  3/3" in last
    assert re.search(r"loss \d\S* \(val \d\S*\)  accuracy \d\S* \(val \d\S*\)", last)
    assert re.search(r"took \d+:\d\d$", last.rstrip())
    assert not any("?" in state for state in states)


def test_the_bar_grows_to_the_whole(model):
    file, progress = terminal(width=200)
    model.fit(X, Y, epochs=4, batch_size=8, verbose=0, callbacks=[progress])
    ends = [next(state for state in drawings(file) if f"epoch {epoch}/4  4/4" in state) for epoch in (1, 2, 4)]
    first, second, whole = (state.count("━") + state.count("╸") for state in ends)
    assert first * 2 == pytest.approx(second, abs=2)
    assert first * 4 == pytest.approx(whole, abs=4)


FIGURES = {"loss": 0.06121, "val_loss": 0.08123, "accuracy": 0.9812, "val_accuracy": 0.9712, "top1": 0.9812}
HEADS = ["prune  epoch 20/40  12/45", "prune  epoch 20/40", "prune  20/40"]


@pytest.mark.parametrize(
    ("width", "bar", "shown"),
    [
        (140, True, "prune  epoch 20/40  12/45 loss 0.0612 (val 0.0812)  accuracy 0.9812 (val 0.9712)  top1 0.9812"),
        (115, False, "prune  epoch 20/40  12/45 loss 0.0612 (val 0.0812)  accuracy 0.9812 (val 0.9712)  top1 0.9812"),
        (90, False, "prune  epoch 20/40 loss 0.0612 (val 0.0812)  accuracy 0.9812 (val 0.9712)"),
        (80, False, "prune  20/40 loss 0.0612 (val 0.0812)  accuracy 0.9812 (val 0.9712)"),
        (60, False, "prune  epoch 20/40 accuracy 0.9812 (val 0.9712)"),
    ],
)
def test_the_bar_goes_before_any_figure(width, bar, shown):
    (left, right), bar_width = fitted(HEADS, FIGURES, "0:12 left", width)
    assert (bar_width is not None) == bar
    assert len(left) + (bar_width or 2) + len(right) <= width
    assert f"{left} {right}".split() == [*shown.split(), "0:12", "left"]


def test_no_figure_is_ever_cut():
    for width in range(5, 140):
        (left, right), _ = fitted(HEADS, FIGURES, "0:12 left", width)
        for figure in re.findall(r"0\.\d+", left + right):
            assert float(figure) in {0.0612, 0.0812, 0.9812, 0.9712}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("width", [20, 40, 60, WIDTH])
def test_the_line_fills_the_terminal_so_that_other_output_starts_a_new_one(model, width):
    file, progress = terminal(width)
    model.fit(X, Y, epochs=2, validation_data=(X, Y), verbose=0, callbacks=[progress])
    states = [state.rstrip("\n") for state in drawings(file)]
    assert {len(state) for state in states} == {width}
    assert all(state.startswith(("train  epoch", "train  2/2", "train  1/2")) for state in states)


def test_a_fit_that_raises_leaves_the_terminal_as_it_was(model):
    def fail(epoch, logs):
        if epoch == 1:
            raise RuntimeError("midway")

    file, progress = terminal()
    with pytest.raises(RuntimeError, match="midway"):
        model.fit(X, Y, epochs=3, verbose=0, callbacks=[progress, keras.callbacks.LambdaCallback(on_epoch_end=fail)])
    assert "\x1b[?25l" not in file.getvalue()  # the cursor was not hidden

    # The same callback serves the next fit, from its beginning.
    file.truncate(0)
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[progress])
    assert all("epoch 1/1" in state for state in drawings(file))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # how Keras learns the length
def test_steps_of_unknown_number_are_counted(model):
    def batches():
        for start in range(0, 32, 8):
            yield X[start : start + 8], Y[start : start + 8]

    signature = (tf.TensorSpec((None, 4)), tf.TensorSpec((None,), "int64"))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    file, progress = terminal()
    model.fit(dataset, epochs=2, shuffle=False, verbose=0, callbacks=[progress])
    assert "epoch 1/2  1 " in drawings(file)[0]
    assert "epoch 1/2  4/4" in file.getvalue()
    assert "epoch 2/2  4/4" in drawings(file)[-1]


@pytest.mark.slow
def test_without_a_terminal_about_every_tenth_epoch_is_a_line(model):
    lines = plain(model, epochs=40, batch_size=32)
    assert [int(re.search(r"epoch (\d+)/40", line)[1]) for line in lines] == [1, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    assert all("\x1b" not in line and "\r" not in line for line in lines)
    assert re.fullmatch(r"train  epoch 40/40  loss \S+  accuracy \S+  top1 \S+  took \d+:\d\d", lines[-1])
    assert re.search(r"\d+:\d\d left$", lines[-2])


def test_a_long_line_is_not_broken_where_there_is_no_terminal(model):
    (line,) = plain(model, epochs=1, validation_data=(X, Y))
    assert len(line) > 80


def test_a_fit_that_stops_early_still_reports_its_last_epoch(model):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 6

    lines = plain(model, epochs=40, callbacks=[Stop()])
    assert [int(re.search(r"epoch (\d+)/40", line)[1]) for line in lines] == [1, 4, 7]


def test_the_first_line_of_several_gives_no_time_before_there_is_an_estimate(model):
    first, last = plain(model, epochs=2, steps_per_epoch=1, batch_size=32)
    assert re.fullmatch(r"train  epoch 1/2  loss \S+  accuracy \S+  top1 \S+", first)
    assert re.search(r"  took \d+:\d\d$", last)


def test_a_resumed_fit_counts_its_own_epochs(model):
    lines = plain(model, epochs=30, initial_epoch=10)
    assert [int(re.search(r"epoch (\d+)/30", line)[1]) for line in lines] == [11, *range(12, 31, 2)]
    assert plain(model, epochs=10, initial_epoch=10) == []


def test_sparsity_from_another_callback_is_shown(model):
    class Sparsity(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            logs["sparsity"] = 0.75

    file = io.StringIO()
    progress = FitProgress(console=Console(file=file))
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[Sparsity(), progress])
    assert "sparsity 0.75" in file.getvalue()


@pytest.mark.parametrize(("power", "shown"), [(250.4, "250 W"), (float("nan"), "unavailable")])
def test_the_figures_of_a_gpu_are_shown_and_not_what_is_unknown(model, power, shown):
    class Machine(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            logs |= {"gpu_utilization_percent": 87.5, "gpu_power_watts": power, "gpu_memory_used_bytes": 8e10}
            logs["gpu_tensorflow_memory_peak_bytes"] = 3.21e9

    file = io.StringIO()
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[Machine(), FitProgress(console=Console(file=file))])
    assert f"  gpu 88%  memory 3.21 GB  power {shown}  took" in file.getvalue()
