"""Layers that Keras computes by a detour are named, with what is saved without it, unless tfopt's step takes none."""

import dataclasses

import keras
import numpy as np
import pytest
from keras import layers

import tfopt
from tfopt.compat.plain import DETOURS
from tfopt.diagnosis import experiments
from tfopt.diagnosis.diagnose import DoctorHook
from tfopt.diagnosis.experiments import CannotMeasureError, Pair
from tfopt.diagnosis.measured import Measured
from tfopt.diagnosis.rules.detours import taken
from tfopt.hardware import detect
from tfopt.scripts.hook import hooked

BATCH, STEPS = 8, 12


@pytest.fixture(autouse=True)
def short_experiments(monkeypatch):
    """The tests look for large effects, so short experiments are enough."""
    monkeypatch.setattr(experiments, "SECONDS", 0.1)


def watched(model):
    """Returns the measurements of a few steps of training, judged as on a processor."""
    doctor = DoctorHook(steps=6)
    with hooked(doctor):
        model.fit(np.zeros((48, *model.input_shape[1:])), np.zeros((48, 1)), batch_size=BATCH, verbose=0)
    doctor.observation.epochs = 1_000_000  # so that the time to build a step does not count
    found = Measured(doctor.observation, dataclasses.replace(detect(), gpus=()))
    vars(found.experiments)["_done"]["in_graph"] = Pair(before_ms=2.0, after_ms=2.0)
    return found


@pytest.fixture(scope="module")
def frames():
    # Many small frames: the calls take half of the step on any processor.
    inside = keras.Sequential([keras.Input((4, 4, 2)), layers.Conv2D(4, 3), layers.GlobalAveragePooling2D()])
    times = layers.TimeDistributed(inside, name="frames")
    model = keras.Sequential([keras.Input((4 * STEPS, 4, 4, 2)), times, layers.Flatten(), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    return watched(model)


@pytest.mark.timed
def test_a_network_called_for_each_step_is_found_with_what_one_call_saves(frames):
    vars(frames.experiments)["_done"].pop("time_distributed", None)  # of a run before
    found = taken("time_distributed", frames)
    assert vars(frames.experiments)["_done"]["time_distributed"].saved > 0.1
    assert found.title == "TimeDistributed calls its layer once for each step: 1 layer"
    assert "frames: " in found.evidence
    assert found.gain is not None
    assert found.advice.startswith("tfopt.compile, or tfopt accelerate")
    assert found.advice.endswith("such as Dense")


@pytest.mark.timed
@pytest.mark.slow
def test_the_loops_of_both_directions_are_found_and_unrolled_for_the_experiment_alone():
    both = layers.Bidirectional(layers.SimpleRNN(4))
    model = keras.Sequential([keras.Input((STEPS, 3)), both, layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    measured = watched(model)
    found = taken("recurrent_loops", measured)
    assert vars(measured.experiments)["_done"]["recurrent_loops"].saved > 0.05
    assert found.title.endswith("2 layers")
    assert "forward" in found.evidence
    assert "backward" in found.evidence
    assert found.gain is not None
    assert found.advice.startswith("in the script: unroll=True")
    assert (both.forward_layer.unroll, both.backward_layer.unroll) == (False, False)


def test_the_step_of_tfopt_is_not_told_what_it_does_already():
    parts = layers.TimeDistributed(layers.Dense(4)), layers.SimpleRNN(4), layers.Dense(1)
    model = keras.Sequential([keras.Input((STEPS, 3)), *parts])
    settings = {"strategy": "none", "precision": "float32", "jit_compile": False, "steps_per_execution": 1}
    tfopt.compile(model, tfopt.plan(tfopt.TrainingConfig(global_batch_size=BATCH, **settings)), loss="mse")
    measured = watched(model)
    done = "tfopt's step computes these layers by plain operations"
    assert taken("time_distributed", measured) == done
    with pytest.raises(CannotMeasureError, match="has set the step"):
        taken("recurrent_loops", measured)


@pytest.mark.parametrize(
    ("layer", "steps", "is_named"),
    [
        (layers.LSTM(2), 64, True),
        (layers.LSTM(2), 65, False),
        (layers.LSTM(2), None, False),
        (layers.LSTM(2, unroll=True), 8, False),
        (layers.RNN([layers.SimpleRNNCell(2), layers.GRUCell(2)]), 8, True),
    ],
)
def test_a_loop_is_named_if_it_can_be_unrolled(layer, steps, is_named):
    keras.Model(inputs := keras.Input((steps, 3)), layer(inputs))
    assert DETOURS["recurrent_loops"].is_taken_by(layer) == is_named


def test_layers_whose_detour_cannot_be_timed_are_named_without_a_gain(frames, monkeypatch):
    sounds = [layers.STFTSpectrogram(frame_length=16, name=f"sound_{number}") for number in range(10)]
    inputs = keras.Input((64, 1))
    model = keras.Model(inputs, [sound(inputs) for sound in sounds])
    model.compile(jit_compile=False)
    monkeypatch.setattr(Measured, "model", model)
    found = taken("spectrograms", frames)
    assert found.gain is None
    assert found.evidence.endswith("sound_7, 2 more")
    assert "keras.ops.stft" in found.advice


@pytest.mark.parametrize("after_ms", [1.0, 2.0])
def test_a_detour_that_costs_little_is_not_reported(frames, monkeypatch, after_ms):
    pool = layers.AdaptiveMaxPooling2D(2, name="pool")
    model = keras.Sequential([keras.Input((8, 8, 2)), pool])
    model.compile(jit_compile=False)
    monkeypatch.setattr(Measured, "model", model)
    vars(frames.experiments)["_done"]["adaptive_pooling"] = Pair(before_ms=2.0, after_ms=after_ms)
    found = taken("adaptive_pooling", frames)
    if after_ms == 1.0:
        assert found.evidence == "pool: 1 ms with plain operations, 2 ms as it is (threshold 5%)"
    else:
        assert found == "2 ms with plain operations, 2 ms as it is"


def test_spectrograms_as_advised_are_those_of_the_layer():
    sound = np.random.default_rng(0).normal(size=(2, 400, 1)).astype("float32")
    layer = layers.STFTSpectrogram(mode="magnitude", scaling=None, frame_length=64, frame_step=32, periodic=True)
    real, imaginary = keras.ops.stft(sound[..., 0], 64, 32, 64, window="hann", center=False)
    np.testing.assert_allclose(layer(sound), np.hypot(real, imaginary), atol=1e-3)
