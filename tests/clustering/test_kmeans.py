"""k-means on a line, against all clusterings there are."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfopt.clustering import kmeans
from tfopt.clustering.kmeans import cluster_values

RNG = np.random.default_rng(0)


def cost(values, clusters):
    centroids, indices = cluster_values(values, clusters)
    return np.sum((values.astype(np.float64) - centroids[indices]) ** 2)


def least_cost(values, clusters):
    ordered = np.sort(values).astype(np.float64)
    cuts = itertools.combinations(range(1, len(values)), clusters - 1)
    return min(sum(part.size * part.var() for part in np.split(ordered, cut)) for cut in cuts)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 10), st.integers(1, 4))
def test_few_values_have_the_least_cost_of_all_clusterings(seed, size, clusters):
    values = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    assert cost(values, min(clusters, size)) <= least_cost(values, min(clusters, size)) * (1 + 1e-5) + 1e-12


@pytest.mark.parametrize("draw", [RNG.normal, RNG.standard_cauchy])
def test_many_values_come_near_the_least_cost(draw, monkeypatch):
    values = draw(size=1500).astype(np.float32)
    found = cost(values, 16)
    monkeypatch.setattr(kmeans, "GROUPS", 1500)  # no groups
    assert cost(values, 16) <= found <= 1.02 * cost(values, 16)


@pytest.mark.parametrize("clusters", [2, 16, 256])
def test_each_value_is_nearest_to_its_own_centroid(clusters):
    values = np.concatenate([RNG.normal(size=(50, 60)), np.full((50, 40), 0.25)], axis=1).astype(np.float32)
    centroids, indices = cluster_values(values, clusters)
    assert centroids.dtype == np.float32
    assert len(centroids) <= clusters
    nearest = np.abs(values[..., None] - centroids).min(axis=-1)
    np.testing.assert_allclose(np.abs(values - centroids[indices]), nearest)
    means = [values[indices == number].mean(dtype=np.float64) for number in range(len(centroids))]
    np.testing.assert_allclose(centroids, means, rtol=1e-5)


def test_few_different_values_stay_as_they_are():
    different = np.float32([-1e30, 1e-42, 0.1, np.nextafter(np.float32(0.1), np.float32(1)), 3e7])
    values = RNG.choice(different, size=(40, 3))
    centroids, indices = cluster_values(values, 5)
    assert centroids[indices].tobytes() == values.tobytes()
