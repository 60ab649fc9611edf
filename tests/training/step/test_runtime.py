"""tfopt's step in Keras' fit: when it is installed, removed and refused, and what it does if XLA fails."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.errors import ConfigError, TfoptWarning, UnsupportedModelError
from tfopt.training import TrainingConfig, compile, ledger, plan
from tfopt.training.step.runtime import ATTRIBUTE, METHODS

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def build(**settings):
    decided = plan(TrainingConfig(**{"precision": "float32", "global_batch_size": 8, "jit_compile": False, **settings}))
    keras.utils.set_random_seed(0)
    with decided.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    return model, decided


def installed(model):
    return {name for name in (*METHODS, ATTRIBUTE) if name in vars(model)}


def test_compile_puts_the_step_on_the_instance_and_a_plain_compile_takes_it_off():
    model, decided = build()
    report = compile(model, decided, optimizer="sgd", loss="mse")
    assert type(model) is keras.Sequential
    assert installed(model) == {*METHODS, ATTRIBUTE}
    assert [change.name for change in report.changed] == [model.name]
    model.fit(X, Y, verbose=0)
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert installed(model) == set()
    with pytest.raises(UnsupportedModelError, match=r"Compile it with tfopt\.compile"):
        ledger(model)


def test_a_saved_model_holds_nothing_of_it(tmp_path):
    model, decided = build()
    compile(model, decided, optimizer="adam", loss="mse")
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert installed(loaded) == set()
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    assert installed(keras.models.clone_model(model)) == set()


def test_arrays_generators_and_single_batches_train():
    model, decided = build(steps_per_execution=3)
    compile(model, decided, optimizer=keras.optimizers.SGD(0.05), loss="mse", metrics=["mae"])
    first = model.fit(X, Y, batch_size=8, epochs=5, verbose=0).history["loss"]
    assert first[-1] < first[0]
    model.fit(((X[:8], Y[:8]) for _ in range(7)), steps_per_epoch=7, verbose=0)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 5 * 5 + 7
    before = model.evaluate(X, Y, verbose=0)
    logs = model.train_on_batch(X, Y, return_dict=True)
    assert logs["loss"] == pytest.approx(before[0], rel=1e-5)
    assert model.test_on_batch(X, Y, return_dict=True)["loss"] < before[0]
    assert model.fit(X, Y, class_weight={0: 1.0}, verbose=0, batch_size=8) is model.history


class Batches(keras.callbacks.Callback):
    """Records the number of the last batch of each execution."""

    def __init__(self):
        super().__init__()
        self.trained, self.tested = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.trained.append(batch)

    def on_test_batch_end(self, batch, logs=None):
        self.tested.append(batch)


def test_a_count_of_steps_is_kept_and_the_last_execution_takes_what_is_left():
    model, decided = build(steps_per_execution=10)
    compile(model, decided, optimizer="sgd", loss="mse")
    data, steps = decided.pipeline((X, Y)).repeat(), 0
    for count, ends in ((7, [6]), (10, [9]), (13, [9, 12])):
        seen = Batches()
        options = {"validation_data": data, "validation_steps": 3, "callbacks": [seen], "verbose": 0}
        model.fit(data, epochs=2, steps_per_epoch=count, **options)
        steps += 2 * count
        assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == steps
        assert (seen.trained, seen.tested) == (2 * ends, [2, 2])
    assert model.predict(data.map(lambda x, y: x), steps=3, verbose=0).shape == (24, 1)
    assert model.predict(X, batch_size=8, verbose=0).shape == (40, 1)
    assert model.steps_per_execution == 10
    model.fit(X, Y, batch_size=8, verbose=0)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == steps + 5
    assert len(ledger(model).of_kind("trace")) == 1


class WarmUp(keras.callbacks.Callback):
    """A learning rate for each batch."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.01 * (batch + 1)


