"""Two stages on two devices train like one device, and each device holds only the variables of its stage."""

from itertools import combinations, pairwise

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.training.pipeline_parallel.step import split

DEVICES = ["CPU:0", "CPU:1"]
RNG = np.random.default_rng(0)


def train_step(stages, micro_batches):
    """A model whose training step is like Keras' own, but runs the stages."""
    model = stages.model

    def step(data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, y_pred, gradients = stages.forward_backward(x, y, sample_weight, micro_batches=micro_batches)
        stages.apply_gradients(model.optimizer, gradients)
        model._loss_tracker.update_state(loss, sample_weight=tf.shape(keras.tree.flatten(x)[0])[0])
        return model.compute_metrics(x, y, y_pred, sample_weight)

    return step


def fit(build, x, y, *, micro_batches=None, optimizer="adam", devices=DEVICES, cuts=None, batch_size=8, **options):
    """Trains on one device, or in stages if micro_batches are given."""
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


def assert_same(build, x, y, tolerance=1e-5, micro_batches=(2,), **options):
    """Checks that losses, metrics and weights after training are those of one device."""
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
    """Checks that every variable and its slots are on the device of its stage. Returns the number of slots."""
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
    """Has two inputs, two outputs (one of them from the first stage), and connections that skip a stage."""
    left, right = keras.Input((4,), name="left"), keras.Input((5,), name="right")
    a = layers.Dense(8, "relu", name="a")(left)
    early = layers.Dense(2, name="early")(a)
    b = layers.Dense(8, "relu", name="b")(keras.ops.add(a, 1.0))
    same = layers.Dropout(0.0, name="same")(b)  # returns its input itself: two names for one tensor
    c = layers.Dense(8, "relu", name="c")(layers.Concatenate()([same, right, b]))
    d = layers.Dense(8, name="d")(layers.Add()([a, c, same]))
    return keras.Model({"left": left, "right": right}, {"early": early, "late": layers.Dense(1, name="late")(d)})


def shared():
    """Has an embedding that is called twice, a mask, and a dense layer that is called twice."""
    words, more = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="int32")
    embedding, dense = layers.Embedding(20, 6, mask_zero=True), layers.Dense(6, "tanh", name="twice")
    pooled = [layers.GlobalAveragePooling1D()(dense(embedding(each))) for each in (words, more)]
    return keras.Model([words, more], layers.Dense(1)(layers.Dense(8, name="after")(layers.Concatenate()(pooled))))


def floats(*shape):
    return RNG.normal(size=shape).astype("float32")


def test_mlp():
    # 29 examples: four batches, the last of five, which three micro-batches share unevenly.
    model, stages = assert_same(mlp, floats(29, 6), floats(29, 3), metrics=["mae"], micro_batches=[3])
    assert assert_in_place(stages, model.optimizer) == 2 * 8
    assert {device_of(variable) for variable in model.variables} == set(DEVICES)
    assert device_of(model.optimizer.iterations) == device_of(model.optimizer._learning_rate) == "CPU:0"
    np.testing.assert_allclose(np.linalg.norm(model.get_weights()[-2], axis=0), 1.0, rtol=1e-5)


@pytest.mark.slow
def test_a_batch_smaller_than_the_micro_batches():
    assert_same(mlp, floats(18, 6), floats(18, 3), micro_batches=[7])


@pytest.mark.slow
def test_weights_of_examples():
    weights = RNG.uniform(size=24).astype("float32")
    assert_same(mlp, floats(24, 6), floats(24, 3), sample_weight=weights, optimizer="sgd")


@pytest.mark.slow
def test_residual_cnn_with_batch_norm():
    assert_same(residual_cnn, floats(16, 8, 8, 3), RNG.integers(0, 4, 16), micro_batches=[1],
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])  # fmt: skip


@pytest.mark.slow
def test_inputs_outputs_and_skips_across_stages():
    x, y = {"left": floats(24, 4), "right": floats(24, 5)}, {"early": floats(24, 2), "late": floats(24, 1)}
    assert_same(many_to_many, x, y, cuts=["c"], loss={"early": "mse", "late": "mae"})
    assert_same(many_to_many, x, y, cuts=["b", "c", "late"], devices=[*DEVICES, *DEVICES], micro_batches=[4])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_embedding(optimizer):
    words = [RNG.integers(0, 20, (24, 5)), RNG.integers(0, 20, (24, 5))]
    _, stages = assert_same(shared, words, floats(24, 1), optimizer=optimizer)
    assert "embedding" in stages.records[0].layers[0]


