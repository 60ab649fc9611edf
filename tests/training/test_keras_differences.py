"""The report names what trains in a different way than with Keras' step, and a setting trains it as Keras does."""

import keras
import numpy as np
import pytest

from tfopt.errors import ConfigError
from tfopt.training import TrainingConfig, compile, plan

BATCH, STEPS = 8, 4
WORDS = np.minimum(np.random.default_rng(0).geometric(0.3, size=(BATCH * STEPS, 4)), 9).astype("int32")
LABELS = (WORDS.sum(1, keepdims=True) % 3).astype("float32")


class Counting(keras.layers.Layer):
    """Counts its calls in a float variable and in an integer variable."""

    def build(self, input_shape):
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False)
        self.whole = self.add_weight(name="whole", shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1.0)
            self.whole.assign_add(1)
        return x


def words():
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(10, 3, name="words"),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.5, seed=1, name="dropout"),
            Counting(name="counting"),
            keras.layers.Dense(1),
        ]
    )


def compiled(optimizer="adam", **settings):
    decided = plan(TrainingConfig(precision="float32", global_batch_size=BATCH, **settings))
    keras.utils.set_random_seed(0)
    with decided.scope():
        model = words()
    return model, compile(model, decided, optimizer=optimizer, loss="mse")


@pytest.mark.parametrize(
    ("optimizer", "verb"),
    [
        (keras.optimizers.Adam(), "squares"),
        (keras.optimizers.RMSprop(), "squares"),
        (keras.optimizers.SGD(0.1, momentum=0.9), None),
        (keras.optimizers.Lion(), None),
        (keras.optimizers.SGD(0.1, clipnorm=1.0), "clips"),
        (keras.optimizers.Nadam(global_clipnorm=1.0), "clips and squares"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_report_names_embeddings_that_an_optimizer_updates_otherwise(optimizer, verb):
    _, report = compiled(optimizer)
    told = {change.name: change.detail for change in report.changed if change.kind == "Embedding"}
    assert list(told) == ([] if verb is None else ["words"])
    if verb is not None:
        assert f"before {type(optimizer).__name__} uses them; Keras {verb} them" in told["words"]


@pytest.mark.slow
def test_with_sparse_gradients_an_embedding_trains_as_by_keras_bit_for_bit():
    def trained(model):
        model.fit(WORDS, LABELS, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        return [variable.numpy() for variable in model.trainable_variables]

    keras.utils.set_random_seed(0)
    plain = words()
    plain.compile("adam", "mse", jit_compile=False)
    wanted = trained(plain)
    model, report = compiled(sparse_embedding_gradients=True)
    assert [change.kind for change in report.changed] == ["Sequential"]
    for found, value in zip(trained(model), wanted, strict=True):
        np.testing.assert_array_equal(found, value)
    summed = trained(compiled()[0])
    assert np.abs(summed[0] - wanted[0]).max() > 1e-4  # it makes a difference to the embedding, which comes first


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"accumulate": 2}, "accumulate=2"),
        ({"strategy": "pipeline", "pipeline_devices": ("CPU:0", "CPU:1")}, "strategy='pipeline'"),
        ({"strategy": "mirrored"}, "strategy=MirroredStrategy"),
    ],
)
def test_sparse_gradients_are_a_line_of_the_plan_and_refused_for_a_divided_batch(settings, word, two_replicas):
    assert "as a batch names it, as in Keras" in str(plan(TrainingConfig(sparse_embedding_gradients=True)))
    assert "sparse" not in str(plan())
    if settings.get("strategy") == "mirrored":
        settings = {"strategy": two_replicas}
    with pytest.raises(ConfigError, match="one device and one micro-batch") as caught:
        plan(TrainingConfig(sparse_embedding_gradients=True, **settings))
    assert word in str(caught.value)


def test_a_pipeline_sums_the_rows_of_an_embedding_as_one_device_does():
    # Without BatchNormalization, which takes its statistics from each micro-batch.
    def trained(**settings):
        decided = plan(TrainingConfig(precision="float32", global_batch_size=BATCH, **settings))
        keras.utils.set_random_seed(0)
        with decided.scope():
            model = keras.Sequential(
                [
                    keras.Input((4,), dtype="int32"),
                    keras.layers.Embedding(10, 3, name="words"),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1),
                ]
            )
        compile(model, decided, optimizer=keras.optimizers.Adam(0.01), loss="mse")
        model.fit(WORDS, LABELS, batch_size=BATCH, shuffle=False, verbose=0)
        return model.get_weights()

    stages = trained(strategy="pipeline", pipeline_devices=("CPU:0", "CPU:1"), micro_batches=4)
    for found, wanted in zip(stages, trained(strategy="none"), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_the_report_names_layers_whose_state_is_updated_for_each_part_of_a_batch(two_replicas):
    def told(report):
        return {skip.name: skip.reason for skip in report.skipped}

    assert told(compiled()[1]) == {}  # as in Keras
    divided, report = compiled(accumulate=4)
    (reason,) = told(report).values()
    assert list(told(report)) == ["counting"]  # neither the batch norm, nor the dropout's seed
    assert "(calls, whole)" in reason
    assert "4 times in a step" in reason
    _, report = compiled(strategy=two_replicas, accumulate=2)
    assert (
        "2 times in a step, once for each micro-batch, separately on each of the 2 replicas" in told(report)["counting"]
    )
    # It is as the report says.
    divided.fit(WORDS, LABELS, batch_size=BATCH, verbose=0)
    layer = divided.get_layer("counting")
    assert (float(layer.calls.numpy()), int(layer.whole.numpy())) == (4 * STEPS, 4 * STEPS)
