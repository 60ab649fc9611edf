"""Every strategy, XLA, micro-batches and steps per call give the weights and metrics of plain Keras on one device.

The reference is Keras' own `fit` on the full batch. "To 1e-5" is of each array's largest value, in float32.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.training import TrainingConfig, compile, ledger, plan

BATCH, STEPS = 16, 20
CLASSES = 3


def dense_data(examples):
    rng = np.random.default_rng(examples)
    x = rng.normal(size=(examples, 6)).astype("float32")
    weights = rng.uniform(0.1, 3.0, size=examples).astype("float32")
    return x, rng.integers(0, CLASSES, examples), weights


def dense_model():
    """Has clipping, a regularizer, and sample weights."""
    l2 = keras.regularizers.L2(1e-2)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="tanh", kernel_regularizer=l2),
            keras.layers.Dense(CLASSES),
        ]
    )
    return model, keras.optimizers.SGD(0.2, momentum=0.9, clipnorm=0.3)


def embedding_data(examples):
    rng = np.random.default_rng(examples)
    x = np.minimum(rng.geometric(0.2, size=(examples, 4)), 29)  # some rows come often, some on one replica alone
    return x.astype("int32"), rng.integers(0, CLASSES, examples)


def embedding_model(embedding=keras.layers.Embedding):
    """Its gradients are IndexedSlices that contain the same row several times."""
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            embedding(30, 5),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES),
        ]
    )
    return model, keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True)


class DenseEmbedding(keras.layers.Embedding):
    """The same model with a dense gradient, which holds the sum of each row."""

    def call(self, inputs):
        return keras.ops.one_hot(inputs, self.input_dim) @ self.embeddings


CASES = {"dense": (dense_data, dense_model), "embedding": (embedding_data, embedding_model)}


def compiling():
    return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


def figures():
    return {
        "metrics": [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        "weighted_metrics": [keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="weighted")],
    }


def decide(strategy, jit_compile=False, **settings):
    settings = {"precision": "float32", "global_batch_size": BATCH, "steps_per_execution": 1, **settings}
    return plan(TrainingConfig(strategy=strategy, jit_compile=jit_compile, **settings))


def ours(decided, build, data, validation=None, *, epochs=1, **options):
    keras.utils.set_random_seed(1)
    with decided.scope():
        model, optimizer = build()
    compile(model, decided, optimizer=optimizer, **{**compiling(), **options})
    batches = decided.pipeline(data, training=False)
    if validation is not None:
        validation = decided.pipeline(validation, training=False)
    return model, model.fit(batches, validation_data=validation, epochs=epochs, verbose=0).history


def plain(build, data, validation=None, *, epochs=1, **options):
    keras.utils.set_random_seed(1)
    model, optimizer = build()
    model.compile(optimizer, **{"jit_compile": False, **compiling(), **options})
    return model, model.fit(
        *data[:2],
        sample_weight=data[2] if len(data) > 2 else None,
        validation_data=validation,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
    ).history


def assert_same_weights(model, expected, tolerance=1e-5):
    for found, wanted in zip(model.variables, expected.variables, strict=True):
        if np.issubdtype(wanted.numpy().dtype, np.floating):
            scale = max(np.abs(wanted.numpy()).max(), 1e-3)
            assert np.abs(found.numpy() - wanted.numpy()).max() <= tolerance * scale, wanted.path


def assert_same_figures(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-7, err_msg=name)


def check_parity(strategy, case, jit_compile, accumulate, steps):
    make_data, build = CASES[case]
    data = make_data(BATCH * STEPS)
    reference, expected = plain(build, data, **figures())
    decided = decide(strategy, jit_compile, accumulate=accumulate, steps_per_execution=steps)
    model, history = ours(decided, build, data, **figures())
    assert model.jit_compile is jit_compile
    assert ledger(model).fallback is None
    assert model.optimizer.iterations.numpy() == STEPS
    assert_same_weights(model, reference)
    assert_same_weights(model.optimizer, reference.optimizer)  # the momentum too
    assert_same_figures(history, expected)


MATRIX = list(itertools.product(CASES, (False, True), (1, 4), (1, 4)))
# All settings at once, and micro-batches alone; benchmarks/compatibility.py runs every combination.
PAIRS = [(case, *cell) for case, *cell in MATRIX if (*cell,) in ((True, 4, 4), (False, 4, 1))]
QUICK = ("embedding", False, 4, 1)  # a dense model takes an uneven last batch below
IN_DEPTH = [pytest.param(*cell, marks=pytest.mark.slow) for cell in PAIRS if cell != QUICK]


@pytest.mark.parametrize(("case", "jit_compile", "accumulate", "steps"), [QUICK, *IN_DEPTH])
def test_replicas_take_20_steps_as_one_device_with_the_full_batch(two_replicas, case, jit_compile, accumulate, steps):
    check_parity(two_replicas, case, jit_compile, accumulate, steps)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "jit_compile", "accumulate", "steps"), PAIRS[:2])
def test_one_device_takes_20_steps_as_with_the_full_batch(case, jit_compile, accumulate, steps):
    check_parity("none", case, jit_compile, accumulate, steps)


@pytest.mark.parametrize(
    ("strategy", "accumulate", "optimizer"),
    [
        ("none", 1, "clipnorm"),
        pytest.param("none", 4, "adam", marks=pytest.mark.slow),
        pytest.param("two_replicas", 4, "clipnorm", marks=pytest.mark.slow),
    ],
)
def test_an_embedding_is_updated_by_the_sum_for_each_row(request, strategy, accumulate, optimizer):
    # Keras' own fit does not: it clips and squares a row's gradient as often as the batch names the row.
    optimizers = {
        "clipnorm": lambda: keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.05),
        "adam": lambda: keras.optimizers.Adam(0.01),
    }
    data = embedding_data(BATCH * STEPS)
    reference, _ = plain(lambda: (embedding_model(DenseEmbedding)[0], optimizers[optimizer]()), data)
    strategy = "none" if strategy == "none" else request.getfixturevalue(strategy)
    model, _ = ours(
        decide(strategy, accumulate=accumulate), lambda: (embedding_model()[0], optimizers[optimizer]()), data
    )
    assert_same_weights(model, reference)


@pytest.mark.parametrize(
    ("strategy", "left", "accumulate", "jit_compile"),
    [
        # The second replica gets no example of the last batch.
        pytest.param("two_replicas", 1, 1, False, marks=pytest.mark.slow),
        ("two_replicas", 3, 4, False),  # the replicas get two and one, fewer than there are micro-batches
        pytest.param("two_replicas", 13, 4, True, marks=pytest.mark.slow),
        pytest.param("none", 1, 4, True, marks=pytest.mark.slow),
    ],
)
def test_figures_and_weights_count_every_example_of_an_uneven_last_batch_alike(
    request, strategy, left, accumulate, jit_compile
):
    strategy = "none" if strategy == "none" else request.getfixturevalue(strategy)
    data, validation = dense_data(3 * BATCH + left), dense_data(2 * BATCH + left)
    reference, expected = plain(dense_model, data, validation, epochs=2, **figures())
    decided = decide(strategy, jit_compile, accumulate=accumulate, steps_per_execution=4)
    model, history = ours(decided, dense_model, data, validation, epochs=2, **figures())
    assert_same_figures(history, expected)
    assert_same_weights(model, reference)

    batches = decided.pipeline(validation, training=False)
    evaluated = model.evaluate(batches, verbose=0, return_dict=True)
    x, y, weights = validation
    wanted = reference.evaluate(x, y, sample_weight=weights, batch_size=BATCH, verbose=0, return_dict=True)
    assert_same_figures(evaluated, wanted)
    outputs = model.predict(decided.pipeline((x,), training=False), verbose=0)
    np.testing.assert_allclose(outputs, reference.predict(x, verbose=0), rtol=1e-5, atol=1e-5)


def noisy_model():
    """Draws random numbers and keeps statistics, so that a missing, additional or reordered step changes the result."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(CLASSES),
        ]
    )
    return model, keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.01, 40), weight_decay=0.01)