def funnel():
    widths = (16, 8, 4, 3)
    return keras.Sequential([keras.Input((6,)), *(layers.Dense(width, "tanh") for width in widths)])


@pytest.mark.slow
def test_mixed_float16_scales_the_loss():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        # Not `mlp`: in Keras 3.15 an activity regularizer does not train under mixed_float16 at all.
        model, stages = assert_same(funnel, floats(16, 6), floats(16, 3), tolerance=2e-3, micro_batches=[2])
    finally:
        keras.config.set_dtype_policy(before)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert float(model.optimizer.dynamic_scale.value) == 2.0**15
    assert assert_in_place(stages, model.optimizer) == 2 * 8
    assert device_of(model.optimizer.dynamic_scale) == "CPU:0"


def two_layers():
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(3)])


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(
            lambda: keras.optimizers.AdamW(
                weight_decay=0.1, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=2
            ),
            marks=pytest.mark.slow,
        ),
        lambda: keras.optimizers.Adafactor(1e-2),  # whose slots have other shapes than the weights
    ],
)
def test_other_optimizers(optimizer):
    assert_same(two_layers, floats(16, 6), floats(16, 3), optimizer=optimizer, micro_batches=[2])


def dropout_and_batch_norm():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu", name="first"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(8, "relu", name="second"),
            layers.Dropout(0.3, name="drop"),
            layers.Dense(3, name="third"),
        ]
    )


def placed(build=dropout_and_batch_norm, cuts=("second",), optimizer="adam"):
    model = build()
    stages = split(model, DEVICES, cuts, batch_size=8)
    stages.place()
    model.compile(optimizer, "mse")
    stages.place_optimizer(model.optimizer)
    return model, stages


def test_every_computation_is_on_its_stage_device():
    model, stages = placed(optimizer=keras.optimizers.AdamW(weight_decay=0.1))

    @tf.function
    def step(x, y):
        loss, _, gradients = stages.forward_backward(x, y, micro_batches=2)
        stages.apply_gradients(model.optimizer, gradients)
        return loss

    operations = step.get_concrete_function(tf.zeros((8, 6)), tf.zeros((8, 3))).graph.get_operations()
    counts = {}
    for operation in operations:
        place = (operation.type, operation.device.rsplit("device:")[-1])
        counts[place] = counts.get(place, 0) + 1
    # Forward, and backward one product for the weights and one for the inputs, but for the model's own; twice.
    assert {place: count for place, count in counts.items() if place[0] == "MatMul"} == {
        ("MatMul", "CPU:0"): 2 * 2,
        ("MatMul", "CPU:1"): 2 * 6,
    }
    # The updates' arithmetic: one root each for two dense variables and two of the normalization, and for four.
    roots = {place: count for place, count in counts.items() if place[0] == "Sqrt"}
    assert set(roots) == {("Sqrt", "CPU:0"), ("Sqrt", "CPU:1")}
    assert roots["Sqrt", "CPU:0"] == roots["Sqrt", "CPU:1"]
    assert not [place for place in counts if place[0] in ("Mul", "MatMul", "Sqrt", "RealDiv", "Sub") and not place[1]]


@pytest.mark.slow
def test_moving_keeps_every_kind_of_state(tmp_path):
    model, stages = placed()
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    x, y = floats(8, 6), floats(8, 3)
    assert device_of(model.get_layer("drop").seed_generator.state) == "CPU:1"
    assert {device_of(variable) for variable in model.get_layer("norm").variables} == {"CPU:0"}

    model.train_step = train_step(stages, 2)
    model.fit(x, y, epochs=2, verbose=0)
    want = stages.forward(x).numpy()
    np.testing.assert_array_equal(model.predict(x, verbose=0), want)
    plain.set_weights(model.get_weights())
    np.testing.assert_array_equal(plain.predict(x, verbose=0), want)

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), want)
    for mine, theirs in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())

    model.export(tmp_path / "exported", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(served.serve(x), want, rtol=0, atol=1e-6)

    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "checkpoint"))
    model.set_weights([np.zeros_like(value) for value in model.get_weights()])
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(checkpoint).assert_consumed()
    np.testing.assert_array_equal(stages.forward(x).numpy(), want)
    assert_in_place(stages, model.optimizer)


