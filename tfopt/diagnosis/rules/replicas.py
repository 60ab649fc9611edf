"""Rules for several replicas: one that is slow, and the exchange of gradients."""

from __future__ import annotations

from tfopt.diagnosis.measured import Measured, share
from tfopt.report import Diagnosis

SLOWER, EXCHANGE = 1.2, 0.2


def slow_replica(measured: Measured) -> Diagnosis | str:
    """All replicas wait for the slowest."""
    times = measured.replica_ms
    if not times:
        return "there is one replica"
    slowest = max(times)
    others = sorted(times)[:-1]
    usual = others[len(others) // 2]
    if slowest < SLOWER * usual:
        return f"the slowest replica takes {slowest / usual:.2f} times as long as the others (threshold {SLOWER})"
    return Diagnosis(
        cause="slow_replica",
        title=f"replica {times.index(slowest)} takes {slowest / usual:.1f} times as long as the others",
        evidence=", ".join(f"replica {index} {ms:.3g} ms" for index, ms in enumerate(times))
        + f" (threshold {SLOWER} times)",
        gain=share(slowest - usual, measured.breakdown.whole_ms),
        advice="look for other work on its device, a lower clock, or longer examples in its part of the batch",
    )


def communication(measured: Measured) -> Diagnosis | str:
    """Replicas exchange gradients for a good part of the step."""
    parts = measured.breakdown
    used = share(parts.communication_ms, parts.whole_ms)
    if used < EXCHANGE:
        return f"the exchange of gradients takes {used:.1%} of the step"
    return Diagnosis(
        cause="communication",
        title="replicas exchange gradients for a good part of the step",
        evidence=f"{parts.communication_ms:.3g} of {parts.whole_ms:.3g} ms (threshold {EXCHANGE:.0%})",
        gain=used / 2,
        advice="TrainingConfig(accumulate=2) exchanges half as often; a larger batch per replica computes more between "
        "two exchanges",
        settings={"training.accumulate": 2},
        changes_training=True,
    )
