"""k-means on a line: near the optimum, and without random numbers.

In one dimension the clusters of an optimum are intervals, so that a clustering of sorted values is a choice of cuts.
With cost(i, j) for the squared distances of the values from i to before j from their mean, the least cost of the values
before j in c clusters is

    best(c, j)  =  min over i of  best(c - 1, i) + cost(i, j)

and the cost comes from sums over prefixes. This finds the optimum among a few hundred values. More values are joined
into groups before, and Lloyd's iterations move the cuts between the single values afterwards.

scikit-learn's KMeans treats values as points of a space: it needs starting points at random, and stops at a local
optimum after many passes over all values. Here a pass over n sorted values costs k log n.
"""

from __future__ import annotations

import numpy as np

GROUPS = 256  # more for many clusters
ROUNDS = 100  # of Lloyd's iterations, which end before that


def cluster_values(values: np.ndarray, clusters: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `clusters` centroids, in ascending order and float32, and the index of that of each value.

    The values are finite. If they have no more than `clusters` different ones, these are the centroids, bit for bit.

    Example:
        >>> centroids, indices = cluster_values(np.float32([1, 9, 2, 11]), clusters=2)
        >>> centroids.tolist(), indices.tolist()
        ([1.5, 10.0], [0, 1, 0, 1])

    Reference:
        Wang & Song, "Ckmeans.1d.dp", The R Journal 3/2, 2011.
    """
    ordered = np.sort(values, axis=None).astype(np.float64) + 0.0  # which makes a zero of -0.0
    distinct = np.concatenate([[0], 1 + np.flatnonzero(ordered[1:] != ordered[:-1])])
    if len(distinct) <= clusters:
        starts, centroids = distinct, ordered[distinct]
    else:
        groups = _group(ordered, distinct, max(GROUPS, 4 * clusters))
        starts = _lloyd(ordered, _best_starts(ordered, groups, clusters))
        centroids = np.add.reduceat(ordered, starts) / np.diff(starts, append=ordered.size)
    indices = np.searchsorted(ordered[starts[1:]], values, side="right")
    return centroids.astype(np.float32), indices.astype(np.uint8)


def _group(ordered: np.ndarray, distinct: np.ndarray, most: int) -> np.ndarray:
    """Returns the starts of at most this many groups of sorted values: narrow where there are many, none of them wide.

    `distinct` has the place of each different value.
    """
    if len(distinct) <= most:
        return distinct
    even = np.linspace(0, len(distinct) - 1, most // 2).astype(np.int64)
    edges = np.linspace(ordered[0], ordered[-1], most // 2)
    return np.union1d(distinct[even], np.searchsorted(ordered, edges))


def _best_starts(ordered: np.ndarray, groups: np.ndarray, clusters: int) -> np.ndarray:
    """Returns the starts of the clusters at the least cost, if no cut divides a group."""
    places = np.append(groups, ordered.size)
    centered = ordered - ordered.mean()  # or the squares would hide their differences
    sums = [_prefix_sums(each)[places] for each in (centered, centered**2)]
    counts, totals, squares = (row[None, :] - row[:, None] for row in (places, *sums))
    cost = np.where(counts > 0, squares - totals**2 / np.maximum(counts, 1), np.inf)
    best, cuts = cost[0], []
    for _ in range(clusters - 1):
        candidates = best[:, None] + cost
        cuts.append(candidates.argmin(axis=0))
        best = candidates.min(axis=0)
    starts, place = [], len(groups)
    for cut in reversed(cuts):
        place = cut[place]
        starts.append(groups[place])
    return np.array([0, *reversed(starts)])


def _lloyd(ordered: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Moves each cut to the middle between two means, until none moves."""
    sums = _prefix_sums(ordered)
    for _ in range(ROUNDS):
        ends = np.append(starts[1:], ordered.size)
        means = (sums[ends] - sums[starts]) / (ends - starts)
        moved = np.unique([0, *np.searchsorted(ordered, (means[1:] + means[:-1]) / 2)])  # no cluster is empty
        if np.array_equal(moved, starts):
            break
        starts = moved
    return starts


def _prefix_sums(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(values)])
