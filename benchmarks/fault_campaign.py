"""Makes faults on purpose, and writes what tfopt made of each to results/fault_campaign.json; docs/reliability.md.

python benchmarks/fault_campaign.py                       all faults, recorded
python benchmarks/fault_campaign.py --only files          one kind, recorded in place of its earlier outcomes
python benchmarks/fault_campaign.py --only "a recipe"     those whose part has these words; nothing is recorded
python benchmarks/fault_campaign.py --share 0.1           a tenth of those that are drawn; nothing is recorded
--record                                                  records these too: a kind's share stands in the results
--out FILE                                                records in another file, which is written anew
--merge FILE...                                           tries nothing, and records the kinds that such files hold
--planted                                                 removes one guard after the other, which must be found;
                                                          recorded in results/planted_guards.json
"""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from campaign import concurrency, disk, environment, files, memory, planted, power, results, signals, strangers, values
from campaign.fault import Fault, Row, try_out

OUT = Path(__file__).parent / "results" / "fault_campaign.json"
PLANTED = OUT.with_name("planted_guards.json")
KINDS = [
    files,
    power,
    values,
    strangers,
    disk,
    memory,
    environment,
    signals,
    concurrency,
]


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--merge", type=Path, nargs="+")
    parser.add_argument("--planted", action="store_true")
    options = parser.parse_args()
    whole = [kind.KIND for kind in KINDS if options.only in ("", kind.KIND)]
    if options.merge:
        found = results.of_kinds(whole, results.joined(map(results.read, options.merge)))
        results.write(results.merged(results.read(OUT), found, whole=found["kinds"]), OUT)
        return
    work = Path(tempfile.mkdtemp(prefix="campaign-"))
    try:
        if options.planted:
            planted.main(work, options.only, options.out or PLANTED)
            return
        started = time.monotonic()
        import_all()
        rows = run(work, share=options.share, only=options.only, verbose=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    counts = collections.Counter(row.outcome for row in rows)
    print(f"{len(rows)} faults in {time.monotonic() - started:.0f} s: {dict(counts)}")
    found = results.content_of(rows, {kind.KIND: options.share for kind in KINDS})
    if options.out:
        results.write(found, options.out)
    elif options.record or (whole and options.share == 1):
        results.write(results.merged(results.read(OUT), found, whole=whole), OUT)


if __name__ == "__main__":
    main()
