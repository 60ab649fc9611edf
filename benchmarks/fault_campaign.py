"""Makes faults on purpose, and writes what tfopt made of each to results/fault_campaign.json; docs/reliability.md.

python benchmarks/fault_campaign.py                       all faults
python benchmarks/fault_campaign.py --only "a recipe"     those whose kind or part has these words; nothing is written
python benchmarks/fault_campaign.py --share 0.1           a tenth of those that are drawn; nothing is written
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from campaign import files, strangers, values
from campaign.fault import GOOD, Fault, Row, as_rows, try_out

OUT = Path(__file__).parent / "results" / "fault_campaign.json"
KINDS = (files, values, strangers)


def run(work: Path, *, share: float = 1.0, only: str = "", kinds: Sequence = KINDS, verbose: bool = False) -> list[Row]:
    """Tries out all faults of some kinds one after the other, and returns the outcomes."""
    rows: list[Row] = []
    for fault in _faults(work, share, only, kinds):
        started = time.monotonic()
        row = try_out(fault, work / "place")
        rows.append(row)
        seconds = time.monotonic() - started
        if verbose and (not row.is_good or seconds > 10):
            print(f"{row.outcome:<10} {row.kind}, {row.part}: {row.how} [{seconds:.1f} s] {row.detail}", flush=True)
    return rows


def _faults(work: Path, share: float, only: str, kinds: Sequence) -> Iterator[Fault]:
    for kind in kinds:
        if not only or only.partition(":")[0] in (kind.KIND, only):
            yield from kind.faults(work, share=share, only=only)


def import_all() -> None:
    """Imports what trials use, so that their forks need not; none of it is used here."""
    import importlib

    for name in ("keras", "tensorflow", "onnx", "openvino", "optuna", "pyarrow.parquet", "PIL.Image", "pandas"):
        importlib.import_module(name)
    for name in ("ai_edge_litert.interpreter", "ai_edge_litert.schema_py_generated", "sklearn.datasets", "tf2onnx"):
        importlib.import_module(name)
    import tfopt

    for name in tfopt.__all__:
        getattr(tfopt, name)
    for name in ("saved_model", "onnx", "litert", "openvino"):
        importlib.import_module(f"tfopt.exporting.inspection.{name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    import_all()
    work = Path(tempfile.mkdtemp(prefix="campaign-"))
    try:
        rows = run(work, share=options.share, only=options.only, verbose=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    counts = collections.Counter(row.outcome for row in rows)
    print(f"{len(rows)} faults in {time.monotonic() - started:.0f} s: {dict(counts)}")
    if options.out or (not options.only and options.share == 1):
        write(rows, options.out or OUT)


def write(rows: Sequence[Row], out: Path) -> None:
    from tfopt.atomic.files import write_text
    from tfopt.hardware import detect

    counts = {
        kind: dict(collections.Counter(row.outcome for row in rows if row.kind == kind))
        for kind in dict.fromkeys(row.kind for row in rows)
    }
    content = {
        "device": detect().cpu_model,
        "rows": len(rows),
        "bad": sum(not row.is_good for row in rows),
        "kinds": counts,
        "faults": [_published(row) for row in as_rows(rows)],
    }
    write_text(out, json.dumps(content, indent=0) + "\n")


def _published(row: dict[str, str]) -> dict[str, str]:
    """Returns a row without the paths of this machine; the words of an outcome only where it is not a good one."""
    detail = "" if row["outcome"] in GOOD else re.sub(r"/[^\s'\"]*/", "", row["detail"])
    return {**row, "detail": detail} if detail else {name: row[name] for name in row if name != "detail"}


if __name__ == "__main__":
    main()
