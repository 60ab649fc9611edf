"""A new optimizer has every setting of the one that it is made of, or is refused."""

import threading

import keras
import numpy as np
import pytest

from tfopt.errors import ConfigError
from tfopt.models.unbuilt_copy import unbuilt_copy
from tfopt.profiling.cost.memory import training_memory
from tfopt.training import TrainingConfig
from tfopt.training.optimizers import make_optimizer


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that Keras cannot find by its name, and whose argument is not in get_config."""

    def __init__(self, rate=1.0):
        self.rate = rate

    def __call__(self, step):
        return self.rate / (1.0 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {}


class Own(keras.optimizers.SGD):
    def __init__(self, learning_rate=0.01, scale=1.0, shift=None, **options):
        super().__init__(learning_rate, **options)
        self.scale = scale
        self._shift = np.zeros(2) if shift is None else shift


class Required(keras.optimizers.SGD):
    def __init__(self, scale):
        super().__init__(0.1)
        self.scale = scale


def built(optimizer):
    optimizer.build([keras.Variable([1.0, 2.0])])
    return optimizer


def test_an_unbuilt_optimizer_is_copied_with_all_that_it_holds():
    given = Own(Falling(0.5), scale=10, shift=np.ones(2), momentum=0.9)
    made = make_optimizer(TrainingConfig(optimizer=given), steps=3)
    weight = keras.Variable([1.0, 2.0])
    made.apply([np.ones(2, "float32")], [weight])
    assert (made.scale, made.momentum, made._shift.tolist()) == (10, 0.9, [1, 1])
    np.testing.assert_allclose(weight.numpy(), [0.5, 1.5])
    assert not given.built
    assert int(given.iterations) == 0


def test_a_built_optimizer_is_made_again_and_keeps_its_schedule():
    given = built(keras.optimizers.Adam(Falling(0.25), beta_1=0.8))
    made = unbuilt_copy(given)
    assert (made.built, made.beta_1, made._learning_rate.rate) == (False, 0.8, 0.25)
    assert unbuilt_copy(built(Own(0.5, momentum=0.9))).momentum == 0.9  # nothing is lost


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: Own(scale=10), "which would lose scale=10"),
        (lambda: Own(shift=np.ones(2)), "which would lose _shift=array"),
        (lambda: Required(2), "which cannot be made again: .*unexpected keyword"),
    ],
)
def test_what_would_be_lost_is_refused(given, words):
    with pytest.raises(ConfigError, match=f"{words}.*Return every argument of"):
        unbuilt_copy(built(given()))


def test_an_optimizer_that_cannot_be_copied_is_made_again():
    given = keras.optimizers.SGD(0.5)
    given.lock = threading.Lock()
    assert float(unbuilt_copy(given).learning_rate) == 0.5


def test_the_memory_of_a_training_is_estimated_with_an_optimizer_of_a_required_argument():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    assert training_memory(model, 2, optimizer=Required(2)).optimizer == "required"
