"""Weights that share values: how many, which, and that training keeps them shared."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfopt
from tfopt.clustering import ClusteringConfig, cluster
from tfopt.clustering.clusters import Clusters, attach_clusters, means
from tfopt.errors import ConfigError, TfoptWarning, UnsupportedLayerError, UnsupportedModelError
from tfopt.pruning import PruningConfig, prune
from tfopt.training import TrainingConfig, compile, plan

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 6)).astype("float32")
Y = RNG.normal(size=(32, 4)).astype("float32")
EIGHT = ClusteringConfig(clusters=8, minimum_size=1)


def network(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), layers.Dense(16, "tanh", name="hidden"), layers.Dense(4, name="head")])


def kernels(model):
    return [layer.kernel.numpy() for layer in model.layers]


def counts(model):
    return [len(np.unique(kernel)) for kernel in kernels(model)]


def test_a_layer_takes_as_many_values_as_asked_for_and_the_report_says_so():
    model = network()
    before = kernels(model)
    report = cluster(model, ClusteringConfig(clusters=8, minimum_size=65))
    after = kernels(model)
    assert len(np.unique(after[0])) == 8
    np.testing.assert_array_equal(after[1], before[1])
    assert [change.detail for change in report.changed] == ["8 values in kernel (6, 16)"]
    assert [skip.reason for skip in report.skipped] == ["kernel (16, 4) has fewer weights than minimum_size=65"]
    error = np.linalg.norm(after[0] - before[0]) / np.linalg.norm(before[0])
    assert report.metrics["relative_error"] == pytest.approx(error, rel=1e-4)


def test_the_mean_of_a_cluster_with_more_weights_than_float32_counts_is_right():
    """A sum of ones in float32 stops at 2**24: the count, and the differences from the largest weight."""
    values = np.zeros(2**24 + 2**22, np.float32)
    values[: 2**20] = 1.0
    (found,) = np.asarray(means(values, np.zeros(values.shape, np.int32), total=1))
    assert found == pytest.approx(2**20 / values.size, rel=1e-5)


def images():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2DTranspose(5, 3)(layers.Conv2D(4, 3)(inputs))
    return keras.Model(inputs, layers.MultiHeadAttention(2, 4)(x, x))


def test_each_output_channel_takes_values_of_its_own():
    model = images()
    cluster(model, ClusteringConfig(clusters=3, per="channel", minimum_size=1))
    conv, transposed = model.layers[1].kernel.numpy(), model.layers[2].kernel.numpy()
    assert {len(np.unique(conv[..., channel])) for channel in range(4)} == {3}
    assert {len(np.unique(transposed[..., channel, :])) for channel in range(5)} == {3}
    query = model.layers[3].query_dense.kernel.numpy()  # [inputs, heads, size]
    assert {len(np.unique(query[:, head, place])) for head in range(2) for place in range(4)} == {3}
    model.compile("adam", "mse")
    model.fit(RNG.normal(size=(4, 8, 8, 3)), RNG.normal(size=(4, 8, 8, 5)), epochs=2, verbose=0)
    trained = model.layers[1].kernel.numpy()
    assert (trained != conv).any()
    assert {len(np.unique(trained[..., channel])) for channel in range(4)} == {3}


class Counts(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(counts(self.model))


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_values_stay_shared_and_zeros_stay_zero_after_every_step(precision):
    decided = plan(TrainingConfig(precision=precision, strategy="none", global_batch_size=8, steps_per_execution=1))
    with decided.scope():
        model = network()
    if precision != "float32":
        tfopt.float32_outputs(model)
    compile(model, decided, optimizer=keras.optimizers.Adam(0.01), loss="mse")
    prune(model, PruningConfig(target_sparsity=0.5))
    cluster(model, EIGHT)
    before, seen = kernels(model), Counts()
    model.fit(X, Y, batch_size=8, epochs=2, callbacks=[seen], verbose=0)
    assert seen.seen == [[8, 8]] * 8
    for one, other in zip(before, kernels(model), strict=True):
        np.testing.assert_array_equal(one == 0, other == 0)
        assert len(np.unique(one[one != other])) == 7  # each of the other values is trained
        assert len({*zip(one.ravel(), other.ravel(), strict=True)}) == 8  # and no weight leaves its cluster


def test_a_shared_value_moves_by_the_mean_of_its_weights_gradients():
    model = network()
    cluster(model, EIGHT)
    model.compile(keras.optimizers.SGD(0.5), "mse")
    before = kernels(model)[0]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(X) - Y) ** 2)
    gradient = tape.gradient(loss, model.layers[0].kernel.value).numpy()
    model.train_on_batch(X, Y)
    expected = before.copy()
    for value in np.unique(before):
        expected[before == value] -= 0.5 * gradient[before == value].mean()
    np.testing.assert_allclose(kernels(model)[0], expected, atol=1e-6)


def fitted(epochs=2, **settings):
    """Returns the weights after a fit, the same ones however a batch is divided."""
    decided = plan(
        TrainingConfig(precision="float32", jit_compile=False, steps_per_execution=1, global_batch_size=8, **settings)
    )
    with decided.scope():
        model = network()
    prune(model, PruningConfig(target_sparsity=0.5))
    cluster(model, EIGHT)
    compile(model, decided, optimizer=keras.optimizers.Adam(0.01), loss="mse")
    model.fit(decided.pipeline((X, Y)), epochs=epochs, verbose=0)
    assert counts(model) == [8, 8]
    return model.get_weights()


@pytest.mark.slow
def test_replicas_and_micro_batches_train_the_same_values(two_replicas):
    alone = fitted(strategy="none")
    for one, other in zip(fitted(strategy=two_replicas, accumulate=2), alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
def test_a_resumed_training_ends_with_the_same_bits(tmp_path):
    whole = fitted(strategy="none", epochs=3)
    fitted(strategy="none", epochs=1, checkpoint_dir=str(tmp_path))
    resumed = fitted(strategy="none", epochs=3, checkpoint_dir=str(tmp_path))
    assert [each.tobytes() for each in resumed] == [each.tobytes() for each in whole]


def test_a_loaded_model_is_clustered_again_without_a_change(tmp_path):
    model = network()
    prune(model, PruningConfig(target_sparsity=0.5))
    cluster(model, EIGHT)
    model.save(tmp_path / "clustered.keras")
    loaded = keras.saving.load_model(tmp_path / "clustered.keras")
    assert cluster(loaded, EIGHT).metrics["relative_error"] == 0
    cluster(loaded, EIGHT)  # once more: the clusters of before are replaced
    for one, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
        assert one.tobytes() == other.tobytes()
    loaded.compile("adam", "mse")
    loaded.fit(X, Y, verbose=0)
    assert counts(loaded) == [8, 8]
    assert kernels(loaded)[0].tobytes() != kernels(model)[0].tobytes()


def test_averaged_weights_share_values_too_or_a_warning_comes():
    decided = plan(TrainingConfig(precision="float32", strategy="none", global_batch_size=8))
    averaging = {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.5}
    model = network()
    compile(model, decided, optimizer=keras.optimizers.Adam(**averaging), loss="mse")
    cluster(model, EIGHT)
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    assert counts(model) == [8, 8]
    model = network()
    model.compile(keras.optimizers.Adam(**averaging), "mse")
    with pytest.warns(TfoptWarning, match=r"use_ema=True.*tfopt.cluster again"):
        cluster(model, EIGHT)


def test_applied_twice_the_constraint_changes_no_bit():
    variable = keras.Variable(RNG.normal(size=(40, 30)).astype("float32") * 1e3)
    attach_clusters(variable, RNG.integers(0, 5, (40, 30)), count=5)
    variable.constraint.enforce()
    once = variable.numpy()
    assert len(np.unique(once)) == 5
    variable.constraint.enforce()
    assert variable.numpy().tobytes() == once.tobytes()


def test_a_copy_of_a_part_keeps_its_clusters():
    variable = keras.Variable(np.float32([[1, 2, 0], [1, 2, 0], [5, 6, 0]]))
    attach_clusters(variable, np.array([[0, 0, 1], [0, 0, 1], [1, 1, 1]]), count=2, channel_axes=(1,))
    part = keras.Variable(np.float32([[3, 0], [4, 0], [9, 0]]))
    variable.constraint.carry_over(part, lambda values: values[:, 1:])
    assert isinstance(part.constraint, Clusters)
    assert part.constraint(part).numpy().tolist() == [[3.5, 0], [3.5, 0], [9, 0]]


def test_a_clustered_model_is_not_pruned():
    model = network()
    cluster(model, EIGHT)
    before = kernels(model)
    with pytest.raises(UnsupportedModelError, match="must be pruned before it is clustered"):
        prune(model, PruningConfig(target_sparsity=0.5))
    for one, other in zip(kernels(model), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_wrong_is_said_before_a_change():
    with pytest.raises(ConfigError, match=r"clusters must be .*Received: clusters=1\. A weight takes 4 bits"):
        ClusteringConfig(clusters=1)
    model = network()
    with pytest.raises(ConfigError, match="config must be a ClusteringConfig"):
        cluster(model, 16)
    model.layers[1].kernel.assign(np.full((16, 4), np.inf))
    before = kernels(model)[0]
    with pytest.raises(UnsupportedLayerError, match=r"must be finite to be .* of 'head'"):
        cluster(model, EIGHT)
    np.testing.assert_array_equal(kernels(model)[0], before)
    assert model.layers[0].kernel.constraint is None
    model.layers[1].kernel.assign(np.zeros((16, 4)))
    assert [skip.reason for skip in cluster(model, EIGHT).skipped] == ["there is nothing but zeros in kernel (16, 4)"]
    with pytest.warns(TfoptWarning, match=r"cluster changed nothing: kernel .* has fewer weights than minimum_size"):
        tfopt.cluster(network())


def test_models_of_keras_2_are_for_tfmot():
    class Old:
        name = "old"

    Old.__module__ = "tf_keras.models"
    with pytest.raises(UnsupportedModelError, match=r"tfmot.clustering.keras.cluster_weights"):
        cluster(Old())
