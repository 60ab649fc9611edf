"""The measured tables of diagnosis: the rules, the parts of steps with known waits, and the planted causes."""

from __future__ import annotations

from page_tables import Table, read

from tfopt.diagnosis.rules.table import RULES

CLOSE = 0.3  # the share of the measured gain within which an estimate counts as close


def rules() -> Table:
    """Every rule of the diagnosis."""
    rows = []
    for rule in RULES:
        is_page = rule.source.startswith("http")
        source = f"[{rule.source.split('/')[2]}]({rule.source})" if is_page else rule.source
        rows.append([f"`{rule.cause}`", rule.threshold, rule.remedy, source])
    return [["cause", "threshold", "remedy", "source"], *rows]


def breakdown() -> Table:
    """The six runs with known waits, in milliseconds per step."""
    rows = []
    for name, run in read("breakdown")["runs"].items():
        known = ", ".join(f"{part} {ms:g}" for part, ms in run["known_ms"].items()) or "nothing"
        parts = [f"{ms:.2f}" for ms in run["parts"].values()]
        rows.append([name.replace("_", " "), known, f"{run['step_ms']:.2f}", *parts, f"{run['sum_over_step']:.2f}"])
    return [["run", "known", "step", "input", "host", "compute", "communication", "sum / step"], *rows]


def diagnosis() -> Table:
    """The planted causes: which cause is first, and the gain against the measured one."""
    rows = []
    for name, run in read("diagnosis")["planted"].items():
        gain, measured = run["gains"].get(name), run["measured_gain"]
        shown = "not on a processor" if measured is None else f"{measured:.0%}"
        rows.append([f"`{name}`", f"`{run['first']}`", "unknown" if gain is None else f"{gain:.0%}", shown])
    for name, run in read("diagnosis")["healthy"].items():
        rows.append([name.replace("_", " "), f"`{run['first']}`", "", ""])
    return [["planted", "ranked first", "estimated gain", "measured gain"], *rows]


def agreement() -> str:
    """How often the planted cause is first, and how far the estimated gain is from the measured one."""
    results = read("diagnosis")
    planted, healthy = results["planted"], results["healthy"]
    first = sum(run["first"] == name for name, run in planted.items())
    measured = {name: run for name, run in planted.items() if run["measured_gain"] is not None}
    close = [name for name, run in measured.items() if abs(run["gains"][name] / run["measured_gain"] - 1) <= CLOSE]
    wrong = sum(run["first"] in planted for run in healthy.values())
    return (
        f"The planted cause is ranked first in {first} of {len(planted)} runs, and one of these causes in {wrong} of "
        f"{len(healthy)} healthy runs.\nThe estimate is within {CLOSE:.0%} of the measured gain in {len(close)} of "
        f"{len(measured)} runs whose cause shows on a processor."
    )


TABLES = {
    "agreement": agreement,
    "rules of the diagnosis": rules,
    "known waits": breakdown,
    "planted causes": diagnosis,
}
