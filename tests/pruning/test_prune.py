"""One-shot pruning: which weights of which models, exact numbers of zeros, reports, errors and saved files."""

import json
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.errors import ConfigError, TfoptWarning, UnsupportedLayerError, UnsupportedModelError
from tfopt.pruning import PruningConfig, PruningSchedule, keep_zeros, prune
from tfopt.training import TrainingConfig, compile, plan


def sequential():
    return keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(4)])


def functional():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, name="conv")(inputs)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.DepthwiseConv2D(3, name="depthwise")(x)
    x = layers.SeparableConv2D(5, 3, name="separable")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Flatten()(x)))


def nested():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(6, name="a"), layers.Dense(6, name="b")], name="inner")
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(2, name="head")(inner(inputs)))


def shared():
    inputs = keras.Input((6,))
    twice = layers.Dense(6, name="twice")
    return keras.Model(inputs, twice(twice(inputs)))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(10, 8, name="embedding")
        self.attention = layers.MultiHeadAttention(2, 4, name="attention")
        self.recurrent = layers.Bidirectional(layers.LSTM(4), name="recurrent")
        self.blocks = [layers.Dense(8, name=f"block_{index}") for index in range(2)]

    def call(self, tokens):
        x = self.embedding(tokens)
        x = self.recurrent(self.attention(x, x))
        for block in self.blocks:
            x = block(x)
        return x


def subclassed():
    model = Subclassed()
    model(np.zeros((1, 3)))
    return model


PRUNED = {
    sequential: 2,
    functional: 3,
    nested: 3,
    shared: 1,
    # An embedding, four projections, twice a kernel and a recurrent kernel, two blocks.
    subclassed: 11,
}


def zeros_by_path(model):
    return {variable.path: np.count_nonzero(variable.numpy() == 0) for variable in model.weights}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("build", PRUNED)
@pytest.mark.parametrize("criterion", ["magnitude", "random"])
def test_every_prunable_weight_has_exactly_the_zeros_asked_for(build, criterion):
    model = build()
    before = zeros_by_path(model)
    report = prune(model, PruningConfig(target_sparsity=0.6, criterion=criterion))
    assert len(report.changed) == PRUNED[build]
    masked = [variable for variable in model.weights if variable.constraint is not None]
    assert len(masked) == PRUNED[build]
    after = zeros_by_path(model)
    for variable in masked:
        assert after.pop(variable.path) == round(0.6 * np.prod(variable.shape))
    assert all(count == before[path] for path, count in after.items())
    sizes = [np.prod(variable.shape) for variable in masked]
    assert report.metrics["sparsity"] == sum(round(0.6 * size) for size in sizes) / sum(sizes)


def test_kept_weights_are_the_largest_and_unchanged():
    model = sequential()
    before = model.layers[0].kernel.numpy()
    prune(model, PruningConfig(target_sparsity=0.75))
    after = model.layers[0].kernel.numpy()
    threshold = np.sort(np.abs(before), axis=None)[round(0.75 * before.size)]
    np.testing.assert_array_equal(after, np.where(np.abs(before) >= threshold, before, 0))


def test_global_scope_reaches_the_target_overall():
    model = sequential()
    small, large = (layer.kernel for layer in model.layers)
    small.assign(small * 0.1)
    report = prune(model, PruningConfig(target_sparsity=0.5, scope="global"))
    zeros = [np.count_nonzero(kernel.numpy() == 0) for kernel in (small, large)]
    assert sum(zeros) == round(0.5 * (8 * 16 + 16 * 4))
    assert zeros[0] / (8 * 16) > zeros[1] / (16 * 4)
    assert report.metrics["sparsity"] == 0.5


def test_report_names_what_was_left_alone_and_why():
    report = prune(functional(), PruningConfig(exclude=("head",)))
    assert str(report).splitlines()[1:] == [
        "  changed  conv (Conv2D): 75.0% zeros in kernel (3, 3, 3, 4)",
        "  changed  separable (SeparableConv2D): 75.0% zeros in pointwise_kernel (1, 1, 4, 5)",
        "  skipped  norm (BatchNormalization): a normalization holds a scale and an offset per channel",
        "  skipped  depthwise (DepthwiseConv2D): a depthwise kernel has few weights, and only these for each channel",
        "  skipped  head (Dense): excluded",
    ]


