"""Criteria that need gradients: their scores against gradients taken by hand, and that the model does not change."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfopt
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.pruning import PruningConfig, PruningSchedule, prune
from tfopt.pruning.gradients import LossGradients

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(30, 6, 6, 2)).astype("float32")
LABELS = RNG.integers(0, 4, 30)
WEIGHTS = RNG.uniform(0.5, 2.0, 30).astype("float32")
# Batches of 12, 12 and 6 examples; with two replicas also an odd number.
BATCHES = [(IMAGES[:12], LABELS[:12]), (IMAGES[12:24], LABELS[12:24]), (IMAGES[24:], LABELS[24:])]
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network(dtype="float32"):
    """Layers that behave differently in training, a layer with its own loss, and one that is used twice."""
    inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3, dtype=dtype, kernel_regularizer=keras.regularizers.L2(0.01))(inputs)
    x = layers.Dropout(0.5)(layers.BatchNormalization()(x))
    twice = layers.Dense(4, activation="tanh", dtype=dtype)
    x = twice(twice(layers.GlobalAveragePooling2D()(x)))
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, dtype=dtype)])
    return keras.Model(inputs, layers.Activation("linear", dtype="float32")(inner(x)))


def compiled(model, optimizer="adam", **settings):
    model.compile(optimizer, LOSS, metrics=["accuracy"], **settings)
    return model


def kernels(model):
    return [variable for variable in model.trainable_variables if variable.name == "kernel"]


def mean_products(model, variables, data, batches=8):
    return LossGradients(model, variables).mean_products(data, batches)


def gradients_by_hand(model, variables, batch):
    """The gradient of the mean loss and the regularizer, in inference mode, without tfopt."""
    x, y, *weight = batch
    values = [variable.value for variable in variables]
    with tf.GradientTape() as tape:
        logits = model(x, training=False)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        mean = tf.reduce_mean(losses * weight[0] if weight else losses)
        loss = mean + 0.01 * tf.reduce_sum(tf.square(tf.cast(values[0], "float32")))
    return [np.asarray(tf.convert_to_tensor(each)) for each in tape.gradient(loss, values)]


def means_by_hand(model, batches):
    variables = kernels(model)
    every = [gradients_by_hand(model, variables, batch) for batch in batches]
    gradients = [np.mean(each, axis=0) for each in zip(*every, strict=True)]
    squares = [
        np.mean([(variable.numpy() * gradient) ** 2 for gradient in each], axis=0)
        for variable, each in zip(variables, zip(*every, strict=True), strict=True)
    ]
    return gradients, squares


def assert_means(found, model, batches, rtol=1e-4):
    for products, gradient, square in zip(found, *means_by_hand(model, batches), strict=True):
        np.testing.assert_allclose(products.gradient, gradient, rtol=rtol, atol=rtol * np.abs(gradient).max())
        np.testing.assert_allclose(products.squared, square, rtol=rtol, atol=rtol * np.abs(square).max())


def all_states(model):
    """Every variable that training reads or writes, Keras' own seeds among them."""
    return [np.copy(v.numpy()) for v in [*model.variables, *model.metrics_variables, *model.optimizer.variables]]


@pytest.mark.parametrize("as_dataset", [False, True])
def test_means_are_those_of_gradients_taken_by_hand(as_dataset):
    model = compiled(network())
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(12) if as_dataset else BATCHES
    assert_means(mean_products(model, kernels(model), data), model, BATCHES)
    assert_means(mean_products(model, kernels(model), data, batches=2), model, BATCHES[:2])


def test_sample_weights_and_eager_models():
    model = compiled(network(), run_eagerly=True)
    batches = [(IMAGES[:12], LABELS[:12], WEIGHTS[:12])]
    assert_means(mean_products(model, kernels(model), batches), model, batches)


@pytest.mark.slow
def test_nothing_of_a_trained_model_changes():
    model = compiled(network())
    model.fit(IMAGES, LABELS, verbose=0)
    before, shown = all_states(model), model.get_metrics_result()
    mean_products(model, kernels(model), BATCHES)
    for old, new in zip(before, all_states(model), strict=True):
        np.testing.assert_array_equal(old, new)
    assert model.get_metrics_result() == shown


