"""Two stages on two devices train like one device, and each device holds what belongs to its stage, and no more."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.training.pipeline_parallel import split

DEVICES = ["CPU:0", "CPU:1"]
RNG = np.random.default_rng(0)


def train_step(stages, micro_batches):
    """A training step as Keras' own, through the stages."""
    model = stages.model

    def step(data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, y_pred, gradients = stages.forward_backward(x, y, sample_weight, micro_batches=micro_batches)
        stages.apply_gradients(model.optimizer, gradients)
        model._loss_tracker.update_state(loss, sample_weight=tf.shape(keras.tree.flatten(x)[0])[0])
        return model.compute_metrics(x, y, y_pred, sample_weight)

    return step


def fit(build, x, y, *, micro_batches=None, optimizer="adam", devices=DEVICES, cuts=None, batch_size=8, **options):
    """Trains on one device, or in stages where micro_batches are given."""
    keras.utils.set_random_seed(0)
    model = build()
    loss = options.pop("loss", "mse")
    stages = None
    if micro_batches is not None:
        stages = split(model, devices, cuts, batch_size=batch_size)
        stages.place()
    model.compile(optimizer() if callable(optimizer) else optimizer, loss, metrics=options.pop("metrics", None))
    if stages is not None:
        stages.place_optimizer(model.optimizer)
        model.train_step = train_step(stages, micro_batches)
    history = model.fit(x, y, batch_size=batch_size, epochs=3, shuffle=False, verbose=0, **options).history
    return model, stages, history


def assert_same(build, x, y, tolerance=1e-5, micro_batches=(3,), **options):
    """Losses, metrics and weights after training are those of one device."""
    plain, _, expected = fit(build, x, y, **options)
    for count in micro_batches:
        model, stages, history = fit(build, x, y, micro_batches=count, **options)
        assert set(history) == set(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=tolerance, err_msg=f"{name}, {count} micro-batches")
        for mine, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)
        assert_in_place(stages, model.optimizer)
    return model, stages


def device_of(variable):
    return variable.value.device.rsplit("device:")[-1]


def assert_in_place(stages, optimizer):
    """Every variable, and every slot of it, lies on the device of its stage; returns the number of slots."""
    of_layer = {name: record.device for record in stages.records for name in record.layers}
    expected = {}
    for layer in stages.model.layers:
        for variable in layer.variables:
            expected[id(variable)] = of_layer[layer.name]
            assert device_of(variable) == of_layer[layer.name], variable.path
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    count = 0
    for slots in vars(inner).values():
        if isinstance(slots, list) and len(slots) == len(expected_trainable := inner._trainable_variables):
            for slot, variable in zip(slots, expected_trainable, strict=True):
                if isinstance(slot, keras.Variable) and slot is not variable and slot.dtype == variable.dtype:
                    assert device_of(slot) == expected[id(variable)], slot.path
                    count += 1
    return count


def mlp():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, "relu", kernel_regularizer=keras.regularizers.L2(1e-2)),
            layers.Dense(16, "tanh", activity_regularizer=keras.regularizers.L2(1e-2)),
            layers.Dense(16, "relu"),
            layers.Dense(3, kernel_regularizer=keras.regularizers.L2(1e-2), kernel_constraint="unit_norm"),
        ]
    )


def residual_cnn():
    x = keras.Input((8, 8, 3))
    h = layers.Conv2D(8, 3, padding="same", name="stem")(x)
    for place in range(3):
        branch = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", name=f"conv_{place}")(h))
        h = layers.ReLU()(layers.Add()([h, branch]))
    return keras.Model(x, layers.Dense(4)(layers.GlobalAveragePooling2D()(h)))


def many_to_many():
    """Two inputs, two outputs, the first of them from the first stage, and skips over a stage."""
    left, right = keras.Input((4,), name="left"), keras.Input((5,), name="right")
    a = layers.Dense(8, "relu", name="a")(left)
    early = layers.Dense(2, name="early")(a)
    b = layers.Dense(8, "relu", name="b")(keras.ops.add(a, 1.0))
    same = layers.Dropout(0.0, name="same")(b)  # returns its input itself: two names for one tensor
    c = layers.Dense(8, "relu", name="c")(layers.Concatenate()([same, right, b]))
    d = layers.Dense(8, name="d")(layers.Add()([a, c, same]))
    return keras.Model({"left": left, "right": right}, {"early": early, "late": layers.Dense(1, name="late")(d)})


def shared():
    """One embedding looked up twice, a mask, and the same dense layer called twice."""
    words, more = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="int32")
    embedding, dense = layers.Embedding(20, 6, mask_zero=True), layers.Dense(6, "tanh", name="twice")
    pooled = [layers.GlobalAveragePooling1D()(dense(embedding(each))) for each in (words, more)]
    return keras.Model([words, more], layers.Dense(1)(layers.Dense(8, name="after")(layers.Concatenate()(pooled))))


def floats(*shape):
    return RNG.normal(size=shape).astype("float32")


def test_mlp():
    # 29 examples: four batches, the last of five, which three and four micro-batches share unevenly.
    model, stages = assert_same(mlp, floats(29, 6), floats(29, 3), metrics=["mae"], micro_batches=[1, 3])
    assert assert_in_place(stages, model.optimizer) == 2 * 8
    assert {device_of(variable) for variable in model.variables} == set(DEVICES)
    assert device_of(model.optimizer.iterations) == device_of(model.optimizer._learning_rate) == "CPU:0"
    np.testing.assert_allclose(np.linalg.norm(model.get_weights()[-2], axis=0), 1.0, rtol=1e-5)


def test_a_batch_smaller_than_the_micro_batches():
    assert_same(mlp, floats(18, 6), floats(18, 3), micro_batches=[7])


def test_weights_of_examples():
    weights = RNG.uniform(size=24).astype("float32")
    assert_same(mlp, floats(24, 6), floats(24, 3), sample_weight=weights, optimizer="sgd")


def test_residual_cnn_with_batch_norm():
    assert_same(residual_cnn, floats(16, 8, 8, 3), RNG.integers(0, 4, 16), micro_batches=[1],
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])  # fmt: skip


def test_inputs_outputs_and_skips_across_stages():
    x, y = {"left": floats(24, 4), "right": floats(24, 5)}, {"early": floats(24, 2), "late": floats(24, 1)}
    assert_same(many_to_many, x, y, cuts=["c"], loss={"early": "mse", "late": "mae"})
    assert_same(many_to_many, x, y, cuts=["b", "c", "late"], devices=[*DEVICES, *DEVICES], micro_batches=[4])


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop"])
def test_embedding(optimizer):
    words = [RNG.integers(0, 20, (24, 5)), RNG.integers(0, 20, (24, 5))]
    _, stages = assert_same(shared, words, floats(24, 1), optimizer=optimizer)
    assert "embedding" in stages.records[0].layers[0]