@pytest.mark.parametrize("pattern", ["inner", "inner/*", "?"])
def test_exclude_takes_names_paths_wildcards_and_nested_models(pattern):
    model = nested()
    report = prune(model, PruningConfig(exclude=(pattern,)))
    assert [change.name for change in report.changed] == ["head"]
    assert [skip.name for skip in report.skipped] == ["inner/a", "inner/b"]


class Table(layers.Layer):
    def build(self, input_shape):
        self.table = self.add_weight(shape=(4, 4))

    def call(self, inputs):
        return inputs @ self.table


def test_unknown_and_quantized_weights_are_skipped_with_the_reason():
    model = keras.Sequential([keras.Input((4,)), Table(name="table"), layers.Dense(4, name="int8"), layers.Dense(4)])
    model.layers[1].quantize("int8")
    report = prune(model)
    assert [(skip.name, skip.reason) for skip in report.skipped] == [
        ("table", "tfopt does not know the weights of this class"),
        ("int8", "its weights are quantized or have a LoRA part"),
    ]


class WithSpare(Subclassed):
    def __init__(self):
        super().__init__()
        self.spare = layers.Dense(3, name="spare")


def test_a_layer_that_is_never_called_is_skipped():
    model = WithSpare()
    model(np.zeros((1, 3)))
    report = prune(model)
    reasons = [(skip.name, skip.reason) for skip in report.skipped]
    assert reasons == [("spare", "it is not built, because the model never called it")]


def unbuilt():
    return keras.Sequential([layers.Dense(2)])


def built_in_name():
    model = WithSpare()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras' own, that its layers stay as they are
        model.build((None, 3))
    return model


def diverged():
    model = sequential()
    model.layers[1].kernel.assign(np.full((16, 4), np.nan))
    return model


@pytest.mark.parametrize(
    ("build", "config", "error", "message"),
    [
        (unbuilt, {}, UnsupportedModelError, "model must be built. Received: '.*' without weights. Call it once"),
        (built_in_name, {}, UnsupportedModelError, "model must be built, and its layers too. .* Call the model once"),
        (object, {}, UnsupportedModelError, "model must be a Keras model. Received: object."),
        (
            diverged,
            {},
            UnsupportedLayerError,
            r"infinity in the kernel \(16, 4\) float32 of 'dense.*' \(Dense\)",
        ),
        (nested, {"exclude": ("hed",)}, ConfigError, "Received: 'hed', which no layer has. Did you mean 'head'?"),
        (sequential, {"criterion": np.sum}, ConfigError, "criterion must return one score per weight"),
    ],
)
def test_a_failed_validation_leaves_the_model_untouched(build, config, error, message):
    model = build()
    variables = getattr(model, "weights", [])
    before = [variable.numpy().tobytes() for variable in variables]
    with pytest.raises(error, match=message):
        prune(model, PruningConfig(**config))
    assert [variable.numpy().tobytes() for variable in variables] == before
    assert all(variable.constraint is None for variable in variables)


def test_a_pass_that_changes_nothing_warns():
    with pytest.warns(TfoptWarning, match="prune changed nothing: the sparsity gives no zero in kernel"):
        prune(shared(), PruningConfig(target_sparsity=0.0))


def test_zeros_hold_in_a_fit_that_was_traced_before():
    model = sequential()
    model.compile("adam", "mse")
    x, y = np.random.rand(32, 8), np.random.rand(32, 4)
    model.fit(x, y, verbose=0)
    prune(model)
    pruned = model.layers[0].kernel.numpy()
    model.fit(x, y, verbose=0)
    trained = model.layers[0].kernel.numpy()
    np.testing.assert_array_equal(trained == 0, pruned == 0)
    assert (trained != pruned).any()


