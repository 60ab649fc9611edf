"""What each observer chooses, against the definition computed in NumPy from all values at once."""

import numpy as np
import pytest

from tfopt.quantization import QuantizationConfig
from tfopt.quantization.annotation.grids import Range, covering
from tfopt.quantization.calibration.observers import HistogramObserver, least_divergence, make_observer, percentile

RNG = np.random.default_rng(0)
OBSERVERS = ["minmax", "moving_average", "percentile", "mse", "entropy"]


def observe(name, pieces, **settings):
    observer = make_observer(QuantizationConfig(observer=name, **settings))
    for piece in pieces:
        observer.update(np.asarray(piece, np.float32))
    return observer.range()


def error(values, span):
    """The mean squared error of the values on the grid of a range."""
    steps = np.clip(np.rint(values / span.scale), round(span.low / span.scale), span.steps)
    return float(np.mean((steps * span.scale - values) ** 2))


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("signed", [True, False])
def test_values_that_fill_their_range_keep_all_of_it(name, signed):
    values = RNG.uniform(-3.0 if signed else 0.0, 3.0, size=(20, 500))
    span = observe(name, values)
    assert span.signed == signed
    assert span.limit == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("size", [1e-29, 1e-31, 1e-38, 1e-44])
def test_values_whose_products_float32_cannot_hold_count_as_zeros(name, size):
    span = observe(name, RNG.uniform(0, size, (2, 500)))
    assert span.limit == (pytest.approx(size, rel=0.05) if size > 1e-30 else 1.0)


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("ends", [(-4.0, 1.0), (-0.1, 4.0)])
def test_a_side_reaches_no_further_than_its_values(name, ends):
    values = RNG.uniform(*ends, size=(20, 500))
    span, expected = observe(name, values), covering(*ends)
    assert (span.low, span.limit) == (pytest.approx(expected.low, rel=0.05), pytest.approx(expected.limit, rel=0.05))


@pytest.mark.parametrize("name", OBSERVERS)
def test_zeros_alone_and_one_value_alone_have_a_range(name):
    assert observe(name, [np.zeros(9), np.zeros(9)]) == Range(limit=1.0, signed=False)
    assert observe(name, [np.zeros(9), [-0.25]]).low < 0
    assert observe(name, [[0.25]]).limit == pytest.approx(0.25, rel=0.2)


@pytest.mark.parametrize("name", ["percentile", "entropy"])
def test_outliers_are_cut_off(name):
    values = RNG.normal(size=100_000)
    values[:3] = [900.0, -1000.0, 950.0]
    span = observe(name, np.split(values, 10), percentile=99.9)
    assert 2.5 < span.limit < 8.0
    assert error(values[3:], span) < 0.01 * error(values[3:], observe("minmax", [values]))


@pytest.mark.parametrize("percent", [90.0, 99.0, 100.0])
def test_the_percentile_is_that_of_the_magnitudes(percent):
    values = RNG.normal(size=(7, 5000)) * np.arange(1, 8)[:, None]  # each piece is larger than the one before
    expected = np.percentile(np.abs(values.astype("float32")), percent)
    assert observe("percentile", values, percentile=percent).limit == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "values",
    [RNG.normal(size=40_000), RNG.laplace(size=40_000), np.abs(RNG.standard_t(3, size=40_000))],
    ids=["normal", "laplace", "heavy_tailed"],
)
def test_least_squares_finds_the_smallest_error_there_is(values):
    span = observe("mse", np.split(values, 8))
    found = error(values, span)
    limits = np.abs(values).max() * np.linspace(0.02, 1.0, 400)
    best = min(error(values, Range(limit=limit, signed=span.signed)) for limit in limits)
    assert found <= 1.02 * best
    assert found < 0.98 * error(values, observe("minmax", [values]))


def test_entropy_keeps_what_carries_information():
    values = RNG.standard_t(3, size=200_000)
    span = observe("entropy", np.split(values, 20))
    assert span.limit < np.abs(values).max() / 2
    assert np.mean(np.abs(values) > span.limit) < 0.01


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.7])
def test_entropy_is_the_least_divergence_of_all_limits(decay):
    """Against the definition (Migacz 2017), value by value: few enough bins that every limit is tried."""
    generator, outliers, limits = np.random.default_rng(0), 5, []
    for bins in range(40, 200, 10):
        counts = generator.poisson(500 * decay ** np.arange(float(bins)))
        counts[0], counts[-1] = 0, max(counts[-1], outliers)  # zero is exact on any grid
        window, best = bins, 0
        while best < window / 4:  # without outliers, the rest is searched again
            window = 2 * best or window
            tried = range(window, 7, -1)
            best = min(tried, key=lambda inside: divergence(counts.tolist(), inside, 8))
        limits.append(best / bins)
        assert least_divergence(counts, np.arange(bins) + 0.5, 7) == best
    assert max(limits) == 1 if decay == 1 else min(limits) < 0.5