NOISY = dense_data(9 * BATCH + 5), dense_data(BATCH + 5)


@pytest.fixture(scope="module")
def noisy_reference():
    return plain(noisy_model, *NOISY, epochs=2, **figures())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("steps", [1, 10])
def test_on_one_device_the_step_is_keras_own_bit_for_bit(steps, noisy_reference):
    reference, expected = noisy_reference
    model, history = ours(decide("none", steps_per_execution=steps), noisy_model, *NOISY, epochs=2, **figures())
    assert history == expected
    for found, wanted in zip(model.variables, reference.variables, strict=True):
        assert found.numpy().tobytes() == wanted.numpy().tobytes(), wanted.path


@pytest.mark.slow
def test_under_xla_the_step_is_keras_own_to_a_rounding():
    data = dense_data(9 * BATCH + 5)
    reference, expected = plain(dense_model, data, jit_compile=True)
    model, history = ours(decide("none", True), dense_model, data)
    assert_same_figures(history, expected)
    assert_same_weights(model, reference, tolerance=1e-6)


def float16_model():
    """Its first gradient is the input times the error, so an input of 500 overflows with the first loss scale."""
    layers = [keras.layers.Dense(8, use_bias=False), keras.layers.Dense(CLASSES, use_bias=False, dtype="float32")]
    return keras.Sequential([keras.Input((6,)), *layers]), keras.optimizers.SGD(0.01, momentum=0.9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overflowing", "accumulate", "jit_compile"),
    [
        (1, 1, False),
        pytest.param(0, 4, True, marks=pytest.mark.slow),
    ],
)
def test_an_overflow_on_one_replica_skips_the_step_on_both(two_replicas, overflowing, accumulate, jit_compile):
    x, y, _ = dense_data(BATCH)
    decided = decide(two_replicas, jit_compile, precision="mixed_float16", accumulate=accumulate)
    keras.utils.set_random_seed(1)
    with decided.scope():
        model, optimizer = float16_model()
    compile(model, decided, optimizer=optimizer, **compiling())
    before = model.get_weights()
    example = overflowing * BATCH // 2 + 3
    x[example] = 500.0
    y[example] = np.argmin(model(x[example : example + 1]))  # surely wrong, or there would be no gradient

    # It is this replica's gradient that is infinite, and its alone.
    halves = [scaled_gradient(model, x[half], y[half]) for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH))]
    assert [bool(np.isfinite(gradient).all()) for gradient in halves] == [overflowing == 1, overflowing == 0]

    history = model.fit(decided.pipeline((x, y), training=False), verbose=0).history
    assert np.isfinite(history["loss"]).all()
    for variable, value in zip(model.variables, before, strict=True):
        for replica in variable.value.values:
            np.testing.assert_array_equal(replica.numpy(), value)
    assert_loss_scales(model, 2.0**14)
    assert model.optimizer.inner_optimizer.iterations.numpy() == 0
    events = [(event.step, event.before, event.after) for event in ledger(model).loss_scales]
    assert events == [(1, 2.0**15, 2.0**14)]

    # The scale falls until the gradient fits; then all replicas take the step.
    model.fit(decided.pipeline((x, y), training=False), epochs=12, verbose=0)
    assert model.optimizer.inner_optimizer.iterations.numpy() > 0
    assert all(event.after == event.before / 2 for event in ledger(model).loss_scales)
    for variable in model.variables:
        first, second = (replica.numpy() for replica in variable.value.values)
        assert np.isfinite(first).all()
        np.testing.assert_array_equal(first, second)
    assert not np.array_equal(model.variables[0].numpy(), before[0])