@pytest.mark.slow
def test_an_optimizer_built_before_keeps_its_slots():
    x, y = floats(16, 6), floats(16, 3)
    plain, _, _ = fit(mlp, x, y, optimizer=lambda: keras.optimizers.Adam(1e-2))
    model, _, _ = fit(mlp, x, y, optimizer=lambda: keras.optimizers.Adam(1e-2))
    plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    stages = split(model, DEVICES, batch_size=8)
    stages.place()
    stages.place_optimizer(model.optimizer)
    model.train_step = train_step(stages, 2)
    model.train_function = None
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert assert_in_place(stages, model.optimizer) == 2 * 8
    for mine, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


def test_frozen_layers_get_no_gradient():
    model = mlp()
    model.layers[0].trainable = False
    stages = split(model, DEVICES, batch_size=8)
    stages.place()
    model.compile("sgd", "mse")
    loss, y_pred, gradients = stages.forward_backward(floats(8, 6), floats(8, 3), micro_batches=2)
    assert len(gradients) == len(model.trainable_variables) == 6
    assert all(gradient is not None for gradient in gradients)
    assert y_pred.shape == (8, 3)
    assert loss.shape == ()


def test_the_balance_is_the_best_there_is():
    for _ in range(6):
        sizes = RNG.integers(1, 200, 6)
        model = keras.Sequential([keras.Input((3,)), *(layers.Dense(int(size)) for size in sizes)])
        weights = [4 * 4 * layer.count_params() + 8 * 4 * layer.units for layer in model.layers]
        best = min(
            max(sum(weights[start:end]) for start, end in pairwise([0, *inner, 6]))
            for inner in combinations(range(1, 6), 2)
        )
        stages = split(model, ["CPU:0", "CPU:1", "CPU:0"], batch_size=8)
        assert max(4 * s.parameter_bytes + s.activation_bytes for s in stages.records) == best
        assert [name for s in stages.records for name in s.layers] == [layer.name for layer in model.layers]


def test_the_rows_of_the_plan():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(64, name="wide"), layers.Dense(2, name="head")])
    assert str(split(model, DEVICES, batch_size=16)).splitlines() == [
        "stage 0  CPU:0  parameters 2.2 KiB, activations 4.0 KiB  wide (1 layer)",
        "stage 1  CPU:1  parameters 520 B, activations 128 B  head (1 layer)",
    ]


def revisited():
    x, twice = keras.Input((4,)), layers.Dense(4, name="twice")
    return keras.Model(x, twice(layers.Dense(4, name="between")(twice(x))))


class Subclassed(keras.Model):
    def call(self, inputs):
        return inputs


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"devices": ["CPU:0", "CPU:7"]}, ConfigError, "Unknown device in pipeline_devices 'CPU:7'"),
        ({"devices": "CPU:0"}, ConfigError, "must be a list"),
        ({"devices": ["CPU:0"] * 9}, ConfigError, "Give at most 5 devices"),
        ({"cuts": ["secnd"]}, ConfigError, "Did you mean 'second'"),
        ({"cuts": ["first"]}, ConfigError, "leave the first stage a layer"),
        ({"cuts": ["second", "third"]}, ConfigError, "one layer fewer"),
        ({"devices": ["CPU:0"] * 3, "cuts": ["third", "second"]}, ConfigError, "in the order of the graph"),
        ({"model": lambda: Subclassed()}, UnsupportedModelError, "functional API"),
        ({"model": lambda: keras.Sequential([layers.Dense(1)])}, UnsupportedModelError, r"model\.build\(shape\)"),
        ({"model": revisited, "cuts": ["between"]}, ConfigError, "must not separate the calls of layer 'twice'"),
        ({"model": revisited}, ConfigError, "Give at most 1 device"),
    ],
)
def test_what_is_refused(options, error, match):
    model = options.get("model", dropout_and_batch_norm)()
    with pytest.raises(error, match=match):
        split(model, options.get("devices", DEVICES), options.get("cuts"), batch_size=8)
