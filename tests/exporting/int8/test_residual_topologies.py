"""Fused sums: no residual topology may crash the kernel or make it compute something else than the annotated graph."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import residual_topologies

pytestmark = pytest.mark.slow

SCRIPT = Path(residual_topologies.__file__)
NAMES = [topology.__name__ for topology in residual_topologies.TOPOLOGIES]
# Fusing is the point where it is safe: a rule that fused nothing would pass every comparison.
FUSED = {
    "basic_block": 1,
    "summand_first": 1,
    "two_branches": 1,
    "two_branches_batch_norm": 1,
    "strided_projection": 1,
    "relu6_sum": 1,
    "identity_summand": 1,
    "two_sums_share_a_summand": 1,
    "long_fusion": 6,
    "squeeze_excite": 1,
    "shared_convolution": 1,
    "shared_convolution_on_both_sides": 1,
    "signed_calibrated_as_positive": 1,
    "zero_summand": 1,
    "fusioned_signed_sums": 2,
    "relu_of_float": 1,
    "sum_is_output": 1,
    "max_pool_summand": 1,
    "summand_is_pooled_twice": 1,
    "two_sums_with_equal_poolings": 2,
    "preactivation": 3,
    "preactivation_projection": 1,
    "inverted_residual": 1,
    "linear_bottlenecks": 4,
    "linear_sum_read_in_every_way": 1,
    "pooled_linear_sum": 2,
    "linear_sum_with_a_float_sum": 1,
    "dilated_block": 1,
    "causal_blocks": 2,
    "three_way": 1,
    "three_way_of_convolutions": 2,
}


# Of the largest and the mean error. What is cut off below is so one step lower than in the annotated graph, whose
# ranges are symmetric, and what reads a sum here scales such a step, or gathers many of them.
BOUNDS = {
    "preactivation": (3.0, 0.01),
    "linear_bottlenecks": (3.0, 0.015),  # four sums in a row, with weights of 7 bits
    "linear_sum_with_a_float_sum": (3.0, 0.01),
    "linear_sum_read_in_every_way": (2.0, 0.02),
}


@pytest.fixture(scope="module")
def run():
    """The topologies run in a process of their own: a wrong fused sum can end it."""
    return subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture(scope="module")
def results(run):
    return {result["name"]: result for result in map(json.loads, run.stdout.splitlines())}


def test_nothing_crashes(run, results):
    missing = [name for name in NAMES if name not in results]
    assert run.returncode == 0, f"exit code {run.returncode} in {missing[:1]}: {run.stderr[-2000:]}"
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_annotated_graph(name, results):
    """Errors are in steps of the output's range; a value on the edge of a step may round otherwise and be scaled."""
    highest, highest_mean = BOUNDS.get(name, (2.0, 0.01))
    for worst, mean in results[name]["errors"].values():
        assert worst <= highest
        assert mean <= highest_mean


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_fused_only_where_it_is_safe(name, results):
    assert results[name]["sums"] == FUSED.get(name, 0)
