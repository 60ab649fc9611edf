"""Augmentation inside the training step: the same images as outside of it, however the step runs."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.data import DataConfig
from tfopt.data.augment.augmentation import Augmentation
from tfopt.data.augment.config import AugmentConfig
from tfopt.errors import ConfigError
from tfopt.recipe import Recipe
from tfopt.training import TrainingConfig, compile, plan

RNG = np.random.default_rng(0)
X = RNG.random((36, 6, 6, 3)).astype("float32")  # five steps an epoch, the last of four examples
Y = RNG.integers(0, 4, 36).astype("int32")
BATCH, SEED = 8, 7
AUGMENT = AugmentConfig(crop=2, flip="horizontal", contrast=0.3)
WHOLE = AugmentConfig(crop=2, flip="horizontal", rotation_degrees=20, contrast=0.3, rand_augment=1)
MIXING = AugmentConfig(crop=1, mixup=0.4, cutmix=1)


def build(augment=None, *, own_loss=None, classes=4, **settings):
    config = {"strategy": "none", "precision": "float32", "jit_compile": False, "steps_per_execution": 1}
    decided = plan(TrainingConfig(**{**config, "global_batch_size": BATCH, "seed": SEED, **settings}))
    keras.utils.set_random_seed(0)
    with decided.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 3)),
                keras.layers.Flatten(),
                keras.layers.Dense(8, "tanh"),
                keras.layers.Dense(classes, dtype="float32"),
            ]
        )
    loss = own_loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1)
    compile(model, decided, optimizer=optimizer, loss=loss, metrics=["accuracy"], augment=augment)
    return model


def data():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def weights(model):
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def augmented_outside(augmentation, steps, replicas=1):
    """The batches of the first steps, changed outside of the training."""
    batches = []
    for step, (x, y) in enumerate(data().repeat().take(steps)):
        parts = []
        for replica in range(replicas):
            size = -(-x.shape[0] // replicas)
            part = slice(replica * size, (replica + 1) * size)
            seed = tf.random.experimental.stateless_fold_in(tf.constant([SEED, step], tf.int64), replica)
            parts.append(augmentation((x[part], y[part]), seed))
        batches.append([tf.concat(each, 0).numpy() for each in zip(*parts, strict=True)])
    return batches


def trained_outside(augmentation, epochs, replicas=1, **settings):
    model = build(**settings)
    for x, y in augmented_outside(augmentation, 5 * epochs, replicas):
        model.train_on_batch(x, y)
    return weights(model)


@functools.cache
def expected(config=AUGMENT, epochs=2):
    return trained_outside(Augmentation(config), epochs=epochs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (AUGMENT, {"steps_per_execution": 3}),
        (AUGMENT, {"accumulate": 2}),
        pytest.param(WHOLE, {"jit_compile": True, "accumulate": 3}, marks=pytest.mark.slow),
    ],
    ids=lambda value: "" if isinstance(value, AugmentConfig) else str(value),
)
def test_the_step_trains_on_the_images_that_the_seed_and_its_number_give(config, settings):
    model = build(config, **settings)
    before = weights(model)
    model.fit(data(), epochs=2, verbose=0)
    np.testing.assert_allclose(weights(model), expected(config), atol=2e-6)
    assert np.abs(before - expected(config)).max() > 0.01


def test_without_augmentation_the_images_are_others():
    ((images, labels),) = augmented_outside(Augmentation(AUGMENT), steps=1)
    assert np.abs(images - X[:BATCH]).max() > 0.1
    np.testing.assert_array_equal(labels, Y[:BATCH])


@pytest.mark.slow
def test_each_replica_has_random_numbers_of_its_own(two_replicas):
    model = build(AUGMENT, strategy=two_replicas)
    model.fit(data(), epochs=1, verbose=0)
    np.testing.assert_allclose(weights(model), trained_outside(Augmentation(AUGMENT), 1, replicas=2), atol=2e-6)
    assert np.abs(weights(model) - expected(epochs=1)).max() > 1e-4  # with the same numbers on both
    model.fit(data().unbatch().take(1).batch(BATCH), verbose=0)  # the second replica has no example
    assert np.isfinite(weights(model)).all()


class Interrupted(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() >= 8:  # within the second epoch
            raise Interrupted


@pytest.mark.slow
def test_a_resumed_training_goes_on_with_the_same_images_bit_for_bit(tmp_path):
    settings = {"checkpoint_every": 3, "steps_per_execution": 2}
    undisturbed = build(AUGMENT, **settings)
    undisturbed.fit(data(), epochs=2, verbose=0)
    with pytest.raises(Interrupted):
        build(AUGMENT, checkpoint_dir=str(tmp_path), **settings).fit(
            data(), epochs=2, verbose=0, callbacks=[Interrupt()]
        )
    resumed = build(AUGMENT, checkpoint_dir=str(tmp_path), **settings)
    resumed.fit(data(), epochs=2, verbose=0)
    assert tfopt.ledger(resumed).resumed_from
    assert weights(resumed).tobytes() == weights(undisturbed).tobytes()


def test_evaluation_prediction_and_the_saved_model_see_the_images_as_they_are(tmp_path):
    model, plain = build(AUGMENT), build()
    np.testing.assert_array_equal(model.predict(X, verbose=0), plain.predict(X, verbose=0))
    assert model.evaluate(data(), verbose=0) == plain.evaluate(data(), verbose=0)
    model.fit(data(), epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    assert [type(layer).__name__ for layer in loaded.layers] == ["Flatten", "Dense", "Dense"]


@pytest.mark.parametrize("precision", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)])
def test_mixed_precision_trains_on_the_same_images(precision):
    model = build(AUGMENT, precision=precision)
    model.fit(data(), epochs=1, verbose=0)
    np.testing.assert_allclose(weights(model), expected(epochs=1), atol=0.02)


@pytest.mark.parametrize("strategy", ["none", pytest.param("mirrored", marks=pytest.mark.slow)])
def test_mixup_and_cutmix_train_on_shares_and_evaluate_on_class_numbers(strategy, two_replicas):
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    replicas = 2 if strategy == "mirrored" else 1
    model = build(MIXING, own_loss=loss, strategy=two_replicas if replicas == 2 else "none")
    model.fit(data(), validation_data=data(), epochs=1, verbose=0)
    wanted = trained_outside(Augmentation(MIXING, outputs=4), 1, replicas, own_loss=loss)
    np.testing.assert_allclose(weights(model), wanted, atol=2e-6)
    scores = model.evaluate(data(), return_dict=True, verbose=0)
    predicted = model.predict(X, verbose=0)
    assert scores["accuracy"] == pytest.approx((predicted.argmax(1) == Y).mean(), abs=1e-6)
    logarithm = predicted - np.log(np.exp(predicted).sum(1, keepdims=True))
    assert scores["loss"] == pytest.approx(-logarithm[np.arange(36), Y].mean(), rel=1e-5)


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def test_what_cannot_be_augmented_in_the_step_is_refused():
    decided = plan(TrainingConfig(strategy="none", precision="float32"))
    inputs = keras.Input((6, 6, 3))
    own = OwnStep(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(inputs)))
    with pytest.raises(ConfigError, match="augment needs tfopt's training step"):
        compile(own, decided, loss="mse", augment=AUGMENT)
    model = build()
    with pytest.raises(ConfigError, match="where must not be 'host'"):
        compile(model, decided, loss="mse", augment=AugmentConfig(crop=1, where="host"))
    with pytest.raises(ConfigError, match="augment must be an AugmentConfig, an Augmentation or None"):
        compile(model, decided, loss="mse", augment={"crop": 1})
    of_recipe = plan(Recipe(name="twice", data=DataConfig(random_shift=1), training=decided.config))
    with pytest.raises(ConfigError, match=r"plan.pipeline augments already.* set where='device' in the recipe"):
        compile(model, of_recipe, loss="mse", augment=AUGMENT)
    masks = keras.Model(inputs, keras.layers.Conv2D(2, 1)(inputs))
    with pytest.raises(ConfigError, match="it says whether targets are masks"):
        compile(masks, decided, loss="mse", augment=AUGMENT)


def test_masks_follow_in_the_step():
    decided = plan(TrainingConfig(strategy="none", precision="float32", jit_compile=False))
    inputs = keras.Input((6, 6, 3))
    model = keras.Model(inputs, keras.layers.Conv2D(2, 1)(inputs))
    augment = Augmentation(AugmentConfig(crop=2), masks=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compile(model, decided, optimizer=keras.optimizers.Adam(0.3), loss=loss, metrics=["accuracy"], augment=augment)
    masks = RNG.integers(0, 2, (64, 6, 6)).astype("int32")
    images = np.repeat(masks[..., None], 3, -1).astype("float32")
    history = model.fit(images, masks, epochs=6, verbose=0).history["accuracy"]
    assert history[-1] > 0.99, "the class of a pixel is its brightness, also after a crop"


@pytest.mark.parametrize("where", ["step", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_images_that_would_be_clipped_end_the_fit_with_an_error_in_words(where):
    augmentation = Augmentation(AugmentConfig(brightness=0.2), outputs=4)
    model = build(augmentation if where == "step" else None)
    images = (X * 255).astype("float32")
    batches = tfopt.data.pipeline((images, Y), batch_size=BATCH, augment=augmentation if where == "pipeline" else None)
    with pytest.raises(ConfigError, match=r"Images must be .* Received values between .* instead. Scale them"):
        model.fit(batches, verbose=0)