def scaled_gradient(model, x, y):
    """Returns the first gradient of some examples, as a replica computes it with the first loss scale."""
    with tf.GradientTape() as tape:
        loss = compiling()["loss"](y, model(x, training=True)) / 2 * 2.0**15
    return tape.gradient(loss, model.trainable_variables[0].value).numpy()


def assert_loss_scales(model, expected):
    scale = model.optimizer.dynamic_scale.value
    assert [replica.numpy() for replica in getattr(scale, "values", [scale])] == [expected] * len(
        getattr(scale, "values", [scale])
    )


@pytest.mark.slow
def test_float16_on_replicas_is_float16_on_one_device(two_replicas):
    data = dense_data(STEPS * BATCH + 1)
    models, histories = zip(
        *[
            ours(decide(strategy, precision="mixed_float16", accumulate=2), float16_model, data)
            for strategy in ("none", two_replicas)
        ],
        strict=True,
    )
    np.testing.assert_allclose(histories[1]["loss"], histories[0]["loss"], rtol=2e-3)
    assert_same_weights(models[1], models[0], tolerance=5e-3)  # float16 has 11 bits


def one_layer():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(CLASSES)])


def averaging_model():
    return one_layer(), keras.optimizers.SGD(
        0.2, momentum=0.9, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3, weight_decay=0.01
    )


