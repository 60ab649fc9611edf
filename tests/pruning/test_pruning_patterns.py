"""Patterns of zeros: equal to tfmot's for Dense and Conv2D, to NumPy for the others, and exact in every layer."""

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfopt
from tfopt.errors import ConfigError
from tfopt.pruning import PruningConfig, PruningSchedule, prune
from tfopt.pruning.masks import choose_masks, erk_sparsities
from tfopt.pruning.patterns import parse_pattern
from tfopt.pruning.tfmot import import_tfmot
from tfopt.pruning.weights import Weight, find_weights

RANDOM = np.random.default_rng(0)


def weight_of(values, reduction):
    return Weight(path="w", kind="Dense", attribute="kernel", variable=keras.Variable(values), reduction=reduction)


def mask_of(values, reduction, sparsity, pattern, transposable=False):
    weight = weight_of(values, reduction)
    return choose_masks([weight], [np.abs(values)], sparsity, "layer", parse_pattern(pattern, transposable))[0]


def tfmot_mask(values, sparsity, **pattern):
    """The mask of tfmot's own `Pruning` object after one update."""
    from tensorflow_model_optimization.python.core.sparsity.keras import pruning_impl

    variable, mask, threshold = tf.Variable(values), tf.Variable(np.ones_like(values)), tf.Variable(0.0)
    schedule = import_tfmot().sparsity.keras.ConstantSparsity(sparsity, begin_step=0, frequency=1)
    options = {"block_size": [1, 1], "block_pooling_type": "AVG", **pattern}
    pruning = pruning_impl.Pruning(lambda: tf.constant(0), [(variable, mask, threshold)], schedule, **options)
    return pruning._maybe_update_block_mask(variable)[1].numpy().astype(bool)


def random_kernels(count):
    """Kernels of Dense and Conv2D in random shapes, without ties, with a random sparsity that rounds alike in both."""
    for number in range(count):
        dense = number % 2 == 0
        shape = RANDOM.integers(5, 24, 2) if dense else (*RANDOM.integers(1, 4, 2), *RANDOM.integers(3, 16, 2))
        values = RANDOM.permutation(np.arange(1, np.prod(shape) + 1)).astype("f4").reshape(shape)
        values *= np.where(RANDOM.random(values.shape) < 0.5, -1, 1)
        yield values, (0,) if dense else (0, 1, 2), float(RANDOM.uniform(0.1, 0.9))


def test_magnitude_and_n_of_m_equal_tfmot():
    for values, reduction, sparsity in random_kernels(16):
        dropped = np.count_nonzero(~tfmot_mask(values, sparsity))
        np.testing.assert_array_equal(
            mask_of(values, reduction, dropped / values.size, "unstructured"), tfmot_mask(values, sparsity)
        )
        for n, m in ((2, 4), (1, 4), (3, 8)):
            expected = tfmot_mask(values, 0.5, sparsity_m_by_n=(m - n, m))
            np.testing.assert_array_equal(mask_of(values, reduction, 1 - n / m, f"{n}:{m}"), expected)


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (1, 4), (3, 2)])
def test_blocks_of_a_dense_kernel_equal_tfmot(rows, columns):
    # tfmot has blocks for Dense only. Of a kernel that is no multiple of the block it prunes other weights than it
    # scores, because its pooling begins before the kernel.
    for _ in range(17):
        values = RANDOM.normal(size=RANDOM.integers(2, 6, 2) * (rows, columns)).astype("f4")
        expected = tfmot_mask(values, float(RANDOM.uniform(0.1, 0.9)), block_size=[rows, columns])
        blocks = expected[::rows, ::columns]
        share = np.count_nonzero(~blocks) / blocks.size
        np.testing.assert_array_equal(mask_of(values, (0,), share, f"{rows}x{columns}"), expected)


def test_blocks_of_a_convolution_lie_in_its_matrix():
    values = RANDOM.normal(size=(3, 3, 4, 8)).astype("f4")
    means = np.abs(values).reshape(9, 4, 2, 4).mean((1, 3))
    expected = np.repeat(np.repeat(means > np.sort(means.ravel())[8], 4, 0), 4, 1).reshape(values.shape)
    np.testing.assert_array_equal(mask_of(values, (0, 1, 2), 0.5, "4x4"), expected)


def test_a_transposable_mask_is_the_best_of_all():
    values = RANDOM.normal(size=(8, 12)).astype("f4")
    mask = mask_of(values, (0,), 0.5, "2:4", transposable=True)
    rows = [np.isin(range(4), chosen) for chosen in itertools.combinations(range(4), 2)]
    squares = [np.array(each) for each in itertools.product(rows, repeat=4)]
    squares = [each for each in squares if (each.sum(0) == 2).all()]
    for row, column in itertools.product(range(0, 8, 4), range(0, 12, 4)):
        square, found = (each[row : row + 4, column : column + 4] for each in (np.abs(values), mask))
        assert (found.sum(0) == 2).all()
        assert (found.sum(1) == 2).all()
        assert square[found].sum() == pytest.approx(max(square[each].sum() for each in squares))


