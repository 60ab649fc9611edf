"""tfmot as the reference for our masks, and as what prunes Keras 2 models."""

import keras
import numpy as np
import pytest
import tensorflow_model_optimization as tfmot
import tf_keras

from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.pruning import PruningConfig, PruningSchedule, prune


def build(api):
    """The same model in Keras 2 (api=tf_keras) or Keras 3 (api=keras)."""
    block = api.Sequential([api.layers.Dense(8, name="inner")], name="block")
    conv, head = api.layers.Conv2D(4, 3, name="conv"), api.layers.Dense(3, name="head")
    return api.Sequential([api.Input((8, 8, 3)), conv, api.layers.Flatten(), block, head])


def keras_2():
    return build(tf_keras)


def keras_3(reference):
    model = build(keras)
    model.set_weights(reference.get_weights())
    return model


@pytest.mark.parametrize("sparsity", [pytest.param(0.3, marks=pytest.mark.slow), 0.9])
def test_masks_equal_those_of_tfmot_in_training(sparsity):
    """tfmot sets its masks in the first step, from the weights as they are; a zero learning rate leaves these."""
    model = keras_2()
    ours = keras_3(model)
    schedule = tfmot.sparsity.keras.ConstantSparsity(sparsity, begin_step=0, frequency=1)
    wrapped = tfmot.sparsity.keras.prune_low_magnitude(model, pruning_schedule=schedule)
    wrapped.compile(tf_keras.optimizers.SGD(0.0), "mse")
    callbacks = [tfmot.sparsity.keras.UpdatePruningStep()]
    wrapped.fit(np.zeros((2, 8, 8, 3)), np.zeros((2, 3)), epochs=2, callbacks=callbacks, verbose=0)
    prune(ours, PruningConfig(target_sparsity=sparsity))
    reference = tfmot.sparsity.keras.strip_pruning(wrapped).get_weights()
    for expected, received in zip(reference, ours.get_weights(), strict=True):
        np.testing.assert_array_equal(received, expected)


def test_a_tf_keras_model_is_pruned_in_place():
    model = keras_2()
    ours = keras_3(model)
    config = PruningConfig(target_sparsity=0.75, exclude=("head",))
    report, expected = prune(model, config), prune(ours, config)
    for received, reference in zip(model.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_array_equal(received, reference)
    assert [change.name for change in report.changed] == ["conv", "inner"]
    assert [skip.name for skip in report.skipped] == ["head"]
    assert report.metrics == expected.metrics
    assert not any(type(layer).__name__ == "PruneLowMagnitude" for layer in model.layers)


class Subclassed(tf_keras.Model):
    def __init__(self):
        super().__init__()
        self.head = tf_keras.layers.Dense(2)

    def call(self, inputs):
        return self.head(inputs)


def built_subclassed():
    model = Subclassed()
    model(np.zeros((1, 2), "float32"))
    return model


@pytest.mark.parametrize(
    ("build", "config", "error", "message"),
    [
        (keras_2, {"scope": "global"}, ConfigError, "takes criterion='magnitude' and scope='layer' only"),
        (keras_2, {"criterion": "random"}, ConfigError, "takes criterion='magnitude' and scope='layer' only"),
        (keras_2, {"exclude": ("tail",)}, ConfigError, "exclude must name layers of the model. Received: 'tail'"),
        (Subclassed, {}, UnsupportedModelError, "model must be built"),
        (built_subclassed, {}, UnsupportedModelError, "functional and Sequential models only"),
    ],
)
def test_what_tfmot_cannot_do_is_refused(build, config, error, message):
    model = build()
    before = [array.tobytes() for array in model.get_weights()] if model.built else []
    with pytest.raises(error, match=message):
        prune(model, PruningConfig(**config))
    assert [array.tobytes() for array in model.get_weights()] == before if model.built else True


def test_the_callback_refuses_a_tf_keras_model():
    with pytest.raises(UnsupportedModelError, match=r"use tfmot.sparsity.keras.UpdatePruningStep"):
        PruningSchedule(keras_2())


@pytest.mark.slow
def test_tfmot_is_not_imported_for_a_keras_3_model(fresh_python):
    script = (
        "import sys, keras; from tfopt.pruning import prune;"
        "prune(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]));"
        "sys.exit(any(name.split('.')[0] in ('tf_keras', 'tensorflow_model_optimization') for name in sys.modules))"
    )
    fresh_python("-c", script, check=True)


@pytest.mark.slow
def test_pruning_a_tf_keras_model_leaves_the_environment_alone(fresh_python):
    script = (
        "import os, tf_keras; from tfopt.pruning import prune; before = dict(os.environ);"
        "prune(tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(3)]));"
        "assert dict(os.environ) == before"
    )
    fresh_python("-c", script, imported="nothing", check=True)
