"""Timing in turns: the order of the turns, when they end, and the interval of the median."""

import math

from tfopt.timing import call_seconds, estimate, in_turns, seconds_of


def test_the_side_that_begins_alternates():
    order = []
    found = in_turns([lambda: order.append("a") or 1, lambda: order.append("b") or 2], most=3)
    assert "".join(order) == "abbaab"
    assert found == [[1, 1, 1], [2, 2, 2]]


def test_turns_end_as_soon_as_they_are_enough():
    values = iter(range(100))
    (found,) = in_turns([lambda: next(values)], most=50, is_enough=lambda turns: turns[-1] == [4])
    assert found == [0, 1, 2, 3, 4]


def test_an_interval_leaves_out_as_many_values_as_the_confidence_allows():
    for count in range(1, 40):
        found = estimate(list(range(count)))
        assert found.least + found.most == count - 1
        below = sum(math.comb(count, number) for number in range(found.least)) / 2**count
        assert below <= 0.025
    assert estimate(list(range(15)), confidence=0.5).least > estimate(list(range(15))).least


def test_calls_are_timed_at_least_once_and_at_most_as_often_as_asked():
    assert len(call_seconds(lambda: None, seconds=0)) == 1
    assert len(call_seconds(lambda: None, seconds=60, most=5)) == 5
    assert seconds_of(lambda: None) >= 0
