"""The search for the largest batch, the knee of the speeds, and the advice, on numbers whose answer is known."""

import tomllib
from functools import partial

import numpy as np
import pytest

from tfopt import BatchSizeConfig, BatchSizeReport, ConfigError, TrainingError
from tfopt.report import Decision
from tfopt.report.knee import contenders, is_decided, knee, ratios
from tfopt.trials.process import Outcome
from tfopt.tuning.limit import Limit, find_limit
from tfopt.tuning.memory import find_largest, on_grid
from tfopt.tuning.throughput import sizes_to_time, throughput_of, time_sizes

MB = 10**6


def failed(reason):
    return Outcome(result=None, failure=reason, seconds=1.0)


def machine(base, slope, limit, *, estimate=1.0, jump=0, replicas=1, hard=False, fail="MemoryError: it took more"):
    """Returns a trial whose memory is a straight line with a jump at 100 examples, and the list of what was run."""
    ran = []

    def run(size, estimates):
        ran.append(size)
        peak = base + slope * size + (jump if size >= 100 else 0)
        if peak > limit:
            return failed(fail)
        found = {str(each): base // 2 + estimate * slope * each for each in (1, 65)} if estimate else {}
        return Outcome(
            result={"replicas": replicas, "peak_bytes": peak, "estimates": found if estimates else {}}, seconds=1.0
        )

    return run, ran


def true_largest(base, slope, limit, jump, most):
    return max(size for size in range(1, most + 1) if base + slope * size + (jump if size >= 100 else 0) <= limit)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("estimate", [0, 0.2, 1.0, 1.6, 8.0])
@pytest.mark.parametrize(("slope", "jump"), [(MB, 0), (MB, 300 * MB), (50 * MB, 0), (MB // 50, 0), (400 * MB, 0)])
def test_the_largest_is_within_a_twentieth_in_twelve_trials(hard, estimate, slope, jump):
    base, bytes_ = 500 * MB, 2000 * MB
    limit = Limit(bytes=bytes_, margin=0.0, source="the test", hard=hard)
    run, ran = machine(base, slope, bytes_, estimate=estimate, jump=jump)
    found = find_largest(run, limit, 10**5, None, 12)
    largest = true_largest(base, slope, bytes_, jump, 10**5)
    assert 0.95 * largest <= found.per_replica_batch_size <= largest
    assert found.per_replica_batch_size in ran
    assert len(ran) <= 12
    assert on_grid(found.per_replica_batch_size) == found.per_replica_batch_size
    assert [each.per_replica_batch_size for each in found.trials] == ran


def test_a_trial_over_the_margin_does_not_fit_though_it_ended():
    limit = Limit(bytes=2000 * MB, margin=0.1, source="the test")
    run, _ = machine(500 * MB, MB, 2000 * MB)
    found = find_largest(run, limit, None, None, 12)
    assert 0.95 * 1300 <= found.per_replica_batch_size <= 1300
    assert any(each.peak_bytes is not None and not each.fits for each in found.trials)


@pytest.mark.parametrize("reason", ["it took over 300 s", "its process was killed (SIGKILL), most often by the kernel"])
def test_a_hang_and_a_kill_count_as_too_large(reason):
    run, ran = machine(0, MB, 40 * MB, fail=reason)
    found = find_largest(run, Limit(bytes=10**12, margin=0.0, source="the test"), None, None, 12)
    assert 38 <= found.per_replica_batch_size <= 40
    assert {each.reason for each in found.trials if not each.fits} == {reason}
    assert len(ran) <= 12


def test_all_examples_or_the_largest_that_was_asked_for_end_the_search():
    limit = Limit(bytes=2000 * MB, margin=0.0, source="the test")
    run, ran = machine(0, 1, 2000 * MB, replicas=2)
    found = find_largest(run, limit, 1001, None, 12)
    assert (found.per_replica_batch_size, found.global_batch_size, ran) == (500, 1000, [1, 500])
    assert found.ended_by == "all training examples fit"
    assert find_largest(run, limit, 1001, 33, 12).ended_by == "max_batch_size=33"


def test_too_few_trials_say_so():
    run, ran = machine(0, MB, 100 * MB, estimate=0)
    found = find_largest(run, Limit(bytes=100 * MB, margin=0.0, source="the test"), None, None, 2)
    assert len(ran) == 2
    assert "max_trials=2" in found.ended_by
    assert found.estimated is None
    assert found.unavailable


def test_the_first_trial_tells_want_of_memory_from_a_model_that_always_fails():
    limit = Limit(bytes=100, margin=0.0, source="the test")
    with pytest.raises(ConfigError, match="One example on each replica must fit"):
        find_largest(machine(200, 1, 10**9)[0], limit, None, None, 12)
    with pytest.raises(ConfigError, match="One example on each replica must fit"):
        find_largest(lambda *_: failed("ResourceExhaustedError: OOM when allocating"), limit, None, None, 12)
    with pytest.raises(TrainingError, match="shapes must match"):
        find_largest(lambda *_: failed("ValueError: shapes must match"), limit, None, None, 12)
    with pytest.raises(ConfigError, match=r"^A generator must have no end\.$"):
        find_largest(lambda *_: failed("ConfigError: A generator must have no end."), limit, None, None, 12)
    # A larger batch that fails for another reason is not too large.
    shapes = "InvalidArgumentError: Source shape: [16,48], dst shape: [5,59]\n" + "  at node\n" * 100
    run, ran = machine(10, 1, 300, fail=shapes)
    enough = Limit(bytes=10**6, margin=0.0, source="the test")
    with pytest.raises(TrainingError, match=r"\[5,59\] at node.* \.\.\., with \d+ examples .*max_batch_size below it"):
        find_largest(run, enough, 10**5, None, 12)
    assert len(ran) < 12
    with pytest.raises(ConfigError, match="2 examples, 4 replicas"):
        find_largest(machine(0, 1, 90, replicas=4)[0], limit, 2, None, 12)


@pytest.mark.parametrize("seed", range(5))
def test_the_knee_stands_against_noise_that_all_sizes_of_a_turn_share(seed):
    random = np.random.default_rng(seed)
    true = {size: 1000 * size / (size + 3) for size in (1, 2, 4, 8, 16, 32, 64, 128)}  # within 5% from 64 on: 955, 977
    shared, own = random.uniform(0.4, 1.0, 12), random.normal(1, 0.005, (12, len(true)))
    rates = {size: list(true[size] * shared * own[:, place]) for place, size in enumerate(true)}
    exact = min(size for size in true if true[size] >= 0.95 * max(true.values()))
    assert abs(np.log2(knee(rates) / exact)) <= 1
    assert is_decided(rates)
    assert not is_decided({size: found[:5] for size, found in rates.items()})
    assert (throughput_of(rates).knee, throughput_of(rates).undecided) == (knee(rates), ())


def test_the_knee_is_found_where_speeds_vary_by_a_twentieth():
    true = {1: 0.68, 2: 0.79, 4: 0.9, 8: 0.98, 16: 1.0, 32: 0.98}
    found = []
    for seed in range(20):
        own = np.random.default_rng(seed).normal(1, 0.05, (12, len(true)))
        found.append(knee({size: list(true[size] * own[:, place]) for place, size in enumerate(true)}))
    assert found.count(8) >= 15  # the lower end of the interval would choose 16 and more


def test_sizes_that_may_be_the_knee_get_more_turns_where_speeds_vary_by_a_tenth():
    true = {8: 0.2, 16: 0.37, 32: 0.62, 64: 0.99, 128: 0.9, 256: 1.0}  # an LSTM on two cores
    right = {False: 0, True: 0}  # within one step
    lengths = set()
    for seed in range(100):
        for decides in right:
            normal = np.random.default_rng(seed).normal
            sides = {size: partial(normal, speed, 0.1 * speed) for size, speed in true.items()}
            rates = time_sizes(sides, 12, lambda: False, decides=decides)
            right[decides] += 32 <= knee(rates) <= 128
            lengths.add((decides, len(rates[8]) <= 12, len(rates[64]) > 12, len(rates[64]) == len(rates[256])))
        assert len(time_sizes(sides, 12, lambda: True)[64]) == 1
    assert right[True] >= 90 > right[False]
    assert lengths == {(False, True, False, True), (True, True, False, True), (True, True, True, True)}


def test_sizes_that_had_fewer_turns_are_compared_with_the_same_turns_of_the_best():
    shared = [1.0, 0.5, 0.25, 0.1]  # the machine's speed in each turn
    rates = {1: [50.0, 25.0], 2: [93.0 * each for each in shared], 4: [100.0 * each for each in shared]}
    assert {size: found.median for size, found in ratios(rates).items()} == pytest.approx({1: 0.5, 2: 0.93, 4: 1.0})
    assert contenders(rates) == [4]
    found = throughput_of(rates)
    assert (found.knee, found.turns) == (4, 4)


def test_powers_of_two_and_the_largest_are_timed():
    assert sizes_to_time(200) == [1, 2, 4, 8, 16, 32, 64, 128, 200]
    assert sizes_to_time(130)[-1] == 128


def test_a_report_prints_and_goes_through_json():
    run, _ = machine(0, MB, 100 * MB)
    found = BatchSizeReport(
        name="a",
        memory=find_largest(run, Limit(bytes=100 * MB, margin=0.0, source="the test"), 10_000, None, 12),
        throughput=throughput_of({4: [80.0, 93.0], 8: [92.0, 97.0], 16: [99.0, 99.0], 32: [100.0, 100.0]}),
        settings={"global_batch_size": 512, "accumulate": 8},
        decisions=(Decision(setting="accumulate", value="8", reason="memory"),),
        unavailable={"noise_scale": "not measured"},
    )
    again = BatchSizeReport.from_json(found.to_json())
    assert again == found
    assert str(again) == str(found)
    assert tomllib.loads(found.to_toml()) == {"training": {"global_batch_size": 512, "accumulate": 8}}
    for words in (
        "largest batch",
        "knee",
        "16, the smallest",
        "that it is 8\n",
        "noise scale",
        "unavailable (not measured)",
    ):
        assert words in str(found)
    with pytest.raises(ConfigError, match="must be the JSON of a BatchSizeReport"):
        BatchSizeReport.from_json("{}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_limit_bytes": 0}, "memory_limit_bytes must be"),
        ({"margin": 1.0}, "margin must be"),
        ({"max_trials": 13}, "max_trials must be"),
        ({"trial_limit_s": 0.0}, "trial_limit_s must be"),
        ({"hard": True}, "memory_limit_bytes must be given with hard=True"),
    ],
)
def test_bad_budgets_are_errors_at_once(settings, message):
    with pytest.raises(ConfigError, match=message):
        BatchSizeConfig(**settings)


def test_the_limit_of_a_process_counts(fresh_python):
    code = """
import resource
resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**30, resource.RLIM_INFINITY))
from tfopt.tuning.limit import find_limit
found = find_limit(None, 0.1, hard=False)
print(found.source, found.bytes <= 3 * 2**30, found.hard)
"""
    output = fresh_python("-c", code, check=True).stdout
    assert output.split()[1] == "True"
    free = find_limit(None, 0.0, hard=False)
    assert free.bytes > 0
    assert find_limit(10**9, 0.1, hard=True).size == "data"
    if free.bytes > 3 * 2**30:
        assert output.split() == ["RLIMIT_DATA", "True", "True"]