def test_erk_equals_the_formula_and_keeps_the_total():
    shapes = [(3, 3, 3, 16), (3, 3, 16, 64), (1, 1, 64, 256), (256, 10)]
    found = erk_sparsities(shapes, 0.9)
    sizes = np.array([np.prod(shape) for shape in shapes])
    assert np.dot(found, sizes) == pytest.approx(0.9 * sizes.sum())
    kept = (1 - np.array(found)) * sizes
    sums = np.array([sum(shape) for shape in shapes])
    free = np.array(found) > 0
    assert free.sum() >= 2
    ratios = (kept / sums)[free]
    assert ratios == pytest.approx(np.full(len(ratios), ratios[0]))


def layer_kinds():
    image, sequence = keras.Input((8, 8, 8)), keras.Input((6, 8))
    return {
        "dense": (sequence, layers.Dense(12)),
        "einsum": (sequence, layers.EinsumDense("abc,cde->abde", (None, 4, 6))),
        "conv1d": (sequence, layers.Conv1D(12, 3)),
        "conv2d": (image, layers.Conv2D(12, 3)),
        "conv3d": (keras.Input((4, 4, 4, 8)), layers.Conv3D(4, 2)),
        "transposed": (image, layers.Conv2DTranspose(12, 3)),
        "separable": (image, layers.SeparableConv2D(12, 3)),
        "embedding": (keras.Input((6,), dtype="int32"), layers.Embedding(20, 8)),
        "lstm": (sequence, layers.LSTM(8)),
        "gru": (sequence, layers.Bidirectional(layers.GRU(8))),
        "attention": ((sequence, sequence), layers.MultiHeadAttention(2, 4)),
        "grouped attention": ((sequence, sequence), layers.GroupQueryAttention(4, 4, 2)),
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pattern", [pytest.param("unstructured", marks=pytest.mark.slow), "2:4", "4x4"])
@pytest.mark.parametrize("kind", layer_kinds())
def test_every_kind_of_layer_gets_the_exact_number_of_zeros(kind, pattern):
    inputs, layer = layer_kinds()[kind]
    outputs = layer(*inputs) if isinstance(inputs, tuple) else layer(inputs)
    model = keras.Model(inputs[0] if isinstance(inputs, tuple) else inputs, outputs)
    weights, _ = find_weights(model)
    prune(model, PruningConfig(target_sparsity=0.5, pattern=pattern))
    assert weights
    for weight in weights:
        zeros, size = np.count_nonzero(weight.read() == 0), weight.read().size
        if pattern != "4x4":
            assert abs(zeros - size / 2) <= 1
            continue
        assert 0.4 * size < zeros < 0.6 * size
    if pattern == "2:4":
        values = weights[0].read()
        last = np.moveaxis(values, weights[0].reduction[-1], -1)
        assert ((last.reshape(-1, 4) != 0).sum(1) <= 2).all()


def small():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 8)),
            layers.Conv2D(16, 3, name="first"),
            layers.DepthwiseConv2D(3, name="depthwise"),
            layers.Flatten(),
            layers.Dense(16, name="dense"),
            layers.Dense(4, name="last"),
        ]
    )
    model.compile("adam", "mse")
    return model


X, Y = RANDOM.normal(size=(64, 8, 8, 8)).astype("f4"), RANDOM.normal(size=(64, 4)).astype("f4")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("settings", "total"),
    [
        pytest.param({"pattern": "2:4", "target_sparsity": 0.5}, None, marks=pytest.mark.slow),
        ({"pattern": "2:4", "target_sparsity": 0.5, "transposable": True}, None),
        ({"pattern": "4x4", "target_sparsity": 0.5}, None),
        pytest.param({"scope": "erk", "target_sparsity": 0.8}, 0.8, marks=pytest.mark.slow),
        pytest.param({"schedule": "exponential", "target_sparsity": 0.8}, 0.8, marks=pytest.mark.slow),
        pytest.param({"schedule": "one_cycle", "target_sparsity": 0.8, "scope": "global"}, 0.8, marks=pytest.mark.slow),
    ],
)
def test_masks_rise_during_a_fit_and_hold_at_its_end(settings, total):
    model = small()
    schedule = PruningSchedule(model, PruningConfig(frequency=2, **settings))
    history = model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[schedule])
    rising = history.history["sparsity"]
    assert 0 < rising[0] < rising[-1]
    target = settings["target_sparsity"] if total is None else total
    assert schedule.report.metrics["sparsity"] == pytest.approx(target, abs=2e-3)
    before = [weight.read() == 0 for weight in find_weights(model)[0]]
    prune(model, PruningConfig(**settings))  # finds the same zeros
    assert all(
        np.array_equal(old, weight.read() == 0) for old, weight in zip(before, find_weights(model)[0], strict=True)
    )