def divergence(counts, inside, levels):
    clipped = [*counts[: inside - 1], sum(counts[inside - 1 :])]
    level_of = [max(level for level in range(levels) if level * inside // levels <= place) for place in range(inside)]
    mass, held = [0.0] * levels, [0] * levels
    for place, level in enumerate(level_of):
        mass[level] += counts[place]
        held[level] += counts[place] > 0
    kept = [mass[level] / held[level] if counts[place] else 0.0 for place, level in enumerate(level_of)]
    total = sum(clipped), sum(kept)
    found = 0.0
    for one, other in zip(clipped, kept, strict=True):
        share = one / total[0]
        if one:
            found += share * np.log(share / (other / total[1])) if other else share * np.log(1e6)
    return found


def test_the_moving_average_follows_the_ends_of_the_pieces():
    pieces = [[-1.0, 2.0], [-3.0, 2.5], [0.0, 8.0]]
    low, high = -1.0, 2.0
    for piece in pieces[1:]:
        low, high = 0.9 * low + 0.1 * piece[0], 0.9 * high + 0.1 * piece[1]
    span, expected = observe("moving_average", pieces), covering(low, high)
    assert (span.low, span.limit) == (pytest.approx(expected.low), pytest.approx(expected.limit))


def test_the_histogram_holds_every_value_whatever_order_they_come_in():
    pieces = [[0.0], [0.001, 0.0005], [70.0], [0.0], [3.0, -3.0]]
    observer = HistogramObserver(lambda counts, centres, steps: float(counts.sum()))
    for piece in pieces:
        observer.update(np.asarray(piece, np.float32))
    assert observer.range() == covering(-3.0, 7.0)


def test_each_value_is_counted_in_its_bin():
    seen, count = [], HistogramObserver.BINS
    observer = HistogramObserver(lambda counts, centres, steps: seen.append((counts, centres)) or 1.0)
    places = RNG.integers(0, count, 5000)
    observer.update(np.append((places + 0.5) / count, 1.0).astype(np.float32))
    observer.range()
    ((counts, centres),) = seen
    np.testing.assert_array_equal(counts, np.bincount(np.append(places, count - 1), minlength=count))
    np.testing.assert_array_equal(centres, (np.arange(count) + 0.5) / count)


def test_a_percentile_is_the_upper_edge_of_the_bin_that_reaches_it():
    counts, centres = np.array([5, 3, 0, 2]), np.array([0.5, 1.5, 2.5, 3.5])
    limits = [percentile(percent)(counts, centres, 127) for percent in (50.0, 51.0, 80.0, 81.0, 100.0)]
    assert limits == [1.0, 2.0, 2.0, 4.0, 4.0]


@pytest.mark.parametrize("percent", [49.0, 101.0])
def test_a_percentile_out_of_range_is_refused(percent):
    with pytest.raises(ValueError, match=rf"in \[50, 100\]\. Received: percentile={percent}"):
        QuantizationConfig(observer="percentile", percentile=percent)


@pytest.mark.parametrize("low", [-100.0, -3.0, -0.2785, -1e-6, 0.0])
@pytest.mark.parametrize("high", [100.0, 5.0, 1e-3, 0.0])
def test_a_range_covers_its_values_holds_zero_and_has_the_smallest_step_that_is_worth_it(low, high):
    span = covering(low, high)
    zero_point, largest = (127, 254) if span.signed else (span.zero_point, 255)
    grid = (np.arange(largest + 1) - zero_point) * span.scale
    assert 0.0 in grid
    assert (grid[0], grid[-1]) == (pytest.approx(span.low), pytest.approx(span.limit))
    assert span.low <= low * (1 - 1e-9)
    assert span.limit >= high * (1 - 1e-9)
    symmetric = Range(limit=max(-low, high) or 1.0, signed=True).scale
    smallest = (high - low) / 255 or 1 / 255
    # The zero point takes whole steps, so that the step may grow by the part of one.
    assert span.scale <= min(symmetric, max(smallest * (1 + 1 / 127), 0.9 * symmetric)) * (1 + 1e-9)
    assert span.symmetric().limit >= max(-low, high)