@pytest.mark.parametrize("settings", [{}, pytest.param({"strategy": "replicas"}, marks=pytest.mark.slow)])
def test_a_callback_that_acts_on_each_batch_trains_as_in_keras_by_default(settings, request):
    if "strategy" in settings:
        settings = {"strategy": request.getfixturevalue("two_replicas")}
    model, decided = build(**settings)
    assert decided.steps_per_execution > 1
    compile(model, decided, optimizer=keras.optimizers.SGD(0.01), loss="mse")
    seen = Batches()
    data = {"batch_size": 8, "shuffle": False, "epochs": 2, "verbose": 0, "validation_data": (X, Y)}
    history = model.fit(X, Y, callbacks=[WarmUp(), seen], **data).history
    plain, _ = build()
    plain.compile(keras.optimizers.SGD(0.01), "mse")
    wanted = plain.fit(X, Y, callbacks=[WarmUp()], **data).history
    np.testing.assert_allclose(history["val_loss"], wanted["val_loss"], rtol=1e-5)
    assert seen.trained == [0, 1, 2, 3, 4] * 2
    assert "one step per call, because WarmUp acts on each batch" in str(ledger(model))
    # The plan's steps come back for the next fit, for which nothing is traced that was there before.
    assert model.steps_per_execution == decided.steps_per_execution
    model.fit(X, Y, batch_size=8, verbose=0)
    assert ledger(model).one_by_one is None
    assert len(model.predict(X, verbose=0)) == 40


def test_steps_that_were_asked_for_stay_whatever_the_callbacks_do():
    model, decided = build(steps_per_execution=5)
    compile(model, decided, optimizer="sgd", loss="mse")
    seen = Batches()
    model.fit(X, Y, batch_size=8, callbacks=[seen], verbose=0)
    assert seen.trained == [4]


def test_data_that_is_divided_over_epochs_is_read_to_its_end():
    model, decided = build(steps_per_execution=3)
    compile(model, decided, optimizer="sgd", loss="mse")
    data, seen = decided.pipeline((X, Y)).repeat(2), Batches()  # ten batches
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Keras' "your input ran out of data"
        model.fit(data, epochs=4, steps_per_epoch=5, callbacks=[seen], verbose=0)
        model.fit(data, callbacks=[seen], verbose=0)
    assert seen.trained == [*[2, 4] * 4, 2, 5, 8, 9]
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 4 * 5 + 10


@pytest.mark.parametrize("size_is_known", [True, False])
def test_data_that_ends_within_an_execution_begins_anew_with_a_warning(size_is_known):
    model, decided = build(steps_per_execution=10)
    compile(model, decided, optimizer="sgd", loss="mse")
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)  # five batches
    data, done = data if size_is_known else data.filter(lambda x, y: True), []
    count = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: done.append(int(model.optimizer.iterations.numpy()))
    )
    with pytest.warns(UserWarning, match="ran out of data"):
        history = model.fit(data, epochs=5, steps_per_epoch=3, callbacks=[count], verbose=0).history
    assert done == [3, 5, 8, 10, 13]  # as Keras, which runs single steps
    assert min(history["loss"]) > 0
    with pytest.warns(UserWarning, match="ran out of data"):
        model.evaluate(data, steps=9, verbose=0)


class AnyFit(keras.Model):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


class OwnArguments(keras.Model):
    def fit(self, scale, *args, **kwargs):
        self.scale = scale
        kwargs.setdefault("epochs", 2)
        return super().fit(*args, **kwargs)


class WithoutCallbacks(keras.Model):
    def fit(self, x, y=None, epochs=1):
        return super().fit(x, y, epochs=epochs, verbose=0)


def overriding(kind, **settings):
    decided = plan(TrainingConfig(global_batch_size=8, precision="float32", steps_per_execution=10, **settings))
    keras.utils.set_random_seed(0)
    with decided.scope():
        inputs = keras.Input((4,))
        normalized = keras.layers.BatchNormalization()(inputs)
        model = kind(inputs, keras.layers.Dense(1)(normalized))
    compile(model, decided, optimizer=keras.optimizers.SGD(0.05), loss="mse")
    return model, decided


def trained(kind, *first, directory=None, **options):
    model, decided = overriding(kind, checkpoint_dir=directory)
    seen = Batches()
    history = model.fit(*first, decided.pipeline((X, Y)), callbacks=[seen], verbose=0, **options).history
    return model, history["loss"], seen.trained


@pytest.fixture(scope="module")
def not_overridden():
    return trained(keras.Model, epochs=2)