@pytest.mark.slow
def test_training_goes_on_as_if_nothing_had_been_computed():
    """The dropout of the next step draws the same numbers, and the optimizer makes the same step."""
    trained = []
    for computes in (False, True):
        keras.utils.set_random_seed(1)
        model = compiled(network())
        if computes:
            mean_products(model, kernels(model), BATCHES)
        model.fit(IMAGES, LABELS, batch_size=10, shuffle=False, verbose=0)
        trained.append(all_states(model))
    for one, other in zip(*trained, strict=True):
        np.testing.assert_array_equal(one, other)


class Noisy(layers.Layer):
    """It draws numbers in inference too."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(7)

    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.seed)


def test_seeds_of_a_layer_that_draws_in_inference_are_given_back():
    model = keras.Sequential([keras.Input((4,)), Noisy(), layers.Dense(1)])
    model.compile("sgd", "mse")
    state = model.layers[0].seed.state.numpy()
    mean_products(model, [model.layers[1].kernel], [(np.ones((4, 4)), np.ones((4, 1)))])
    np.testing.assert_array_equal(model.layers[0].seed.state.numpy(), state)


@pytest.mark.slow
def test_replicas_give_the_gradient_of_the_whole_batch(two_replicas):
    """Batches of 12, of 5 (parts of 2 and 3) and of one example, which one replica does not see."""
    batches = [BATCHES[0], (IMAGES[:5], LABELS[:5]), (IMAGES[:1], LABELS[:1])]
    alone = compiled(network())
    with two_replicas.scope():
        model = compiled(network())
    model.set_weights(alone.get_weights())
    model.fit(IMAGES, LABELS, batch_size=10, verbose=0)
    alone.set_weights(model.get_weights())
    model.set_weights(alone.get_weights())  # each replica has moving statistics of its own
    before = all_states(model)
    assert_means(mean_products(model, kernels(model), batches), alone, batches)
    for old, new in zip(before, all_states(model), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        ("float32", 1),
        ("mixed_float16", 2),
        pytest.param("float32", 2, marks=pytest.mark.slow),
        pytest.param("mixed_float16", 1, marks=pytest.mark.slow),
    ],
)
def test_models_of_tfopt_compile(replicas, precision, two_replicas):
    """The loss scale does not scale the gradients, and gradients far below the smallest float16 are found."""
    strategy = "mirrored" if replicas == 2 else "none"
    config = tfopt.TrainingConfig(precision=precision, strategy=strategy, global_batch_size=12, jit_compile=False)
    plan = tfopt.plan(config)
    with two_replicas.scope() if replicas == 2 else contextlib.nullcontext(), plan.scope():
        model = network()
        tfopt.compile(
            model, plan, optimizer="adam", loss=lambda y, logits: 1e-6 * LOSS(y, logits), metrics=["accuracy"]
        )
    model.layers[1].kernel.regularizer = None
    reference = network("float32")
    reference.layers[1].kernel.regularizer = None
    reference.set_weights(model.get_weights())
    products = mean_products(model, kernels(model), BATCHES)
    variables = kernels(reference)
    every = []
    for x, y in BATCHES:
        with tf.GradientTape() as tape:
            loss = 1e-6 * LOSS(y, reference(x, training=False))
        every.append([each.numpy() for each in tape.gradient(loss, [variable.value for variable in variables])])
    for found, gradients in zip(products, zip(*every, strict=True), strict=True):
        gradient = np.mean(gradients, axis=0)
        tolerance = 0.03 if precision == "mixed_float16" else 1e-4
        np.testing.assert_allclose(found.gradient, gradient, rtol=tolerance, atol=tolerance * np.abs(gradient).max())


def test_rows_of_an_embedding_are_summed_and_unused_variables_have_no_gradient():
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Embedding(5, 2), layers.Flatten(), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    model.layers[0].trainable = False  # a frozen weight can be pruned too
    tokens = np.array([[0, 0, 3], [3, 3, 1]])
    table, kernel = model.layers[0].embeddings, model.layers[2].kernel
    spare = keras.Variable(np.ones((2, 2)))
    found, unused = mean_products(model, [table, spare], [(tokens, np.zeros((2, 1)))])
    outputs = model(tokens).numpy()[:, 0]
    expected = np.zeros((5, 2))
    for example, row in enumerate(tokens):
        for place, token in enumerate(row):
            expected[token] += (
                outputs[example] * kernel.numpy()[2 * place : 2 * place + 2, 0]
            )  # 2 * output / 2 examples
    np.testing.assert_allclose(found.gradient, expected, rtol=1e-5, atol=1e-7)
    assert not unused.gradient.any()


SCORES = {
    "taylor": lambda weights, gradients: np.mean([(weights * each) ** 2 for each in gradients], axis=0),
    "snip": lambda weights, gradients: np.abs(weights * np.mean(gradients, axis=0)),
    "movement": lambda weights, gradients: -weights * np.mean(gradients, axis=0),
    "own": lambda weights, gradients: np.mean(gradients, axis=0) ** 2,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("criterion", SCORES)
def test_the_weights_with_the_lowest_scores_are_pruned(criterion):
    model = compiled(network())
    variables = kernels(model)
    every = zip(*[gradients_by_hand(model, variables, batch) for batch in BATCHES], strict=True)
    scores = [SCORES[criterion](v.numpy(), np.array(each)) for v, each in zip(variables, every, strict=True)]
    before = [variable.numpy() for variable in variables]
    config = PruningConfig(
        target_sparsity=0.5, criterion=(lambda weights, mean: mean**2) if criterion == "own" else criterion
    )
    prune(model, config, data=BATCHES)
    for variable, old, score in zip(variables, before, scores, strict=True):
        lowest = np.argsort(score, axis=None)[: score.size // 2]
        assert set(np.flatnonzero(variable.numpy() == 0)) == set(lowest)
        np.testing.assert_array_equal(variable.numpy()[variable.numpy() != 0], old[variable.numpy() != 0])


def test_one_shot_data_may_be_a_generator():
    model = compiled(network())
    assert prune(model, PruningConfig(target_sparsity=0.5, criterion="snip"), iter(BATCHES)).metrics["sparsity"] == 0.5


def not_compiled():
    return network()


def without_loss():
    model = network()
    model.layers[1].kernel_regularizer = model.layers[1].kernel.regularizer = None
    model.compile("sgd")
    return model


def diverging():
    model = compiled(network())
    model.layers[2].gamma.assign([np.inf] * 4)
    return model


WRONG = {
    "no data": (network, None, ConfigError, "data must be given, because the criterion"),
    "empty": (network, [], ConfigError, "data must hold a batch. Received: data without one. Pass data="),
    "no batches": (network, 3, ConfigError, r"data must hold batches. Received: data=int\(...\)."),
    "no targets": (network, [IMAGES[:4]], ConfigError, "because the loss needs targets. .* type ndarray with 1 part"),
    "targets None": (network, [(IMAGES[:4], None)], ConfigError, "because the loss needs targets"),
    "other shapes": (network, [(IMAGES[:4, :2], LABELS[:4])], ConfigError, "data must hold batches that the model"),
    "not compiled": (not_compiled, BATCHES, UnsupportedModelError, "model must be compiled, because gradients"),
    "no loss": (without_loss, BATCHES, ConfigError, "has no loss for: No loss to compute"),
    "not finite": (
        diverging,
        BATCHES,
        UnsupportedModelError,
        "gradients of the loss must be finite.* in that of '.*kernel'",
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_data_and_models_are_refused_before_anything_changes(name):
    build, data, error, message = WRONG[name]
    model = compiled(network()) if build is network else build()
    before = [variable.numpy() for variable in model.variables]
    with pytest.raises(error, match=message):
        prune(model, PruningConfig(criterion="taylor"), data)
    assert all(variable.constraint is None for variable in model.variables)
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, new.numpy())


@pytest.mark.parametrize("settings", [{"criterion": "movement"}, {"regrowth": 0.3}])
def test_a_schedule_needs_data_that_can_be_read_again(settings):
    model = compiled(network())
    with pytest.raises(ConfigError, match="data must be given"):
        PruningSchedule(model, PruningConfig(**settings))
    with pytest.raises(ConfigError, match=r"data must be readable more than once.* Received: data=list_iterator"):
        PruningSchedule(model, PruningConfig(**settings), iter(BATCHES))
    assert all(variable.constraint is None for variable in model.variables)


def test_gradients_of_each_batch_come_one_by_one():
    model = compiled(network())
    found = list(LossGradients(model, kernels(model)).of_batches(BATCHES, 8))
    assert len(found) == 3
    for batch, gradients in zip(BATCHES, found, strict=True):
        for gradient, expected in zip(gradients, gradients_by_hand(model, kernels(model), batch), strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
