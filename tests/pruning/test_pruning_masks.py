"""Which weights are kept, and that the constraint holds them."""

import keras
import numpy as np
import pytest

from tfopt.errors import ConfigError, UnsupportedLayerError
from tfopt.pruning import CRITERIA, Mask
from tfopt.pruning.criteria import score_weights
from tfopt.pruning.masks import attach_mask, choose_masks, keep_highest
from tfopt.pruning.weights import Weight


def weight(values, path="dense"):
    return Weight(path=path, kind="Dense", attribute="kernel", variable=keras.Variable(values))


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.75, 0.99])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("levels", [1, 3, 10**6])
def test_the_number_of_zeros_is_exact_even_with_ties(sparsity, size, levels):
    scores = np.random.default_rng(size).integers(0, levels, size).astype(float)
    kept = keep_highest(scores, sparsity)
    dropped = min(round(sparsity * size), size - 1)
    assert np.count_nonzero(~kept) == dropped
    # A stable sort drops the lowest, and of equals the first.
    assert set(np.flatnonzero(~kept)) == set(np.argsort(scores, kind="stable")[:dropped])


def test_global_scope_ranks_all_weights_together():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(5, 7)), 3 * rng.normal(size=(4, 2, 3))]
    masks = choose_masks([weight(array) for array in arrays], [np.abs(array) for array in arrays], 0.6, "global")
    everything = np.sort(np.abs(np.concatenate([array.ravel() for array in arrays])))
    threshold = everything[round(0.6 * everything.size)]
    for array, mask in zip(arrays, masks, strict=True):
        np.testing.assert_array_equal(mask, np.abs(array) >= threshold)


def test_zeros_go_first_whatever_the_criterion():
    values = np.random.default_rng(0).normal(size=(20, 20))
    values[::2] = 0
    (kept,) = choose_masks([weight(values)], [CRITERIA["random"](values)], 0.5, "layer")
    np.testing.assert_array_equal(kept, values != 0)


def test_weights_that_are_not_finite_are_refused():
    with pytest.raises(UnsupportedLayerError, match=r"the kernel \(2,\) float32 of 'block/dense' \(Dense\)"):
        score_weights([weight([1.0, np.nan], path="block/dense")], "magnitude")


def test_a_criterion_must_score_every_weight():
    with pytest.raises(ConfigError, match=r"criterion must return one score per weight. Received: shape \(\)"):
        score_weights([weight([1.0, 2.0])], np.sum)


def test_zeros_are_positive_zeros():
    """Negative zeros would not compress, and a product would carry an overflow on."""
    variable = keras.Variable([-1.0, 2.0, np.inf])
    attach_mask(variable).assign(np.array([False, True, False]))
    assert variable.numpy().tobytes() == np.array([0, 2, 0], "float32").tobytes()


def test_an_existing_constraint_is_kept_and_sees_only_kept_weights():
    variable = keras.Variable([[3.0], [4.0], [100.0]])
    variable.constraint = keras.constraints.UnitNorm(axis=0)
    mask = attach_mask(variable)
    mask.assign(np.array([[True], [True], [False]]))
    np.testing.assert_allclose(variable.constraint(keras.ops.array([[3.0], [4.0], [100.0]])), [[0.6], [0.8], [0.0]])


def test_a_variable_gets_one_mask():
    variable = keras.Variable([1.0])
    assert attach_mask(variable) is attach_mask(variable)
    assert isinstance(variable.constraint, Mask)