@pytest.mark.parametrize("kind", [pytest.param(AnyFit, marks=pytest.mark.slow), OwnArguments])
def test_a_fit_that_is_overridden_keeps_order_checkpoints_and_callbacks(kind, tmp_path, not_overridden):
    first = (2.0,) if kind is OwnArguments else ()
    wanted, losses, _ = not_overridden
    model, _, seen = trained(kind, *first, directory=str(tmp_path), epochs=1)
    assert len(seen) == 1
    assert getattr(model, "scale", 2.0) == 2.0
    resumed, found, _ = trained(kind, *first, directory=str(tmp_path), epochs=2)
    assert ledger(resumed).resumed_from == 5
    assert found == losses  # of both epochs: the order of the examples comes from the epoch
    for one, other in zip(resumed.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_fit_that_is_overridden_takes_positional_callbacks_and_synchronizes(two_replicas):
    model, decided = overriding(AnyFit, strategy=two_replicas)
    seen = Batches()
    model.fit(decided.pipeline((X, Y)), None, None, 1, 0, [seen])
    assert len(seen.trained) == 1
    mean = model.layers[1].moving_mean.value
    np.testing.assert_array_equal(*(replica.numpy() for replica in mean.values))


def test_an_interrupted_fit_leaves_the_order_to_the_pipeline_again():
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise KeyboardInterrupt

    model, decided = build()
    compile(model, decided, optimizer="sgd", loss="mse")
    data = decided.pipeline((X, Y))
    with pytest.raises(KeyboardInterrupt):
        model.fit(data, verbose=0, callbacks=[Interrupt()])
    first, second = (np.concatenate([targets for _, targets in data]) for _ in range(2))
    assert first.tolist() != second.tolist()


def test_a_fit_that_takes_no_callbacks_is_refused_before_the_first_step():
    model, _ = overriding(WithoutCallbacks)
    before = model.get_weights()
    with pytest.raises(UnsupportedModelError, match=r"WithoutCallbacks overrides fit\. Let it take \*\*kwargs"):
        model.fit(X, Y)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_data_that_ends_within_the_first_execution_under_xla_counts_whole():
    model, decided = build(steps_per_execution=2, jit_compile=True)
    compile(model, decided, optimizer="sgd", loss="mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Keras' "your input ran out of data"
        model.fit(decided.pipeline((X[:8], Y[:8])), epochs=3, verbose=0)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 3


def test_sample_weights_and_inputs_in_a_dict():
    decided = plan(TrainingConfig(precision="float32", global_batch_size=8, accumulate=2, steps_per_execution=2))
    weights = RNG.uniform(0.5, 2.0, size=40).astype("float32")

    def trained(with_tfopt):
        keras.utils.set_random_seed(0)
        a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
        model = keras.Model({"a": a, "b": b}, keras.layers.Dense(1)(keras.layers.Concatenate()([a, b])))
        if with_tfopt:
            compile(model, decided, optimizer=keras.optimizers.SGD(0.05), loss="mse", weighted_metrics=["mae"])
        else:
            model.compile(keras.optimizers.SGD(0.05), "mse", weighted_metrics=["mae"])
        data = tf.data.Dataset.from_tensor_slices(({"a": X[:, :2], "b": X[:, 2:]}, Y, weights)).batch(9)
        return model, model.fit(data, epochs=3, verbose=0).history

    ours, our_history = trained(True)
    theirs, their_history = trained(False)
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    for name in their_history:
        np.testing.assert_allclose(our_history[name], their_history[name], rtol=1e-5)


class OwnLoss(keras.Model):
    """Overrides the methods that Keras documents for one's own loss and metrics."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.distance = keras.metrics.Mean(name="distance")

    def call(self, x, training=False):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = keras.ops.mean(keras.ops.abs(y - y_pred))
        self.distance.update_state(loss)
        return loss


def test_an_unbuilt_subclassed_model_with_its_own_loss_trains():
    decided = plan(TrainingConfig(precision="float32", global_batch_size=8, steps_per_execution=4))
    model = OwnLoss()
    compile(model, decided, optimizer=keras.optimizers.SGD(0.02))
    history = model.fit(X, Y, batch_size=8, epochs=8, verbose=0).history
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    np.testing.assert_allclose(history["distance"], history["loss"], rtol=1e-5)


class OwnStep(keras.Model):
    """Counts its own steps."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.steps.assign_add(1.0)
        return super().train_step(data)


def test_a_model_with_its_own_train_step_keeps_it_and_is_told_what_it_loses():
    decided = plan(TrainingConfig(precision="float32", global_batch_size=8, steps_per_execution=2))
    model = OwnStep()
    model.build((None, 4))
    report = compile(model, decided, loss="mse")
    assert not report.changed
    assert "own train_step" in report.skipped[0].reason
    assert "executions of 2 steps" in report.skipped[0].reason
    model.fit(X, Y, batch_size=8, verbose=0)
    assert float(model.steps) == 5
    assert installed(model) == set()
    for settings in ({"accumulate": 2}, {"checkpoint_dir": "somewhere"}):
        with pytest.raises(ConfigError, match="override compute_loss instead"):
            compile(model, plan(TrainingConfig(precision="float32", **settings)), loss="mse")


@pytest.mark.slow
def test_a_model_with_its_own_train_step_trains_on_replicas(two_replicas):
    decided = plan(TrainingConfig(precision="float32", strategy=two_replicas, global_batch_size=8))
    with decided.scope():
        model = OwnStep()
        model.build((None, 4))
    compile(model, decided, optimizer="sgd", loss="mse")
    history = model.fit(decided.pipeline((X, Y)), epochs=3, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]


@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        ({"jit_compile": True}, {}, "must be set in the TrainingConfig"),
        ({"steps_per_execution": 3}, {}, "must be set in the TrainingConfig"),
        ({"optimizer": None}, {}, "optimizer must be given"),
        ({"loss": keras.losses.MeanSquaredError(reduction="sum")}, {"accumulate": 2}, "loss must average"),
        ({"loss": keras.losses.MeanSquaredError(reduction="none")}, {"accumulate": 2}, "loss must average"),
    ],
)
def test_options_that_do_not_go_with_the_plan_are_refused_and_the_model_is_as_it_was(options, settings, words):
    model, decided = build(**settings)
    with pytest.raises(ConfigError, match=words):
        compile(model, decided, **{"loss": "mse", **options})
    assert not model.compiled
    assert installed(model) == set()


