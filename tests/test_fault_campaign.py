"""A part of the fault campaign: damaged files, numbers, strangers' files, signals, and two of a thing at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from campaign import planted, results
from campaign.fault import EQUAL, TRACEBACK, Row

CAMPAIGN = Path(__file__).parents[1] / "benchmarks" / "fault_campaign.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only", "share"),
    [
        ("files: the newest", 0.1),
        ("files: schema.json", 0.1),
        ("files: a worker's timeline", 0.2),
        ("untrusted", 0.2),
        ("disk: a checkpoint", 0.3),
        ("memory: a checkpoint", 0.8),
        ("environment: tfopt --help", 0.6),
        ("signals: export", 0.02),
        ("signals: fit with checkpoints", 0.015),
        ("concurrency: two exports", 0.4),
        ("concurrency: two caches", 0.4),
    ],
)
def test_no_fault_is_silent_hangs_or_ends_in_a_traceback(only, share, tmp_path):
    out = tmp_path / "found.json"
    words = [sys.executable, CAMPAIGN, "--only", only, "--share", share, "--out", out]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["rows"] > (10 if only.startswith(("files", "untrusted")) else 1)
    known = {
        each["how"]
        for each in json.loads((CAMPAIGN.parent / "results" / "fault_campaign.json").read_text())["faults"]
        if "detail" in each
    }
    assert [each for each in found["faults"] if "detail" in each and each["how"] not in known] == []


def test_the_guards_that_are_removed_are_in_tfopt():
    assert planted.outdated() == []


def row(kind, part, how, outcome=EQUAL):
    return Row(kind=kind, part=part, how=how, must="equal bits, or a clear word", outcome=outcome, detail="at /a/b.py")


def test_a_run_of_one_kind_replaces_that_kind_alone():
    first = [row("files", "a", "cut 1"), row("files", "a", "cut 2"), row("numbers", "fit", "NaN")]
    earlier = results.merged({}, results.content_of(first, {"files": 0.3, "numbers": 1.0}), whole=["files", "numbers"])
    again = results.content_of([row("files", "a", "cut 3", TRACEBACK)], {"files": 0.5})
    both = results.merged(earlier, again, whole=["files"])
    assert [(each["kind"], each["how"]) for each in both["faults"]] == [("files", "cut 3"), ("numbers", "NaN")]
    assert (both["rows"], both["bad"]) == (2, 1)
    assert both["kinds"]["files"]["share"] == 0.5
    assert both["kinds"]["files"]["outcomes"] == {TRACEBACK: 1}
    assert list(both["kinds"]) == ["files", "numbers"]
    assert both["kinds"]["numbers"] == earlier["kinds"]["numbers"]
    assert results.of_kinds(["numbers"], both)["faults"] == earlier["faults"][2:]
    parts = [results.content_of([each], {"files": 0.3, "numbers": 1.0}) for each in first]
    assert results.joined(parts)["faults"] == earlier["faults"]


def test_a_part_is_replaced_fault_by_fault_and_with_the_share_of_the_rest():
    first = [row("files", "a", "cut 1", TRACEBACK), row("files", "b", "cut 1")]
    earlier = results.content_of(first, {"files": 0.3})
    mended = results.content_of([row("files", "a", "cut 1")], {"files": 0.3})
    found = results.merged(earlier, mended, whole=[])
    assert (found["rows"], found["bad"], found["kinds"]["files"]["outcomes"]) == (2, 0, {EQUAL: 2})
    with pytest.raises(SystemExit, match=r"share 0\.3"):
        results.merged(earlier, results.content_of([row("files", "a", "cut 1")], {"files": 1.0}), whole=[])
