"""The advised settings: which batch reaches a loss soonest, what fits, and the settings that go with it."""

from dataclasses import replace

import keras
import pytest

from tfopt.errors import ConfigError
from tfopt.recipe import Recipe, with_changes
from tfopt.training import TrainingConfig, plan
from tfopt.training.step.noise import NoiseEstimate
from tfopt.tuning.advice import advise

# A step takes 1 ms and 10 us for each example: the speed rises with the batch, to 100,000 examples per second.
RATES = {size: size / (1e-3 + 1e-5 * size) for size in (8, 16, 32, 64, 128, 256, 512, 1024)}
TRAINING = TrainingConfig(global_batch_size=32, learning_rate=1e-3, epochs=20, precision="float32")


def noise(scale):
    return NoiseEstimate(noise_scale=scale, least=0.8 * scale, most=1.3 * scale, steps=100)


@pytest.mark.parametrize(("scale", "expected"), [(10, 32), (100, 64), (2000, 256), (1e6, 1024)])
def test_the_batch_takes_least_time_until_a_loss(scale, expected):
    """Steps in proportion to 1 + N / B, at the time of a step: least at the root of N times 100 examples."""
    training = replace(TRAINING, global_batch_size=7)  # was not timed
    found = advise(training, largest=1024, knee=1024, rates=RATES, noise=noise(scale))
    times = {size: (1 + scale / size) * size / rate for size, rate in RATES.items()}
    best = min(times.values())
    assert found.global_batch_size == min(size for size in times if times[size] <= 1.05 * best) == expected


def test_a_batch_that_is_about_as_good_stays_and_nothing_changes():
    found = advise(replace(TRAINING, global_batch_size=128), largest=1024, knee=1024, rates=RATES, noise=noise(100))
    assert (found.global_batch_size, found.settings) == (128, {})
    assert found.decisions[0].reason.startswith("as before")


def test_without_the_noise_scale_it_is_the_knee_and_with_it_alone_the_smaller_of_both():
    assert advise(TRAINING, largest=1024, knee=256, rates=RATES).global_batch_size == 256
    assert advise(TRAINING, largest=1024, knee=256, noise=NoiseEstimate()).global_batch_size == 256
    assert advise(TRAINING, largest=1024, knee=256, noise=noise(90)).global_batch_size == 64
    assert advise(TRAINING, largest=1024, knee=256, noise=noise(90), replicas=4).global_batch_size == 64
    assert advise(TRAINING, largest=1024, knee=256, replicas=4).global_batch_size == 1024
    assert advise(TRAINING, largest=64).global_batch_size == 64
    (reason,) = (each.reason for each in advise(TRAINING, largest=64).decisions if each.setting == "global_batch_size")
    assert reason == "the largest that was trained; its speed is unknown"


@pytest.mark.parametrize(
    ("scale", "size", "epochs"),
    [(32, 256, 90), (1e6, 256, None), (None, 256, None), (100, 16, None)],  # (256 + 32) / (32 + 32) times 20
)
def test_a_larger_batch_has_the_epochs_for_the_same_loss(scale, size, epochs):
    known = NoiseEstimate() if scale is None else noise(scale)
    found = advise(TRAINING, largest=1024, noise=known, global_batch_size=size, examples=2560)
    assert found.settings.get("epochs") == epochs
    assert found.steps_per_epoch == 2560 // size


def test_a_batch_has_no_more_examples_than_there_are():
    found = advise(TRAINING, largest=1024, knee=512, examples=200, replicas=3)
    assert (found.global_batch_size, found.steps_per_epoch) == (198, 2)
    assert "few steps" in found.decisions[-1].reason


@pytest.mark.parametrize(
    ("size", "replicas", "largest", "accumulate", "micro"),
    [(1024, 1, 100, 11, 94), (1024, 2, 512, 1, 512), (1024, 2, 511, 2, 256), (10, 1, 4, 3, 4)],
)
def test_what_does_not_fit_is_divided_and_every_micro_batch_fits(size, replicas, largest, accumulate, micro):
    found = advise(TRAINING, largest=largest, global_batch_size=size, replicas=replicas)
    assert found.settings.get("accumulate", 1) == accumulate
    assert found.micro_batch_size == micro <= largest
    assert replicas * accumulate * micro >= size


def test_the_settings_make_the_advised_rate_and_warm_up():
    sgd = replace(TRAINING, optimizer="sgd", learning_rate=0.1)
    for training, rate in ((TRAINING, 2e-3), (sgd, 0.4), (replace(sgd, base_batch_size=64), 0.2)):
        found = advise(training, largest=128)
        recipe = with_changes(Recipe(name="tuned", training=training), {"training": dict(found.settings)})
        decided = plan(recipe)
        steps = found.steps_per_epoch or 10
        optimizer = decided.optimizer(steps)
        optimizer.iterations.assign(round(steps * recipe.training.warmup_epochs))
        assert found.learning_rate == pytest.approx(rate) == pytest.approx(float(optimizer.learning_rate))
        assert recipe.training.warmup_epochs == 2  # a tenth of 20 epochs


def test_a_smaller_batch_needs_no_warm_up_and_an_epoch_keeps_its_examples():
    found = advise(replace(TRAINING, steps_per_epoch=100), largest=16)
    assert found.settings == {"global_batch_size": 16, "base_batch_size": 32, "steps_per_epoch": 200}
    assert found.learning_rate == pytest.approx(1e-3 / 2**0.5)


def test_an_optimizer_object_has_its_rate_in_the_reasons():
    training = replace(TRAINING, optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    found = advise(training, largest=64)
    assert (found.settings, found.learning_rate) == ({"global_batch_size": 64}, pytest.approx(0.2))
    assert any("where the optimizer is made" in each.reason for each in found.decisions)


def test_impossible_numbers_are_refused():
    with pytest.raises(ConfigError, match="largest must be at least 1"):
        advise(TRAINING, largest=0)


def test_a_knee_above_the_memory_of_a_step_gives_what_fits_also_without_a_number_of_examples():
    for examples in (None, 50_000):
        found = advise(TrainingConfig(accumulate=2), largest=100, knee=200, examples=examples)
        assert found.global_batch_size == 100
        assert found.decisions[0].reason == "the most that fits into memory at once"
