"""Which training settings are refused, and how."""

import dataclasses

import keras
import pytest
import tensorflow as tf

from tfopt.errors import ConfigError
from tfopt.training import TrainingConfig
from tfopt.training.config import OPTIMIZERS


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        *(
            (name, value, "a whole number of at least 1")
            for name in ("epochs", "global_batch_size", "accumulate", "keep_checkpoints")
            for value in (0, -1, 1.5, "3", True)
        ),
        *(("checkpoint_every", value, "'epoch' or a whole number") for value in (0, "step", 2.5, None, True)),
        *(("micro_batches", value, "'auto' or a whole number") for value in (0, "many", None)),
        *(
            (name, value, "'auto' or a whole number of at least 1")
            for name in ("steps_per_execution", "prefetch")
            for value in (0, -1, 2.0, "ten", True, None)
        ),
        *(("learning_rate", value, "positive") for value in (0, -0.1, float("nan"), float("inf"), "fast", True, None)),
        *(("seed", value, "[0, 2**32)") for value in (-1, 2**32, 1.5, "a", None, True)),
        ("precision", "fp16", "Expected one of: 'auto', 'float32', 'mixed_bfloat16', 'mixed_float16'"),
        ("precision", None, "'mixed_bfloat16' or 'mixed_float16'"),
        ("precision", "mixed_floa16", "Did you mean 'mixed_float16'?"),
        ("strategy", "miror", "'multi_worker', 'none', 'pipeline'. Did you mean 'mirrored'?"),
        ("strategy", "Mirrored", "Did you mean 'mirrored'?"),
        ("strategy", None, "an instance of Strategy"),
        ("strategy", 5, "an instance of Strategy"),
        ("optimizer", "adamm", "Did you mean 'adam'?"),
        ("optimizer", "lossscaleoptimizer", "Expected one of"),
        ("optimizer", None, "an instance of Optimizer"),
        ("optimizer", keras.optimizers.Adam, "an instance of Optimizer"),
        ("decay", "cos", "Expected one of: 'constant', 'cosine'. Did you mean 'cosine'?"),
        ("strategy", keras.distribution.DataParallel(devices=["cpu:0"]), "ignores it"),
        ("communication", "nvlink", "Expected one of: 'auto', 'hierarchical_copy', 'nccl', 'ring'"),
        ("auto_shard", "files", "Did you mean 'file'?"),
        ("remat", "full", "This mode fails in fit on TensorFlow"),
        ("remat", "none", "Expected one of: 'activations'"),
        ("resume", "never", "'auto', True or False"),
        ("resume", True, "checkpoint_dir must be given"),
        ("checkpoint_dir", " ", "must name a directory"),
        ("tensor_float_32", 1, "'auto', True or False"),
        ("sparse_embedding_gradients", None, "True or False"),
        ("sparse_embedding_gradients", "auto", "True or False"),
        ("pipeline_devices", "GPU:0", "a tuple of strings"),
        ("pipeline_cuts", (1, 2), "a tuple of strings"),
        ("jit_compile", "yes", "'auto', True or False"),
        ("jit_compile", 1, "'auto', True or False"),
        ("jit_compile", None, "'auto', True or False"),
        ("global_batch_size", 10**22, "at most 2^63 - 1"),
    ],
)
def test_a_wrong_value_is_refused(setting, value, rule):
    with pytest.raises(ConfigError) as caught:
        TrainingConfig(**{setting: value})
    message = str(caught.value)
    assert setting in message
    assert rule in message
    assert str(value) in message


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "Adam"},
        {"optimizer": "sgd"},
        {"optimizer": keras.optimizers.Lion(1e-4)},
        {"strategy": tf.distribute.OneDeviceStrategy("CPU:0")},
        {"learning_rate": 1},
        {"seed": 2**32 - 1},
        {"jit_compile": False, "steps_per_execution": 1, "prefetch": 1, "decay": "constant"},
    ],
)
def test_a_right_value_is_kept(settings):
    config = TrainingConfig(**settings)
    assert {name: getattr(config, name) for name in settings} == settings


def test_it_is_frozen_and_takes_keywords_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainingConfig().epochs = 3
    with pytest.raises(TypeError):
        TrainingConfig(3)


def test_the_names_of_optimizers_are_those_of_keras():
    """They are written out, so that settings can be read without importing Keras."""
    wrappers = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
    classes = [name for name, value in vars(keras.optimizers).items() if isinstance(value, type)]
    assert sorted(OPTIMIZERS) == sorted(name.lower() for name in classes if name not in wrappers)
