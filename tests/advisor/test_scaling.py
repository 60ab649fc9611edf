"""The scaling model against arithmetic, and its recorded predictions against the model of today."""

import itertools
import json
from pathlib import Path

import pytest
import scaling

from tfopt.advisor import LINKS, Hosts, Link, link_inside, scale
from tfopt.errors import ConfigError
from tfopt.hardware import find_card

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FAST = Link(name="fast", bytes_per_s=100e9, latency_s=0.0, reached=1.0)
SLOW = Link(name="slow", bytes_per_s=1e9, latency_s=0.0, reached=1.0)
SIZE = 10**9


def test_a_ring_sends_each_part_around_twice():
    cluster = Hosts(inside=SLOW, between=SLOW, gpus_per_host=1024)
    for gpus in (2, 4, 8, 1000):
        assert cluster.all_reduce_s(SIZE, gpus) == pytest.approx(2 * (gpus - 1) / gpus)
    slow_start = Link(name="late", bytes_per_s=1e9, latency_s=1e-3, reached=1.0)
    assert Hosts(inside=slow_start, between=SLOW).all_reduce_s(SIZE, 8) == pytest.approx(2 * 7 / 8 + 14e-3)


def test_the_hierarchy_uses_the_fast_links_and_the_ring_waits_for_the_slow_one():
    hierarchy, ring = (Hosts(inside=FAST, between=SLOW, algorithm=name) for name in ("hierarchical", "ring"))
    assert hierarchy.all_reduce_s(SIZE, 8) == ring.all_reduce_s(SIZE, 8) == pytest.approx(2 * 7 / 8 / 100)
    assert hierarchy.all_reduce_s(SIZE, 32) == pytest.approx(2 * 7 / 8 / 100 + 2 * 3 / 4)
    assert ring.all_reduce_s(SIZE, 32) == pytest.approx(2 * 31 / 32)
    assert Hosts(inside=FAST, between=SLOW, gpus_per_host=1).all_reduce_s(SIZE, 4) == pytest.approx(2 * 3 / 4)


def test_one_gpu_sums_nothing():
    step = scale(0.1, 32, SIZE, Hosts(inside=FAST, between=SLOW, coordination_s=1.0), gpus=(1,)).steps[0]
    assert (step.step_ms, step.all_reduce_ms, step.efficiency) == (pytest.approx(100), 0, 1)
    assert step.examples_per_s == pytest.approx(320)


def test_the_sum_hides_behind_the_backward_pass_but_for_its_last_bucket():
    def exposed(overlap, compute):
        cluster = Hosts(inside=SLOW, between=SLOW, overlap=overlap)
        return scale(compute, 1, 100_000_000, cluster, gpus=(2,)).steps[0].exposed_ms

    assert exposed(0.0, 0.06) == pytest.approx(100)  # 2 * 1/2 * 100 MB at 1 GB/s
    assert exposed(1.0, 0.06) == pytest.approx(60)  # less two thirds of 60 ms
    assert exposed(1.0, 10.0) == pytest.approx(25)  # a bucket of 25 MB


def test_devices_that_share_cores_compute_in_turns():
    cluster = Hosts(inside=FAST, between=FAST, shared_cores=True)
    steps = scale(0.1, 32, 0, cluster, gpus=(1, 2, 4)).steps
    assert [step.step_ms for step in steps] == pytest.approx([100, 200, 400])
    assert [step.examples_per_s for step in steps] == pytest.approx([320, 320, 320])


def test_faster_links_scale_better_and_more_gpus_never_better():
    for card in ("A100", "L4"):
        efficiencies = []
        for network in ("ethernet_10", "ethernet_25", "ethernet_100", "infiniband_8x200"):
            cluster = Hosts(inside=link_inside(find_card(card)), between=LINKS[network])
            steps = scale(0.1, 256, 102_000_000, cluster, gpus=(1, 8, 64, 512, 1024)).steps
            assert all(one.efficiency >= other.efficiency for one, other in itertools.pairwise(steps))
            efficiencies.append(steps[-1].efficiency)
        assert efficiencies == sorted(efficiencies)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlap": 1.5}, r"overlap must be in \[0, 1\]"),
        ({"gpus_per_host": 0}, "gpus_per_host"),
        ({"algorithm": "x"}, "x"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Hosts(inside=FAST, between=SLOW, **settings)


def test_wrong_arguments_are_refused():
    cluster = Hosts(inside=FAST, between=SLOW)
    with pytest.raises(ConfigError, match="gpus must be numbers from 1"):
        scale(0.1, 1, 1, cluster, gpus=(0, 8))
    with pytest.raises(ConfigError, match="compute_s must be positive"):
        scale(0.0, 1, 1, cluster)


def test_the_recorded_predictions_are_those_of_the_model():
    recorded = json.loads((BENCHMARKS / "results" / "scaling.json").read_text())
    assert [scaling.predict(run) for run in scaling.PUBLISHED] == recorded["published"]
    assert scaling.ethernet() == recorded["ethernet"]
    for cell in recorded["here"]:
        assert cell["error"] == pytest.approx(cell["predicted_ms"] / cell["measured_ms"] - 1, abs=2e-3)
