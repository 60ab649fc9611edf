"""Which of several models a benchmark names, from given times."""

import pytest

from tfopt.report import BenchmarkedModel, CallTimes
from tfopt.report.benchmark import fitting_names
from tfopt.report.ranking import judged, share_of

SETTINGS = {"device": "a processor", "cores": 2, "batch_sizes": (1,), "rounds": 9, "seconds": 0.1}


def times(rounds, threads=0):
    median = sorted(rounds)[len(rounds) // 2]
    return CallTimes(
        batch_size=1,
        threads=threads,
        calls=90,
        latency_ms_median=median,
        latency_ms_p90=median,
        latency_ms_p99=median,
        examples_per_s=1e3 / median,
        round_ms=tuple(rounds),
    )


def model(name, *measured, size=100, share=None, failure=""):
    return BenchmarkedModel(
        name=name,
        path=name,
        format="onnx",
        bytes_on_disk=size,
        gzip_bytes=size,
        times=measured,
        score_share=share,
        failure=failure,
    )


def judge(*models, gate=None, threads=(0,)):
    return judged(models, **SETTINGS, threads=threads, gate=gate, baseline="a")


def test_the_faster_one_is_named_although_one_round_of_nine_was_disturbed():
    found = judge(model("a", times([10.0] * 9)), model("b", times([9.0] * 8 + [40.0])))
    assert (found.fastest[0].model, found.fastest[0].about_even) == ("b", ())


@pytest.mark.parametrize("other", [[9.8] * 9, [9.0, 11.0] * 4 + [9.0]])
def test_a_small_or_an_uncertain_difference_has_no_winner(other):
    found = judge(model("a", times([10.0] * 9)), model("b", times(other)), model("c", times([30.0] * 9)))
    assert found.fastest[0].model is None
    assert found.fastest[0].about_even == ("b", "a")
    assert "no clear winner: b, a" in str(found)


def test_threads_are_named_only_if_they_matter():
    one, two = times([10.0] * 9, threads=1), times([10.1] * 9, threads=2)
    found = judge(model("a", one, two), model("b", times([20.0] * 9, threads=1)), threads=(1, 2))
    assert (found.fastest[0].model, found.fastest[0].threads) == ("a", None)
    found = judge(model("a", one, times([20.0] * 9, threads=2)), threads=(1, 2))
    assert str(found.fastest[0]) == "a on 1 thread, 10.000 ms"


def test_the_smallest_one_has_a_warning_if_a_larger_one_is_faster():
    small, large = model("a", times([10.0] * 9), size=1000), model("b", times([5.0] * 9), size=4000)
    found = judge(small, large)
    assert (found.smallest, found.fastest[0].model) == ("a", "b")
    assert found.warnings == ("batch 1: a is the smallest, but takes 2x the time of b",)
    assert judge(small, model("b", times([9.9] * 9), size=4000)).warnings == ()


def test_nothing_below_the_gate_is_named():
    best, fast = model("a", times([10.0] * 9), size=400, share=1.0), model("b", times([1.0] * 9), share=0.985)
    assert (judge(best, fast).fastest[0].model, judge(best, fast).smallest) == ("b", "b")
    found = judge(best, fast, gate=0.99)
    assert (found.fastest[0].model, found.smallest) == ("a", "a")
    found = judge(fast, model("c", times([1.0] * 9)), gate=0.99)  # the score of c is unknown
    assert (found.fastest, found.smallest) == ((), None)
    assert "no model reaches the gate" in str(found)


def test_a_failed_model_is_not_named():
    found = judge(model("a", times([10.0] * 9)), model("b", times([1.0] * 9), failure="it crashed"))
    assert (found.fastest[0].model, found.smallest, found.ok) == ("a", "a", False)


def test_of_errors_less_is_better():
    assert share_of(2.0, 1.98, higher_is_better=False) == 0.99
    assert share_of(0.0, 1.98, higher_is_better=False) is None
    assert share_of(-1.0, -1.0, higher_is_better=True) is None


def test_long_names_keep_the_table_within_100_columns_and_stay_distinct():
    names = [f"experiments/of_the_same_long_name_{part}/int8_with_all_layers/model.onnx" for part in "abc"]
    found = judge(*(model(name, times([10.0] * 9)) for name in names))
    assert max(map(len, str(found).splitlines())) <= 100
    assert len({*fitting_names(names, 20).values()}) == 3