def scalar_loss(y, y_pred):
    return tf.reduce_mean(tf.square(y - y_pred))


class WithTerm(keras.Sequential):
    """Adds a term that is the same for all examples."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        term = keras.ops.sum(keras.ops.square(self.layers[0].kernel))
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 0.1 * term


@pytest.mark.slow
def test_a_loss_function_that_averages_by_itself_counts_the_same_on_replicas(two_replicas):
    """Keras divides a loss by the number of replicas only if it has a value for each example."""
    results = []
    for strategy, accumulate in (("none", 1), (two_replicas, 1), (two_replicas, 2)):
        decided = plan(
            TrainingConfig(
                precision="float32", strategy=strategy, accumulate=accumulate, global_batch_size=8, jit_compile=False
            )
        )
        keras.utils.set_random_seed(0)
        with decided.scope():
            model = WithTerm([keras.Input((4,)), keras.layers.Dense(1, kernel_regularizer="l2")])
        compile(model, decided, optimizer=keras.optimizers.SGD(0.1), loss=scalar_loss)
        data = decided.pipeline((X, Y))
        history = model.fit(data, validation_data=data, epochs=2, verbose=0).history
        results.append([*history["loss"], *history["val_loss"], *model.get_weights()[0].ravel()])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-5)


def test_a_model_from_another_scope_is_refused(two_replicas):
    model, _ = build()
    with pytest.raises(UnsupportedModelError, match=r"built under no strategy, with a plan for MirroredStrategy"):
        compile(model, plan(TrainingConfig(precision="float32", strategy=two_replicas)), loss="mse")
    with two_replicas.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(UnsupportedModelError, match=r"built under MirroredStrategy, with a plan for none"):
        compile(model, plan(TrainingConfig(precision="float32", strategy="none")), loss="mse")


def test_gradient_accumulation_of_an_optimizer_is_refused_on_replicas(two_replicas):
    decided = plan(TrainingConfig(precision="float32", strategy=two_replicas))
    with decided.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ConfigError, match="set accumulate in TrainingConfig"):
        compile(model, decided, optimizer=keras.optimizers.SGD(gradient_accumulation_steps=2), loss="mse")


@keras.saving.register_keras_serializable("tfopt_tests")
class Unsupported(keras.layers.Layer):
    """Runs an operation that XLA has no kernel for, and does not declare that."""

    def call(self, x):
        doubled = tf.strings.to_number(tf.strings.as_string(x))
        return tf.reshape(x + 0.0 * tf.stop_gradient(doubled), tf.shape(x))


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_where_xla_fails_the_first_step_the_training_goes_on_without_and_loses_no_batch(steps):
    def trained(jit_compile):
        decided = plan(
            TrainingConfig(precision="float32", global_batch_size=8, jit_compile=jit_compile, steps_per_execution=steps)
        )
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), Unsupported(name="words"), keras.layers.Dense(1)])
        compile(model, decided, optimizer=keras.optimizers.SGD(0.05), loss="mse")
        data = decided.pipeline((X, Y), training=False)
        if jit_compile:
            with pytest.warns(TfoptWarning, match=r"'words'.*goes on without XLA"):
                history = model.fit(data, epochs=2, verbose=0).history
        else:
            history = model.fit(data, epochs=2, verbose=0).history
        return model, history

    fallen, history = trained(True)
    plain, expected = trained(False)
    assert "words" in ledger(fallen).fallback
    assert "XLA was given up" in str(ledger(fallen))
    assert int(keras.ops.convert_to_numpy(fallen.optimizer.iterations)) == 10
    np.testing.assert_array_equal(history["loss"], expected["loss"])
    for one, other in zip(fallen.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_where_xla_fails_the_first_step_after_a_resume_within_a_call_the_training_goes_on_without(tmp_path):
    def train(**settings):
        _, decided = build(checkpoint_dir=str(tmp_path), **settings)
        model = keras.Sequential([keras.Input((4,)), Unsupported(name="words"), keras.layers.Dense(1)])
        compile(model, decided, optimizer="sgd", loss="mse")
        stop = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / (batch - 1))
        model.fit(decided.pipeline((X, Y)), verbose=0, callbacks=[] if settings["jit_compile"] else [stop])
        return model

    with pytest.raises(ZeroDivisionError):
        train(jit_compile=False, checkpoint_every=2, steps_per_execution=2)
    with pytest.warns(TfoptWarning, match=r"'words'.*goes on without XLA"):
        model = train(jit_compile=True, steps_per_execution=3)
    assert ledger(model).resumed_from == 2
    assert model.optimizer.iterations.numpy() == 5


def test_a_layer_that_says_it_cannot_be_compiled_is_named_before_training():
    decided = plan(TrainingConfig(precision="float32", jit_compile=True, global_batch_size=8))
    model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.CutMix(name="mix"), keras.layers.Flatten()])
    with pytest.warns(TfoptWarning, match="mix: XLA has no kernel"):
        report = compile(model, decided, loss="mse")
    assert model.jit_compile is False
    assert report.skipped[0].name.endswith("mix")


def test_the_ledger_counts_what_xla_compiles_and_warns_of_a_storm():
    decided = plan(TrainingConfig(precision="float32", jit_compile=True, steps_per_execution=1, global_batch_size=8))
    model, _ = build()
    compile(model, decided, optimizer="sgd", loss="mse")

    def batches(*sizes):
        def generate():
            for size in sizes:
                yield X[:size], Y[:size]

        signature = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))
        return tf.data.Dataset.from_generator(generate, output_signature=signature)

    model.fit(batches(8, 8, 5, 8), verbose=0)
    compiled = [build.shapes for build in ledger(model).of_kind("compilation")]
    assert compiled == ["(8, 4), (8, 1)", "(5, 4), (5, 1)"]
    assert ledger(model).compile_seconds > 0
    with pytest.warns(TfoptWarning, match=r"compiled 5 times.*drop_remainder"):
        model.fit(batches(8, 7, 6, 5, 4, 8), verbose=0)
    assert [build.shapes for build in ledger(model).of_kind("compilation")][2:] == [
        f"({size}, 4), ({size}, 1)" for size in (7, 6, 4)
    ]


def test_half_precision_outputs_draw_a_warning_that_names_the_fix():
    decided = plan(TrainingConfig(precision="mixed_bfloat16", global_batch_size=8))
    with decided.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="logits")])
    with pytest.warns(TfoptWarning, match=r"by logits: .* tfopt\.float32_outputs\(model\)"):
        compile(model, decided, loss="mse")
    tfopt.float32_outputs(model)
    compile(model, decided, loss="mse")
    assert model(X).dtype == "float32"


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="relu")
        self.logits = keras.layers.Dense(3, name="logits")

    def call(self, inputs):
        return self.logits(self.hidden(inputs))


class SequentialWithOwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize("pretended", ["amx", "T4"])
def test_outputs_are_float32_under_half_precision_that_the_plan_chose(pretended, monkeypatch):
    monkeypatch.setenv("TFOPT_PRETEND_HARDWARE", pretended)
    decided = plan(TrainingConfig(jit_compile=False, global_batch_size=8))
    assert decided.precision == ("mixed_float16" if pretended == "T4" else "mixed_bfloat16")
    assert "outputs stay float32" in str(decided)
    for kind in (keras.Sequential, SequentialWithOwnStep):
        with decided.scope():
            model = kind([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(3, name="logits")])
        report = compile(model, decided, loss="mse")
        assert f"logits (Dense): {decided.precision} -> float32" in str(report)
        assert model.layers[0].compute_dtype != "float32"
        assert model(X).dtype == "float32"
    with decided.scope():
        subclassed = Subclassed()
    compile(subclassed, decided, loss="mse")
    subclassed.fit(X[:16], np.zeros((16, 3)), verbose=0)  # it is built here, and its outputs are known
    assert subclassed(X).dtype == "float32"
    assert subclassed.hidden.compute_dtype != "float32"


@pytest.mark.slow
def test_a_pipeline_over_two_devices_trains_like_one_device():
    def trained(**settings):
        decided = plan(TrainingConfig(precision="float32", global_batch_size=8, steps_per_execution=2, **settings))
        keras.utils.set_random_seed(0)
        with decided.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
        report = compile(model, decided, optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
        data = decided.pipeline((X[:37], Y[:37]))
        history = model.fit(data, validation_data=data, epochs=3, verbose=0).history
        return model, report, history

    model, report, history = trained(strategy="pipeline", pipeline_devices=("CPU:0", "CPU:1"), micro_batches=3)
    single, _, expected = trained(strategy="none")
    assert "stage 1" in str(report)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    devices = [variable.value.device for variable in model.trainable_variables]
    assert devices[0].endswith("CPU:0")
    assert devices[-1].endswith("CPU:1")
    slots = {variable.path: variable.value.device for variable in model.optimizer.variables}
    for variable in model.trainable_variables:
        name = variable.path.replace("/", "_")
        for slot in ("momentum", "velocity"):
            assert next(device for path, device in slots.items() if f"{name}_{slot}" in path) == variable.value.device
    np.testing.assert_allclose(model.predict(X, verbose=0), single.predict(X, verbose=0), rtol=1e-4, atol=1e-5)


def test_micro_batches_take_a_kernel_of_one_input_on_sequences():
    def train(accumulate):
        _, decided = build(accumulate=accumulate)
        model = keras.Sequential([keras.Input((4, 1)), keras.layers.Dense(1, kernel_initializer="ones")])
        compile(model, decided, optimizer="sgd", loss="mse")
        model.fit(decided.pipeline((X[..., None], Y), training=False), verbose=0)
        return model.get_weights()[0]

    np.testing.assert_allclose(train(2), train(1), rtol=1e-5)  # its gradient's static shape is (None, 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"jit_compile": True, "steps_per_execution": 1}])
def test_with_run_eagerly_layers_see_values_and_the_weights_are_the_same(settings):
    seen = []

    class Seen(keras.layers.Layer):
        supports_masking = True

        def call(self, x):
            if x.shape[0]:
                seen.append(x.numpy())
            return x

    def train(**options):
        _, decided = build(**settings)
        model = keras.Sequential(
            [keras.Input((4, 1)), keras.layers.Masking(), Seen(), keras.layers.Dense(1, kernel_initializer="ones")]
        )
        compile(model, decided, optimizer="sgd", loss="mse", **options)
        model.fit(decided.pipeline((X[..., None], X[..., None]), training=False), verbose=0)
        return model

    as_graph = train()
    assert not seen
    eager = train(run_eagerly=True)
    assert seen
    assert not eager.jit_compile
    np.testing.assert_allclose(eager.get_weights()[0], as_graph.get_weights()[0], rtol=1e-5)


def test_with_run_eagerly_a_model_that_reads_values_is_built_with_values():
    class Reads(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, x):
            x = self.dense(x)
            return x * float(np.sign(x.numpy().mean()) or 1)

    weights = []
    for of_tfopt in (False, True):
        model = Reads()
        if of_tfopt:
            compile(model, plan(), optimizer=keras.optimizers.SGD(0.1), loss="mse", run_eagerly=True)
        else:
            model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", run_eagerly=True)
        model.fit(X, X[:, :1], batch_size=16, shuffle=False, verbose=0)
        weights.append(model.get_weights()[0])
    np.testing.assert_allclose(weights[1], weights[0], rtol=1e-6)


def test_without_a_ledger_the_error_names_the_models_own_step():
    class Own(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    inputs = keras.Input((4,))
    for model, why in (
        (Own(inputs, keras.layers.Dense(1)(inputs)), "has its own train_step. .* put the loss into compute_loss"),
        (keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), "Compile it with tfopt.compile"),
    ):
        with pytest.raises(UnsupportedModelError, match=why):
            ledger(model)
