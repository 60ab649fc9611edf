"""A part of the fault campaign: every kind of file is damaged, and numbers and strangers' files are tried."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[1] / "benchmarks" / "fault_campaign.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only", "share"),
    [("files: the newest", 0.1), ("files: schema.json", 0.1), ("files: a worker's timeline", 0.2), ("untrusted", 0.2)],
)
def test_no_fault_is_silent_hangs_or_ends_in_a_traceback(only, share, tmp_path):
    out = tmp_path / "found.json"
    words = [sys.executable, CAMPAIGN, "--only", only, "--share", share, "--out", out]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["rows"] > 10
    known = {
        each["how"]
        for each in json.loads((CAMPAIGN.parent / "results" / "fault_campaign.json").read_text())["faults"]
        if "detail" in each
    }
    assert [each for each in found["faults"] if "detail" in each and each["how"] not in known] == []
