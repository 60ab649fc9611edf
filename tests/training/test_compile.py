"""Training under a plan gives the weights of plain Keras and uses every example, on replicas too."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import ConfigError, TfoptWarning, UnsupportedModelError
from tfopt.models import mlp
from tfopt.training import TrainingConfig, compile, plan

RNG = np.random.default_rng(0)
X = RNG.normal(size=(56, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int32") + (X[:, 1] > 0)


def test_a_config_in_place_of_the_plan_is_refused_with_the_remedy():
    message = r"plan must be a Plan. Received: plan=TrainingConfig\(...\). Pass tfopt.plan\(config\)."
    with pytest.raises(ConfigError, match=message):
        compile(mlp((4,), 3), TrainingConfig())


def test_optimizer_settings_without_effect_draw_a_warning_that_names_the_remedy():
    decided = plan(TrainingConfig(precision="float32", optimizer="sgd", learning_rate=0.1))
    model = mlp((4,), 3)
    message = r"optimizer='sgd', learning_rate=0.1 has no effect: .* Pass optimizer=plan.optimizer\(steps_per_epoch"
    with pytest.warns(TfoptWarning, match=message):
        compile(model, decided, loss=loss())
    compile(model, decided, optimizer=decided.optimizer(steps_per_epoch=2), loss=loss())


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build(decided, **options):
    keras.utils.set_random_seed(0)
    with decided.scope():
        model = mlp((4,), 3, units=[8])
    compile(model, decided, **{"optimizer": "adam", "loss": loss(), "metrics": ["accuracy"], **options})
    return model


class CountExamples(keras.metrics.Metric):
    """Counts the examples of an epoch inside the compiled step."""

    def __init__(self, name="examples", **options):
        super().__init__(name=name, **options)
        self.seen = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def result(self):
        return self.seen


@pytest.mark.parametrize("jit_compile", [False, True])
def test_compile_passes_the_plan_on(jit_compile):
    decided = plan(TrainingConfig(precision="float32", jit_compile=jit_compile, steps_per_execution=3))
    model = build(decided, optimizer="lion", weighted_metrics=["sparse_categorical_accuracy"])
    assert model.jit_compile is jit_compile
    assert model.steps_per_execution == 3
    assert isinstance(model.optimizer, keras.optimizers.Lion)
    history = model.fit(decided.pipeline((X, Y)), epochs=1, shuffle=False, verbose=0).history
    assert {"loss", "accuracy", "sparse_categorical_accuracy"} <= set(history)


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(56, marks=pytest.mark.slow),  # 7 batches, fewer than ten
        pytest.param(80, marks=pytest.mark.slow),  # 10 batches, just one call
        133,  # 17 batches, the last of five examples
    ],
)
def test_ten_steps_per_execution_see_every_example_and_give_the_same(examples):
    x = RNG.normal(size=(examples, 4)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    results = []
    for steps in (1, 10):
        decided = plan(TrainingConfig(precision="float32", steps_per_execution=steps, global_batch_size=8))
        model = build(decided, metrics=["accuracy", CountExamples()])
        data = decided.pipeline((x, y), training=False)
        history = model.fit(data, validation_data=data, epochs=2, shuffle=False, verbose=0).history
        assert history["examples"] == [examples, examples]
        assert history["val_examples"] == [examples, examples]
        evaluated = model.evaluate(data, verbose=0, return_dict=True)
        assert evaluated["examples"] == examples
        assert model.predict(decided.pipeline((x,), training=False), verbose=0).shape == (examples, 3)
        results.append((history, evaluated, model.get_weights()))
    (history, evaluated, weights), (other_history, other_evaluated, other_weights) = results
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        np.testing.assert_allclose(history[name], other_history[name], atol=1e-5)
    assert evaluated["loss"] == pytest.approx(other_evaluated["loss"], abs=1e-5)
    for one, other in zip(weights, other_weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
def test_fit_evaluate_and_predict_on_two_replicas(two_replicas):
    decided = plan(TrainingConfig(precision="float32", strategy=two_replicas, global_batch_size=8))
    model = build(decided, optimizer=keras.optimizers.Adam(0.05), metrics=["accuracy", CountExamples()])
    history = model.fit(decided.pipeline((X, Y)), epochs=8, shuffle=False, verbose=0).history
    assert history["examples"] == [len(X)] * 8
    assert history["loss"][-1] < history["loss"][0]
    results = model.evaluate(decided.pipeline((X, Y), training=False), verbose=0, return_dict=True)
    assert results["examples"] == len(X)
    outputs = model.predict(decided.pipeline((X,), training=False), verbose=0)
    np.testing.assert_allclose(outputs, model(X).numpy(), atol=1e-5)
    assert np.mean(outputs.argmax(-1) == Y) == pytest.approx(results["accuracy"], abs=1e-6)


class Scaled(keras.optimizers.SGD):
    """Does not return its argument in get_config."""

    def __init__(self, learning_rate=0.01, scale=1.0, **options):
        super().__init__(learning_rate, **options)
        self.scale = scale

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.scale, variable, learning_rate)


class Seen(keras.metrics.Metric):
    """Takes no name, and an argument that is not in get_config."""

    def __init__(self, times):
        super().__init__(name="seen")
        self.times = times
        self.seen = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign_add(self.times * keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def result(self):
        return self.seen


class Holding(Scaled):
    """Holds a variable of TensorFlow, which cannot be on every replica unless it is made there."""

    def __init__(self, **options):
        super().__init__(**options)
        self.held = tf.Variable(1.0)


def test_an_optimizer_and_metric_from_outside_the_strategy_are_used_themselves_in_it(two_replicas):
    decided = plan(TrainingConfig(strategy=two_replicas, precision="float32", global_batch_size=8))
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 100)
    optimizer, metric = Scaled(schedule, scale=10, momentum=0.5), Seen(2.0)
    model = build(decided, optimizer=optimizer, metrics=[metric])
    assert model.optimizer is optimizer
    x, y = X[:8], Y[:8]
    with tf.GradientTape() as tape:
        mean = loss()(y, model(x))
    expected = [
        weight.numpy() - 0.01 * 10 * gradient
        for weight, gradient in zip(model.weights, tape.gradient(mean, model.trainable_weights), strict=True)
    ]
    assert model.fit(decided.pipeline((x, y)), verbose=0).history["seen"] == [2 * 8]
    assert keras.ops.convert_to_numpy(optimizer.iterations) == 1
    for found, wanted in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_an_optimizer_that_must_be_made_again_and_would_lose_an_argument_is_refused(two_replicas):
    decided = plan(TrainingConfig(strategy=two_replicas, precision="float32", global_batch_size=8))
    message = r"Received: 'holding', which would lose scale=3.0. .* within plan.scope\(\)"
    with pytest.raises(ConfigError, match=message):
        build(decided, optimizer=Holding(scale=3.0))
    built = Scaled(scale=2.0)
    built.build([keras.Variable([1.0])])
    with pytest.raises(ConfigError, match=r"would lose scale=2\.0"):
        build(decided, optimizer=built)


def test_an_optimizer_from_inside_the_strategy_or_without_one_is_used_itself(two_replicas):
    decided = plan(TrainingConfig(precision="float32", strategy=two_replicas, global_batch_size=8))
    with decided.scope():
        optimizer = keras.optimizers.Adam()
    assert build(decided, optimizer=optimizer).optimizer is optimizer
    alone = keras.optimizers.Adam()
    assert build(plan(TrainingConfig(precision="float32")), optimizer=alone).optimizer is alone


def test_a_stateful_recurrent_layer_is_refused_where_the_batch_is_divided(two_replicas):
    for divided in ({"accumulate": 2}, {"strategy": two_replicas}, {}):
        decided = plan(TrainingConfig(precision="float32", global_batch_size=4, **divided))
        with decided.scope():
            inputs = keras.Input(batch_shape=(4, 3, 2))
            model = keras.Model(inputs, keras.layers.LSTM(2, stateful=True, name="memory")(inputs))
        if divided:
            with pytest.raises(UnsupportedModelError, match=r"'memory' with stateful=True\. Set accumulate=1"):
                compile(model, decided, loss="mse")
        else:
            compile(model, decided, loss="mse")
            model.fit(np.zeros((8, 3, 2)), np.zeros((8, 2)), batch_size=4, verbose=0)


def test_float16_scales_the_loss():
    decided = plan(TrainingConfig(precision="mixed_float16", global_batch_size=8))
    model = build(decided)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    history = model.fit(decided.pipeline((X, Y)), epochs=5, shuffle=False, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]


@pytest.mark.slow
def test_under_xla_ten_steps_per_execution_train_on_an_uneven_number_of_batches():
    decided = plan(TrainingConfig(precision="float32", jit_compile=True, steps_per_execution=10, global_batch_size=8))
    model = build(decided)
    x, y = X[:51], Y[:51]  # the last batch is of another shape, which XLA compiles anew
    history = model.fit(decided.pipeline((x, y), training=False), epochs=1, shuffle=False, verbose=0).history
    reference = build(
        plan(TrainingConfig(precision="float32", jit_compile=False, steps_per_execution=1, global_batch_size=8))
    )
    other = reference.fit(decided.pipeline((x, y), training=False), epochs=1, shuffle=False, verbose=0).history
    assert history["loss"] == pytest.approx(other["loss"], abs=1e-5)