@pytest.mark.parametrize(("frequency", "replicas"), [(None, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_zeros_hold_where_the_optimizer_averages_the_weights(frequency, replicas, two_replicas):
    x, y = np.random.rand(32, 8), np.random.rand(32, 4)
    strategy = two_replicas if replicas == 2 else "none"
    decided = plan(TrainingConfig(precision="float32", strategy=strategy, global_batch_size=8))
    with decided.scope():
        model = sequential()
    optimizer = keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=frequency)
    compile(model, decided, optimizer=optimizer, loss="mse")
    prune(model)
    before = [weight for weight in model.get_weights() if weight.ndim == 2]
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    after = [weight for weight in model.get_weights() if weight.ndim == 2]
    for one, other in zip(before, after, strict=True):
        assert (one != other).any()
        np.testing.assert_array_equal(one == 0, other == 0)


def test_an_optimizer_that_averages_weights_under_the_fit_of_keras_is_told():
    x, y = np.random.rand(32, 8), np.random.rand(32, 4)
    model = sequential()
    model.compile(keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5), "mse")
    with pytest.warns(TfoptWarning, match=r"use_ema=True.*pruned weights are not zero"):
        prune(model, PruningConfig(target_sparsity=0.5))
    model.fit(x, y, verbose=0)
    kernel = model.layers[0].kernel
    assert np.mean(kernel.numpy() == 0) < 0.5
    model.fit(
        x, y, verbose=0, callbacks=[PruningSchedule(model, PruningConfig(target_sparsity=0.5, schedule="constant"))]
    )
    assert np.mean(kernel.numpy() == 0) == 0.5


RELOAD = """
import sys
sys.modules["tfopt"] = None  # any import of it fails
import json, keras, numpy as np
model = keras.saving.load_model(sys.argv[1])
zeros = [int((variable.numpy() == 0).sum()) for variable in model.trainable_variables]
print(json.dumps({"zeros": zeros, "outputs": model(np.ones((1, 8, 8, 3))).numpy().tolist()}))
"""


def test_a_pruned_model_loads_where_tfopt_is_not(tmp_path, fresh_python):
    model = functional()
    prune(model)
    path = tmp_path / "pruned.keras"
    model.save(path)
    fresh = fresh_python("-c", RELOAD, path, imported="keras", check=True)
    seen = json.loads(fresh.stdout)
    assert seen["zeros"] == [np.count_nonzero(variable.numpy() == 0) for variable in model.trainable_variables]
    np.testing.assert_allclose(seen["outputs"], model(np.ones((1, 8, 8, 3))), rtol=1e-6, atol=1e-7)


def test_pruning_a_loaded_model_again_finds_the_same_zeros(tmp_path):
    model = sequential()
    prune(model, PruningConfig(criterion="random"))
    model.save(tmp_path / "pruned.keras")
    loaded = keras.saving.load_model(tmp_path / "pruned.keras")
    prune(loaded, PruningConfig(criterion="magnitude"))
    for before, after in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(before.numpy(), after.numpy())


def trained(model):
    """Trains every weight for some steps. Returns where the kernels are zero afterwards."""
    model.compile("adam", "mse")
    model.fit(np.random.rand(64, 16), np.random.rand(64, 4), epochs=2, batch_size=16, verbose=0)
    return {layer.name: layer.kernel.numpy() == 0 for layer in model.layers}


@pytest.fixture
def saved(tmp_path):
    """The path of a pruned model, and where each of its kernels is zero."""
    layers = [keras.layers.Dense(32, name=name) for name in ("a", "b")]
    model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(4, "relu", name="dense")])
    prune(model, PruningConfig(target_sparsity=0.8, exclude=("dense",)))
    model.save(tmp_path / "pruned.keras")
    return tmp_path / "pruned.keras", {layer.name: layer.kernel.numpy() == 0 for layer in model.layers}


def test_a_loaded_model_keeps_all_zeros_after_one_call(saved):
    path, zeros_of = saved
    loaded = keras.saving.load_model(path)
    report = keep_zeros(loaded)
    assert [change.name for change in report.changed] == ["a", "b"]
    assert report.metrics["sparsity"] == pytest.approx(0.8, abs=0.01)
    assert report.skipped[0].reason == "there is no zero in kernel (32, 4)"
    for name, zeros in trained(loaded).items():
        np.testing.assert_array_equal(zeros, zeros_of[name])