@pytest.mark.slow
def test_a_cyclic_schedule_releases_weights():
    model = small()
    config = PruningConfig(schedule="cyclic", target_sparsity=0.8, frequency=1, end_step=32, include=("dense",))
    schedule = PruningSchedule(model, config)
    zeros = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: zeros.append(np.count_nonzero(model.get_layer("dense").kernel == 0))
    )
    model.fit(X, Y, batch_size=8, epochs=5, verbose=0, callbacks=[schedule, count])
    size = model.get_layer("dense").kernel.shape[0] * 16
    assert zeros[0] == zeros[8] == zeros[16] == zeros[24] == 0
    expected = [round((0.8 - 0.8 * (1 - step / 8) ** 3) * size) for step in range(1, 8)]
    assert zeros[1:8] == zeros[9:16] == zeros[25:32] == expected
    assert zeros[32] == zeros[-1] == round(0.8 * size)


def test_layers_are_chosen_by_name_class_and_place():
    def skipped(**settings):
        report = prune(small(), PruningConfig(target_sparsity=0.5, **settings))
        return {skip.name: skip.reason for skip in report.skipped}, {change.name for change in report.changed}

    reasons, changed = skipped(keep_first=True, keep_last=True)
    assert changed == {"dense"}
    assert reasons["first"] == "it is the first layer, and keep_first is set"
    assert reasons["last"] == "it is the last layer, and keep_last is set"
    reasons, changed = skipped(exclude=("Dense",))
    assert changed == {"first"}
    assert reasons["dense"] == reasons["last"] == "excluded"
    reasons, changed = skipped(include=("DepthwiseConv2D", "d*"), exclude=("dense",))
    assert changed == {"depthwise"}
    assert reasons["first"] == "not included"


def test_layers_are_chosen_by_class_object_and_function():
    def pruned(**settings):
        return {change.name for change in prune(small(), PruningConfig(target_sparsity=0.5, **settings)).changed}

    assert pruned(include=(layers.Dense,)) == {"dense", "last"}
    assert pruned(exclude=[lambda layer: getattr(layer, "units", 16) < 8]) == {"first", "dense"}
    with pytest.raises(ConfigError, match="which no layer has"):
        prune(small(), PruningConfig(include=(layers.LSTM,)))
    with pytest.raises(
        ConfigError, match=r"exclude must be a tuple of strings or functions. Received: exclude=\(3,\)."
    ):
        PruningConfig(exclude=(3,))


def test_a_weight_has_one_schedule():
    model = small()
    prune(model, PruningConfig(target_sparsity=0.8))
    assert prune(model, PruningConfig(target_sparsity=0.9)).metrics["sparsity"] == pytest.approx(0.9, abs=1e-3)
    two = [PruningSchedule(model, PruningConfig(target_sparsity=0.95)) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"A weight must have one schedule in a fit. Received: two PruningSchedule"):
        model.fit(X, Y, verbose=0, callbacks=two)
    parts = [
        PruningSchedule(model, PruningConfig(target_sparsity=0.95, **{which: ("dense",)}))
        for which in ("include", "exclude")
    ]
    model.fit(X, Y, verbose=0, epochs=2, callbacks=parts)
    assert parts[1].report.metrics["sparsity"] == pytest.approx(0.95, abs=1e-3)


def test_tfmot_prunes_a_keras_2_model_in_a_pattern():
    import tf_keras

    model = tf_keras.Sequential([tf_keras.layers.Input((8,)), tf_keras.layers.Dense(6)])
    kernel = model.layers[0].kernel.numpy()
    tfopt.prune(model, PruningConfig(pattern="2:4", target_sparsity=0.5))
    expected = np.where(mask_of(kernel, (0,), 0.5, "2:4"), kernel, 0)
    np.testing.assert_array_equal(model.layers[0].kernel.numpy(), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "4:4"}, "n:m must keep at least one and fewer than m of m weights. Received: pattern='4:4'"),
        ({"pattern": "0x4"}, "A block must have at least one row"),
        ({"pattern": "two of four"}, "pattern must be 'unstructured', n:m such as '2:4', or a block such as '4x4'"),
        ({"pattern": "2:4", "target_sparsity": 0.9}, "Set target_sparsity=0.5."),
        ({"pattern": "2:4", "target_sparsity": 0.5, "scope": "global"}, "scope must be 'layer' with a pattern n:m"),
        ({"pattern": "4x4", "regrowth": 0.2}, "regrowth must be 0 with a pattern"),
        ({"transposable": True}, "transposable must be False unless the pattern is n:m"),
        ({"pattern": "4:8", "target_sparsity": 0.5, "transposable": True}, "m of at most 4"),
    ],
)
def test_wrong_patterns(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        PruningConfig(**settings)


def test_a_name_in_include_must_exist():
    with pytest.raises(ConfigError, match=r"include must name layers of the model. Received: 'frist'"):
        prune(small(), PruningConfig(include=("frist",)))
