"""Rounding weights to 8 and 4 bits in groups, against NumPy written out."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfopt.errors import ConfigError
from tfopt.quantization.weight_only import WeightOnlyConfig, quantize_matrix


def matrices():
    sizes = st.tuples(st.integers(1, 70), st.integers(1, 9), st.integers(0, 2**32 - 1))
    return sizes.map(
        lambda s: np.random.default_rng(s[2]).normal(size=s[:2]).astype(np.float32) * 10.0 ** (s[2] % 7 - 3)
    )


@settings(max_examples=60, deadline=None)
@given(matrices(), st.sampled_from([0, 1]))
def test_int8_is_within_half_a_step_of_each_channel(matrix, channel_axis):
    grouped = quantize_matrix(matrix, bits=8, group_size=None, channel_axis=channel_axis)
    limits = np.abs(matrix).max(axis=1 - channel_axis, keepdims=True)
    error = np.abs(grouped.decoded() - matrix)
    assert (error <= limits / 127 * 0.5001).all()
    np.testing.assert_allclose(error[np.abs(matrix) == limits], 0, atol=1e-6 * limits.max())


@settings(max_examples=60, deadline=None)
@given(matrices(), st.sampled_from([0, 1]), st.sampled_from([8, 16, 32]))
def test_int4_has_one_scale_per_group_and_is_no_worse_than_plain_rounding(matrix, channel_axis, size):
    grouped = quantize_matrix(matrix, bits=4, group_size=size, channel_axis=channel_axis)
    decoded = grouped.decoded()
    assert decoded.shape == matrix.shape
    assert grouped.steps.min() >= -8
    assert grouped.steps.max() <= 7
    np.testing.assert_array_equal(grouped.scales, grouped.scales.astype(ml_dtypes.bfloat16).astype(np.float32))
    channels = matrix if channel_axis == 0 else matrix.T
    found = decoded if channel_axis == 0 else decoded.T
    plain = 0.0
    for channel, row in zip(channels, found, strict=True):
        for start in range(0, len(channel), size):
            group = channel[start : start + size]
            steps = row[start : start + size]
            assert len(np.unique(steps)) <= 16
            scale = max(np.abs(group).max(), 1e-30) / 7
            plain += float(np.sum((np.clip(np.rint(group / scale), -8, 7) * scale - group) ** 2))
    # A scale in bfloat16 is up to 0.4% off what it should be.
    assert np.sum((decoded - matrix) ** 2) <= 1.05 * plain + 1e-4 * np.sum(matrix**2)


def test_the_outermost_weight_of_an_int4_group_is_8_steps_from_zero():
    """int4 reaches from -8 to 7, so the scale takes the sign that puts the outermost weight at -8."""
    for outermost in (-4.0, 4.0):
        matrix = np.array([[outermost], [-outermost / 8], [outermost / 4], [outermost / 2]], np.float32)
        grouped = quantize_matrix(matrix, bits=4, group_size=4, channel_axis=1)
        assert grouped.steps.ravel().tolist() == [-8, 1, -2, -4]
        np.testing.assert_array_equal(grouped.decoded(), matrix)


def test_smaller_groups_are_more_exact():
    matrix = np.random.default_rng(0).standard_t(4, size=(512, 64)).astype(np.float32)
    errors = [
        np.linalg.norm(quantize_matrix(matrix, bits=4, group_size=size, channel_axis=1).decoded() - matrix)
        for size in (32, 64, 128, None)
    ]
    assert errors == sorted(errors)
    assert errors[0] < 0.8 * errors[-1]


def test_zeros_stay_zeros_and_a_group_of_zeros_is_allowed():
    matrix = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    matrix[:32, 3] = 0
    matrix[::5] = 0
    for bits, size in ((8, None), (4, 16)):
        decoded = quantize_matrix(matrix, bits=bits, group_size=size, channel_axis=1).decoded()
        assert (decoded[matrix == 0] == 0).all()
        assert np.isfinite(decoded).all()


@pytest.mark.parametrize("wrong", [{"group_size": 4}, {"decode": "never"}, {"minimum_size": 0}])
def test_settings_out_of_range(wrong):
    with pytest.raises(ConfigError, match=r"Received|Unknown decode"):
        WeightOnlyConfig(**wrong)