@pytest.mark.slow
def test_without_the_call_the_zeros_of_a_loaded_model_are_trained_like_other_weights(saved):
    path, zeros_of = saved
    assert trained(keras.saving.load_model(path))["a"].sum() < 0.5 * zeros_of["a"].sum()
    # So they are, beyond the target, if the model is pruned to less. The pass says so.
    loaded = keras.saving.load_model(path)
    with pytest.warns(TfoptWarning, match="already have 80.1% zeros, .* call tfopt.keep_zeros"):
        prune(loaded, PruningConfig(target_sparsity=0.2, include=("a",)))
    assert trained(loaded)["a"].sum() < zeros_of["a"].sum()


def test_zeros_that_no_pruning_made_are_told_apart():
    depthwise = keras.layers.DepthwiseConv1D(3, name="depthwise")
    new = keras.layers.Dense(2, kernel_initializer="zeros", name="new")
    identity = keras.layers.Dense(4, kernel_initializer="identity", name="identity")
    model = keras.Sequential([keras.Input((8, 4)), depthwise, identity, new])
    depthwise.kernel.assign(np.where(np.arange(12).reshape(depthwise.kernel.shape) % 3, 1.0, 0.0))
    report = keep_zeros(model, exclude=("identity",))
    assert [change.name for change in report.changed] == ["depthwise"]
    reasons = {skip.name: skip.reason for skip in report.skipped}
    assert reasons == {"identity": "excluded", "new": "there is nothing but zeros in kernel (4, 2)"}
    dense = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.warns(TfoptWarning, match="keep zeros changed nothing"):
        keep_zeros(dense)
    assert dense.layers[0].kernel.constraint is None


TRAIN_ON = """
import sys, keras, numpy as np, tfopt
model = keras.saving.load_model(sys.argv[1])
tfopt.keep_zeros(model)
model.compile("adam", "mse")
model.fit(np.random.rand(64, 8), np.random.rand(64, 4), epochs=3, verbose=0)
print("zeros", [int((weight.numpy() == 0).sum()) for weight in model.trainable_weights])
"""


@pytest.mark.slow  # a process of its own: 10 s
def test_training_goes_on_in_a_new_process(tmp_path, fresh_python):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    schedule = PruningSchedule(model, PruningConfig(target_sparsity=0.75, frequency=1))
    x, y = np.random.rand(64, 8), np.random.rand(64, 4)
    model.fit(x, y, epochs=3, verbose=0, callbacks=[schedule])
    model.save(tmp_path / "pruned.keras")
    assert [np.count_nonzero(weight.numpy() == 0) for weight in model.trainable_weights[::2]] == [192, 96]
    assert "zeros [192, 0, 96, 0]" in fresh_python("-c", TRAIN_ON, tmp_path / "pruned.keras", check=True).stdout


def test_a_pruned_model_exports_like_any_other(tmp_path):
    model = sequential()
    prune(model)
    model.export(tmp_path / "saved", verbose=False)
    x = np.ones((2, 8), "float32")
    exported = tf.saved_model.load(str(tmp_path / "saved"))
    np.testing.assert_allclose(exported.serve(x), model(x), rtol=1e-6)


def test_a_lower_target_later_frees_nothing():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32)])
    prune(model, PruningConfig(target_sparsity=0.8))
    zeros = model.layers[0].kernel.numpy() == 0
    with pytest.warns(TfoptWarning, match="already have 80.1% zeros, more than target_sparsity=0.2 asks for, and they"):
        report = prune(model, PruningConfig(target_sparsity=0.2))
    assert report.metrics["sparsity"] == pytest.approx(0.8, abs=0.01)
    model.compile("adam", "mse")
    model.fit(np.random.rand(32, 16), np.random.rand(32, 32), epochs=2, verbose=0)
    assert np.array_equal(model.layers[0].kernel.numpy() == 0, zeros)


@pytest.mark.parametrize("config", [0.5, {"target_sparsity": 0.5}])
def test_a_config_of_another_type_is_refused(config):
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32)])
    with pytest.raises(ConfigError, match="config must be a PruningConfig"):
        prune(model, config)