@pytest.mark.slow
@pytest.mark.parametrize(("left", "jit_compile"), [(0, False), (1, True)])
def test_weights_are_overwritten_by_their_average_on_both_replicas(two_replicas, left, jit_compile):
    data = dense_data(5 * BATCH + left)
    reference, expected = plain(averaging_model, data)
    model, history = ours(decide(two_replicas, jit_compile), averaging_model, data)
    assert_same_figures(history, expected)
    assert_same_weights(model, reference)
    assert_same_weights(model.optimizer, reference.optimizer)
    for variable in model.variables:
        first, second = (replica.numpy() for replica in variable.value.values)
        np.testing.assert_array_equal(first, second)


def several_optimizers():
    """The layers' weights are updated by optimizers of their own, each of which sums gradients by itself."""
    bias, rest = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2, momentum=0.9)
    return one_layer(), keras.optimizers.MultiOptimizer(lambda variable: bias if "bias" in variable.path else rest)


@pytest.mark.slow
def test_the_parts_of_a_multi_optimizer_sum_no_gradient_twice(two_replicas):
    data = dense_data(4 * BATCH)
    reference, expected = plain(several_optimizers, data)
    model, history = ours(decide(two_replicas), several_optimizers, data)
    assert_same_figures(history, expected)
    assert_same_weights(model, reference)


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_statistics_of_batch_norms_are_the_mean_over_the_replicas(two_replicas, jit_compile):
    x, y, _ = dense_data(4 * BATCH)
    momentum = 0.7

    def build():
        norm = keras.layers.BatchNormalization(momentum=momentum, name="norm")
        return keras.Sequential([keras.Input((6,)), norm, keras.layers.Dense(CLASSES)]), keras.optimizers.SGD(0.1)

    model, history = ours(decide(two_replicas, jit_compile), build, (x, y), (x, y), epochs=2)

    means, variances = [], []
    for replica in range(2):
        mean, variance = np.zeros(6), np.ones(6)
        for batch in np.concatenate([x, x]).reshape(8, 2, BATCH // 2, 6)[:, replica]:
            mean = momentum * mean + (1 - momentum) * batch.mean(0)
            variance = momentum * variance + (1 - momentum) * batch.var(0)
        means.append(mean)
        variances.append(variance)
    assert np.abs(means[0] - means[1]).max() > 0.05  # they would differ without being brought together
    norm = model.get_layer("norm")
    for variable, per_replica in ((norm.moving_mean, means), (norm.moving_variance, variances)):
        first, second = (replica.numpy() for replica in variable.value.values)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, np.mean(per_replica, axis=0), rtol=1e-5, atol=1e-6)

    # Validation was by these statistics, as the saved model's is.
    with tf.device("CPU:0"):
        alone, _ = build()
    alone.set_weights(model.get_weights())
    alone.compile(**compiling())
    assert alone.evaluate(x, y, verbose=0) == pytest.approx(history["val_loss"][-1], rel=1e-5)


def test_replicas_take_a_model_whose_weights_are_all_frozen(two_replicas):
    def frozen_model():
        model, optimizer = dense_model()
        model.trainable = False
        return model, optimizer

    data = dense_data(2 * BATCH)
    reference, expected = plain(frozen_model, data)
    model, history = ours(decide(two_replicas, accumulate=2), frozen_model, data)
    assert_same_figures(history, expected)
    assert_same_weights(model, reference)


def test_frozen_weights_are_not_averaged_over_the_replicas(two_replicas):
    largest = np.finfo("float32").max  # the sum of two is infinite

    def build():
        frozen = keras.layers.Dense(CLASSES, bias_initializer=keras.initializers.Constant(largest), trainable=False)
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), frozen]), keras.optimizers.SGD(0.1)

    model, _ = ours(decide(two_replicas), build, dense_data(BATCH))
    np.testing.assert_array_equal(model.layers[1].bias, largest)
