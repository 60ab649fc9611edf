"""The noise scale: against the exact one from per-example gradients, its cost, and the weights with and without it."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.training import TrainingConfig
from tfopt.training.step.noise import NoiseEstimate
from tfopt.training.step.noise_scale import NoiseScale, in_words

layers = keras.layers
EXAMPLES, BATCH = 48, 12
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 3, EXAMPLES)
ROWS = (RNG.normal(size=(EXAMPLES, 6)) + np.eye(3, 6)[LABELS]).astype("float32")
IMAGES = (RNG.normal(size=(EXAMPLES, 6, 6, 1)) + LABELS[:, None, None, None] - 1).astype("float32")
WORDS = np.where(RNG.random((EXAMPLES, 5)) < 0.5, LABELS[:, None], RNG.integers(0, 20, (EXAMPLES, 5)))


def dense():
    l2 = keras.regularizers.L2(0.01)
    return [keras.Input((6,)), layers.Dense(8, "tanh", kernel_regularizer=l2), layers.Dense(3, dtype="float32")]


def convolutional():
    return [keras.Input((6, 6, 1)), layers.Conv2D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(3)]


def embedding():
    return [keras.Input((5,), dtype="int32"), layers.Embedding(20, 4), layers.Flatten(), layers.Dense(3)]


MODELS = {"dense": (dense, ROWS), "convolutional": (convolutional, IMAGES), "embedding": (embedding, WORDS)}


def compiled(build, optimizer, plan):
    keras.utils.set_random_seed(3)
    with plan.scope():
        model = keras.Sequential(build())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tfopt.compile(model, plan, optimizer=optimizer(), loss=loss)
    return model


def plan_with(**settings):
    return tfopt.plan(
        TrainingConfig(**{"precision": "float32", "strategy": "none", "global_batch_size": BATCH, **settings})
    )


def exact(model, x):
    """Returns the noise scale from the gradients of single examples."""
    with tf.GradientTape(persistent=True) as tape:
        losses = keras.losses.sparse_categorical_crossentropy(LABELS, model(x), from_logits=True)
        losses = tf.cast(losses, tf.float32) + sum(model.losses, 0.0)
    jacobians = tape.jacobian(losses, [each.value for each in model.trainable_weights], experimental_use_pfor=False)
    gradients = np.concatenate([tf.reshape(tf.convert_to_tensor(each), (EXAMPLES, -1)) for each in jacobians], 1)
    return np.sum(np.var(gradients, 0)) / np.sum(np.mean(gradients, 0) ** 2)


def drawn(x, steps):
    """Returns batches of examples drawn with replacement, the last of which is smaller."""
    chosen = np.random.default_rng(1).integers(0, EXAMPLES, steps * BATCH - 5)
    return tf.data.Dataset.from_tensor_slices((x[chosen], LABELS[chosen])).batch(BATCH)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dense", {"accumulate": 5}),
        ("dense", {"precision": "mixed_float16", "accumulate": 2}),
        ("convolutional", {}),
        ("embedding", {"sparse_embedding_gradients": True}),
        pytest.param("convolutional", {"jit_compile": True}, marks=pytest.mark.slow),
        pytest.param("embedding", {"strategy": "mirrored", "accumulate": 2}, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_exact_noise_scale(name, settings, two_replicas):
    build, x = MODELS[name]
    if "strategy" in settings:
        settings = {**settings, "strategy": two_replicas}
    model = compiled(build, lambda: keras.optimizers.SGD(0.0, global_clipnorm=1e-3), plan_with(**settings))
    noise = NoiseScale(every=1, momentum=0.9999)
    history = model.fit(drawn(x, 400), verbose=0, callbacks=[noise])
    found, expected = noise.report.last, exact(model, x)
    assert found.noise_scale == pytest.approx(expected, rel=0.15)
    assert 0.9 * found.least < expected < 1.1 * found.most < 1.5 * expected
    assert found.steps == 400
    assert history.history["noise_scale"] == [found.noise_scale]


def changing():
    """Dropout, statistics and losses of layers change in a step, and must not change once more."""
    l2 = keras.regularizers.L2(0.01)
    return [
        keras.Input((6,)),
        layers.Dense(8, activity_regularizer=l2, kernel_regularizer=l2),
        layers.BatchNormalization(),
        layers.Dropout(0.3),
        layers.Dense(3, dtype="float32"),
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param(changing, {}, marks=pytest.mark.slow),
        (changing, {"accumulate": 3}),
        (embedding, {"sparse_embedding_gradients": True}),
        pytest.param(changing, {"jit_compile": True}, marks=pytest.mark.slow),
        pytest.param(changing, {"strategy": "mirrored"}, marks=pytest.mark.slow),
        (dense, {"precision": "mixed_float16", "ema_momentum": 0.9}),
    ],
)
def test_the_weights_are_the_same_bit_for_bit(build, settings, two_replicas):
    if "strategy" in settings:
        settings = {**settings, "strategy": two_replicas}
    x = WORDS if build is embedding else ROWS
    weights, losses = [], []
    for callbacks in ([], [NoiseScale(every=2)]):
        model = compiled(build, lambda: keras.optimizers.Adam(0.01), plan_with(steps_per_execution=3, **settings))
        history = model.fit(drawn(x, 7), epochs=2, verbose=0, callbacks=callbacks)
        model.fit(drawn(x, 7), verbose=0)  # without it again
        weights.append(model.get_weights())
        losses.append(history.history["loss"])
    assert losses[0] == losses[1]
    assert all(np.array_equal(one, other) for one, other in zip(*weights, strict=True))
    assert callbacks[0].report.last.steps == 7


class Counting(layers.Layer):
    """Counts the examples that pass it in training."""

    seen = 0

    def call(self, inputs, training=False):
        def count(size):
            self.seen += int(size)
            return size

        size = tf.ensure_shape(tf.py_function(count, [tf.shape(inputs)[0]], tf.int32), []) if training else 0
        return inputs + tf.cast(size - size, inputs.dtype)


def test_it_computes_one_step_in_1024_once_more():
    model = compiled(lambda: [*dense(), Counting()], lambda: keras.optimizers.SGD(0.0), plan_with(jit_compile=False))
    data = tf.data.Dataset.from_tensors((ROWS[:BATCH], LABELS[:BATCH])).repeat(1032)
    model.fit(data, verbose=0)
    without, model.layers[-1].seen = model.layers[-1].seen, 0
    model.fit(data, verbose=0, callbacks=[noise := NoiseScale()])
    assert 1032 * BATCH <= without < model.layers[-1].seen <= without + 2 * BATCH
    assert noise.report.last.steps == 2


def test_a_fit_goes_on_with_the_averages_and_the_report_has_each_epoch():
    model = compiled(dense, lambda: keras.optimizers.SGD(0.1), plan_with(accumulate=2))
    noise = NoiseScale(every=2)
    model.fit(drawn(ROWS, 8), epochs=2, verbose=0, callbacks=[noise])
    train_function = model.train_function
    model.fit(drawn(ROWS, 8), verbose=0, callbacks=[noise])
    assert model.train_function is train_function  # was not traced again
    assert [each.steps for each in noise.report.epochs] == [4, 8, 12]
    text = str(noise.report)
    assert text.startswith(f"noise scale: {in_words(noise.report.last)}")
    assert "12 steps were measured, one in 2, from the parts of a batch" in text


def test_a_fit_that_failed_leaves_no_step_that_measures():
    def stop(*_):
        raise RuntimeError("stopped")

    noise, stops = NoiseScale(), keras.callbacks.LambdaCallback(on_epoch_begin=stop)
    model = compiled(dense, lambda: keras.optimizers.SGD(0.1), plan_with())
    with pytest.raises(RuntimeError, match="stopped"):
        model.fit(drawn(ROWS, 2), verbose=0, callbacks=[noise, stops])
    by_keras = keras.Sequential(dense())
    by_keras.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(UnsupportedModelError, match="needs a fit by tfopt's step"):
        by_keras.fit(ROWS, LABELS, verbose=0, callbacks=[noise])


def test_batches_of_one_example_have_no_noise_scale():
    model = compiled(dense, lambda: keras.optimizers.SGD(0.1), plan_with(global_batch_size=1))
    noise = NoiseScale(every=1)
    history = model.fit(ROWS[:4], LABELS[:4], batch_size=1, verbose=0, callbacks=[noise])
    assert math.isnan(history.history["noise_scale"][0])
    assert str(noise.report).startswith("noise scale: unavailable (no step of two examples or more was measured)")


def test_the_interval_holds_the_ratio_of_the_means_and_is_open_where_the_mean_gradient_is_unknown():
    rng = np.random.default_rng(0)

    def estimate(count, spread):
        s, q = rng.multivariate_normal([20.0, 2.0], [[4.0, spread], [spread, spread**2]], count).T
        return NoiseEstimate.of_sums([count, count, *(np.sum(each) for each in (s, q, s * s, s * q, q * q)), count])

    found = [estimate(20, 1.0) for _ in range(2000)]
    assert 0.93 < np.mean([each.least < 10 < each.most for each in found]) < 0.97
    assert all(each.least < each.noise_scale < each.most for each in found)
    unknown = [each for each in (estimate(10, 6.0) for _ in range(200)) if each.noise_scale is not None]
    assert sum(each.most is None for each in unknown) > 50
    assert np.mean([each.least < 10 and (each.most or math.inf) > 10 for each in unknown]) > 0.9
    assert estimate(2, 1.0).least is None


class Own(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def test_what_cannot_be_measured_is_refused_with_the_reason():
    plain = keras.Sequential(dense())
    plain.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    own = Own(dense())
    tfopt.compile(own, plan_with(), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for model in (plain, own):
        with pytest.raises(UnsupportedModelError, match=r"needs a fit by tfopt's step.*Compile the model with tfopt"):
            model.fit(ROWS, LABELS, verbose=0, callbacks=[NoiseScale()])
    stages = plan_with(strategy="pipeline", pipeline_devices=("CPU:0", "CPU:1"), pipeline_cuts=("last",))
    parts = [(lambda: [*dense()[:-1], layers.Dense(3, name="last")], stages, "no pipeline")]
    fixed = keras.Input((6,), batch_size=BATCH)
    parts += [(lambda: [fixed, layers.Dense(3)], plan_with(), "Leave batch_size out of keras.Input")]
    half = plan_with(precision="mixed_bfloat16")
    parts += [(changing, half, r"float32 for the losses that layers add.*Set accumulate=2")]
    for build, plan, words in parts:
        model = compiled(build, lambda: keras.optimizers.SGD(0.1), plan)
        with pytest.raises(UnsupportedModelError, match=words), np.errstate(all="ignore"):
            model.fit(drawn(ROWS, 2), verbose=0, callbacks=[NoiseScale()])
    with pytest.raises(UnsupportedModelError, match="no such fit"):
        NoiseScale().report  # noqa: B018
    for settings in ({"momentum": 1.0}, {"every": 0}, {"every": "often"}):
        with pytest.raises(ConfigError, match="must be"):
            NoiseScale(**settings)
