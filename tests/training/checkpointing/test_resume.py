"""A training that is interrupted in any way and resumed ends with the same bits as one without interruption."""

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import time
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from scripts.resumed_training import BATCH, EXAMPLES, build, examples, train

from tfopt.errors import ArtifactError, ConfigError, TfoptWarning
from tfopt.training import TrainingConfig, ledger, plan
from tfopt.training.checkpointing.store import CheckpointStore

SCRIPT = Path(__file__).parent / "scripts" / "resumed_training.py"
STEPS = -(-EXAMPLES // BATCH)


class Interrupted(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Ends the training like a crash, after so many steps in all."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() >= self.step:
            raise Interrupted


class Count(keras.callbacks.Callback):
    calls = 0

    def on_train_batch_end(self, batch, logs=None):
        self.calls += 1


@functools.cache
def undisturbed(**settings):
    return train(None, **settings)


def interrupted(directory, step, **settings):
    with pytest.raises(Interrupted):
        train(directory, callbacks=[Interrupt(step)], **settings)


@pytest.fixture(scope="module")
def stopped_at_13(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stopped") / "run"
    interrupted(directory, 13)
    return directory


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory):
    """A training of two epochs that ended: its directory, and what it returned."""
    directory = tmp_path_factory.mktemp("ended") / "run"
    return directory, train(directory, epochs=2, decay_epochs=4)


@pytest.fixture
def checkpoints(stopped_at_13, tmp_path):
    """The directory of a training that was interrupted at step 13, for one test."""
    return Path(shutil.copytree(stopped_at_13, tmp_path / "run"))


def assert_same(found, expected):
    (model, history), (other, wanted) = found, expected
    assert history == wanted
    for one, two in zip(state(model), state(other), strict=True):
        assert one.tobytes() == two.tobytes()


def state(model):
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, (2, 15)),  # before the first checkpoint, and at the end of an epoch; below, others go on within one
        pytest.param({"optimizer": "adam"}, (5, 28), marks=pytest.mark.slow),
        pytest.param({"pruning": True}, (17,), marks=pytest.mark.slow),
        ({"pruning": "by gradients", "size_known": False, "validation": True}, (17,)),
        pytest.param(
            {"pruning": True, "size_known": False, "steps_per_execution": 3, "checkpoint_every": "epoch"},
            (15,),
            marks=pytest.mark.slow,
        ),
        pytest.param({"checkpoint_every": "epoch", "validation": True}, (16,), marks=pytest.mark.slow),
        pytest.param({"steps_per_execution": 4}, (5, 9), marks=pytest.mark.slow),
        pytest.param({"accumulate": 4, "drop_remainder": True}, (9,), marks=pytest.mark.slow),
        pytest.param({"precision": "mixed_float16", "pruning": True}, (17,), marks=pytest.mark.slow),
        pytest.param({"jit_compile": True}, (9,), marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_an_interrupted_training_goes_on_as_if_nothing_had_been(tmp_path, settings, steps):
    for step in steps:
        interrupted(tmp_path, step, **settings)
    resumed = train(tmp_path, **settings)
    assert 0 < ledger(resumed[0]).resumed_from < 4 * STEPS
    assert_same(resumed, undisturbed(**settings))


@pytest.mark.slow
def test_replicas_go_on_each_with_its_own_statistics(tmp_path, two_replicas):
    settings = {"strategy": two_replicas}
    interrupted(tmp_path, 16, **settings)
    assert_same(train(tmp_path, **settings), undisturbed(**settings))


def test_a_checkpoint_saves_no_more_than_it_must(tmp_path):
    interrupted(tmp_path, 14, checkpoint_every=3, keep_checkpoints=2, resume=False)  # there is nothing to resume
    assert CheckpointStore(tmp_path).steps() == [9, 12]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(checkpoints):
    store = CheckpointStore(checkpoints)
    assert store.steps() == [6, 9, 12]
    newest = store.path(12)
    content = newest.read_bytes()
    newest.write_bytes(content[: len(content) // 2])
    with pytest.warns(TfoptWarning, match=newest.name):
        resumed = train(checkpoints)
    assert ledger(resumed[0]).resumed_from == 9
    assert_same(resumed, undisturbed())


def test_resume_false_wants_an_empty_directory_and_true_a_checkpoint(tmp_path, checkpoints):
    with pytest.raises(ConfigError, match="resume=True"):
        train(tmp_path / "none", resume=True)
    with pytest.raises(ConfigError, match=r"resume=False.*steps 6"):
        train(checkpoints, resume=False)
    assert_same(train(checkpoints, resume=True), undisturbed())


def test_a_finished_training_is_not_trained_again(two_epochs):
    directory, first = two_epochs
    files = {path: path.stat().st_mtime_ns for path in directory.glob("step-*")}
    count = Count()
    with pytest.warns(TfoptWarning, match=r"nothing to train: .* reached epoch 2 of 2 before"):
        again = train(directory, epochs=2, decay_epochs=4, callbacks=[count])
    assert count.calls == 0
    assert_same(again, first)
    assert {path: path.stat().st_mtime_ns for path in directory.glob("step-*")} == files


@pytest.mark.slow
def test_the_end_of_an_epoch_is_saved_also_if_the_resumed_training_has_no_step_left(tmp_path):
    settings = {"epochs": 3, "decay_epochs": 4}
    interrupted(tmp_path, 3 * STEPS, **settings)
    assert CheckpointStore(tmp_path).load_newest().meta["epoch"] == 2
    resumed = train(tmp_path, **settings)
    assert_same(resumed, undisturbed(**settings))
    with pytest.warns(TfoptWarning, match=r"reached epoch 3 of 3 before"):
        assert_same(train(tmp_path, **settings), resumed)


def test_more_epochs_go_on_from_the_last(two_epochs, tmp_path):
    count = Count()
    directory = shutil.copytree(two_epochs[0], tmp_path / "run")
    assert_same(train(directory, epochs=4, callbacks=[count]), undisturbed())
    assert count.calls == 2 * STEPS


def test_another_number_of_steps_per_execution_goes_on_all_the_same(checkpoints):
    assert_same(train(checkpoints, steps_per_execution=3), undisturbed())


@pytest.mark.parametrize("change", [{"width": 17}, {"optimizer": "adam"}])
def test_a_changed_model_is_refused_untouched(checkpoints, change):
    files = {path: path.read_bytes() for path in checkpoints.iterdir()}
    touched = []

    class Look(keras.callbacks.Callback):
        def set_model(self, model):
            super().set_model(model)
            touched.append((model, [variable.numpy() for variable in model.variables]))

    with pytest.raises(ArtifactError, match=r"another|same|Received"):
        train(checkpoints, callbacks=[Look()], **change)
    model, before = touched[0]
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert model.optimizer.iterations.numpy() == 0
    assert {path: path.read_bytes() for path in checkpoints.iterdir()} == files  # nor is the checkpoint


def test_a_training_that_was_stopped_early_stays_stopped(tmp_path):
    class StopAfterTwo(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    stopped = train(tmp_path, callbacks=[StopAfterTwo()])
    assert len(stopped[1]["loss"]) == 2
    count = Count()
    with pytest.warns(TfoptWarning, match="stopped early"):
        again = train(tmp_path, callbacks=[count])
    assert count.calls == 0
    assert_same(again, stopped)


class KeepsTheBest(keras.callbacks.EarlyStopping):
    """Restores weights at the end that are not the last ones: it prefers the highest loss."""

    def __init__(self):
        super().__init__("loss", mode="max", patience=2, restore_best_weights=True)


@pytest.mark.parametrize("epochs", [pytest.param(2, marks=pytest.mark.slow), 4], ids=["to_the_end", "stopped"])
def test_a_finished_training_returns_the_weights_that_fit_left(tmp_path, epochs):
    first = train(tmp_path, epochs=epochs, callbacks=[KeepsTheBest()])
    with pytest.warns(TfoptWarning, match=r"nothing to train|stopped early"):
        again = train(tmp_path, epochs=epochs, callbacks=[KeepsTheBest()])
    assert_same(again, first)
    if epochs == 2:  # more epochs go on from the last weights, as if there had been no end
        assert_same(train(tmp_path, epochs=4, decay_epochs=2), train(None, epochs=4, decay_epochs=2))


AVERAGING = {"optimizer": "averaging", "decay_epochs": 4, "checkpoint_every": "epoch"}


class Halve(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        for weight in self.model.trainable_variables:
            weight.assign(weight.value / 2)


def test_averages_are_what_fit_returns_and_training_goes_on_from_what_callbacks_left_before_them(tmp_path):
    first = train(tmp_path, epochs=1, callbacks=[Halve()], **AVERAGING)
    with pytest.warns(TfoptWarning, match="nothing to train"):
        assert_same(train(tmp_path, epochs=1, **AVERAGING), first)
    resumed = train(tmp_path, epochs=2, callbacks=[Halve()], **AVERAGING)
    assert_same(resumed, train(None, epochs=2, callbacks=[Halve()], **AVERAGING))


@pytest.mark.slow
def test_averages_that_a_callback_swaps_in_are_not_what_training_goes_on_from(tmp_path):
    def swap():
        return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)

    with pytest.raises(Interrupted):
        train(tmp_path, epochs=2, callbacks=[swap(), Interrupt(STEPS + 2)], **AVERAGING)
    resumed, _ = train(tmp_path, epochs=2, callbacks=[swap()], **AVERAGING)
    assert ledger(resumed).resumed_from == STEPS
    whole, _ = train(None, epochs=2, callbacks=[swap()], **AVERAGING)
    for one, two in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-6)  # the callback exchanges by adding, which rounds


def test_a_directory_takes_one_training_at_a_time(tmp_path):
    class Second(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            train(tmp_path)

    class Third(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise Interrupted

    with pytest.raises(ConfigError, match=rf"one training at a time. Received: checkpoint_dir={tmp_path}, where proc"):
        train(tmp_path, callbacks=[Second()])
    with pytest.raises(Interrupted):  # what raised has let it go
        train(tmp_path, callbacks=[Third()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "steps_per_execution"),
    [
        (lambda data: data.repeat(), 2),  # never; Keras draws eight batches an epoch, since two do not divide seven
        (lambda data: data.shuffle(8, seed=3).repeat(), 1),
        (lambda data: data.take(7), 1),  # with each epoch
    ],
    ids=["repeated", "shuffled", "of_one_epoch"],
)
def test_data_that_goes_on_from_epoch_to_epoch_is_brought_forward(tmp_path, end, steps_per_execution):
    def fit(directory, *callbacks):
        data = end(tf.data.Dataset.from_tensor_slices(examples()).batch(7, drop_remainder=True))
        config = {
            "strategy": "none",
            "jit_compile": False,
            "steps_per_execution": steps_per_execution,
            "global_batch_size": 7,
        }
        decided = plan(TrainingConfig(checkpoint_dir=directory, checkpoint_every=3, **config))
        model = build(decided, decay_steps=28)
        return model, model.fit(data, epochs=4, steps_per_epoch=7, callbacks=callbacks, verbose=0).history

    with pytest.raises(Interrupted):
        fit(tmp_path, Interrupt(10))
    assert_same(fit(tmp_path), fit(None))


# Processes that are killed.


class Lives:
    """Runs trainings in forks of one process that has imported TensorFlow."""

    def __init__(self, python, log):
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [python, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )

    def start(self, **request):
        self.process.stdin.write(f"{json.dumps(request)}\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def end(self):
        while isinstance(code := self.answer(), str):
            pass
        assert code in (0, -signal.SIGKILL), self.log.read_text()
        return code

    def whole(self, **request):
        self.start(**request)
        assert self.end() == 0

    def killed(self, calls, seconds, **request):
        """Kills a training after so many calls and seconds. Returns whether that was before its end."""
        pid = self.start(**request)
        for _ in range(1 + calls):
            if self.answer() == 0:
                return False
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        return self.end() != 0


@pytest.fixture
def lives(tmp_path, fresh_python):
    lives = Lives(fresh_python.interpreters["tfopt"], tmp_path / "log.txt")
    yield lives
    lives.process.stdin.close()
    lives.process.stdout.close()
    lives.process.wait(timeout=300)


def results(path):
    with np.load(path) as found:
        arrays = dict(found)
    return json.loads(str(arrays.pop("history"))), arrays


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "settings"),
    [(10, {"epochs": 60}), (7, {"epochs": 40, "pruning": True, "steps_per_execution": 2, "checkpoint_every": 1})],
    ids=["every_3_steps", "every_step_while_pruning"],
)
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path, lives, kills, settings):
    lives.whole(directory=None, result=str(tmp_path / "undisturbed.npz"), **settings)
    history, state = results(tmp_path / "undisturbed.npz")
    draw = random.Random(settings["epochs"])
    killed, resumed_from = 0, []
    for run in range(kills):
        directory = tmp_path / f"run-{run}"
        request = {"directory": str(directory), "result": str(tmp_path / f"run-{run}.npz"), **settings}
        # After so many calls of the step, and at any point of the one that follows; or while it is restored and traced.
        while killed < kills:
            calls = draw.randrange(25)
            if not lives.killed(calls, draw.uniform(0, 0.02 if calls else 1), **request):
                break
            killed += 1
            with warnings.catch_warnings():
                warnings.simplefilter("error", TfoptWarning)
                newest = CheckpointStore(directory).load_newest()
            resumed_from.append(0 if newest is None else newest.step)
        lives.whole(**request)
        found_history, found = results(request["result"])
        assert found_history == history
        assert found.keys() == state.keys()
        for name, value in state.items():
            assert found[name].tobytes() == value.tobytes(), name
        if killed == kills:
            break
    assert killed == kills
    assert len(set(resumed_from)) > 3
    assert max(resumed_from) > STEPS


@pytest.mark.slow
def test_sigterm_saves_and_ends_with_exit_code_143(tmp_path, fresh_python):
    request = {"directory": str(tmp_path / "run"), "result": str(tmp_path / "result.npz"), "epochs": 200}

    def start(**changes):
        words = [str(SCRIPT), json.dumps({**request, "checkpoint_every": 10_000, **changes})]
        command = [fresh_python.interpreters["tfopt"], *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    undisturbed = start(directory=None, result=str(tmp_path / "undisturbed.npz"))
    first = start()
    for _ in range(30):
        first.stdout.readline()
    store = CheckpointStore(tmp_path / "run")
    first.send_signal(signal.SIGTERM)
    while not store.steps() and first.poll() is None:
        time.sleep(0.001)
    first.send_signal(signal.SIGTERM)  # a second one, while the process ends
    assert first.wait(timeout=300) == 143, first.communicate()[1]
    (step,) = store.steps()
    assert 0 < step < 200 * STEPS
    assert undisturbed.wait(timeout=300) == 0
    second = start(resume=True)
    assert second.wait(timeout=300) == 0, second.stderr.read()
    (history, state), (found_history, found) = results(tmp_path / "undisturbed.npz"), results(tmp_path / "result.npz")
    assert found_history == history
    assert all(found[name].tobytes() == value.tobytes() for name, value in state.items())
