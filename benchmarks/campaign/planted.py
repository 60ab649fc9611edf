"""Removes one guard of tfopt after the other, in a copy of it: the campaign must find each.

A campaign that finds nothing shows little, unless it is known to find what is wrong. Each guard here is a line or two
of the source that is replaced; then a part of the campaign runs with that copy.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CAMPAIGN = ROOT / "benchmarks" / "fault_campaign.py"
LIMIT_S = 900


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A guard, how it is removed, and the part of the campaign that must find that.

    Attributes:
        name: What the guard does.
        file: Its file below tfopt/.
        old: The source with it, which the file holds once.
        new: The source without it.
        only: The part of the campaign, as `--only` names it.
        share: The share of its faults.
    """

    name: str
    file: str
    old: str
    new: str
    only: str
    share: float = 1.0


GUARDS = (
    Guard(
        name="an earlier file stays until the new one is whole",
        file="atomic/files.py",
        old='        with temporary.open("xb") as file:\n',
        new='        path.unlink(missing_ok=True)\n        with temporary.open("xb") as file:\n',
        only="power: a diagnosis",
    ),
    Guard(
        name="a file is flushed before it gets its name",
        file="atomic/files.py",
        old="            _flush(file.fileno())\n",
        new="",
        only="power: a checkpoint",
    ),
    Guard(
        name="an artifact is flushed before it gets its name",
        file="atomic/directories.py",
        old='for path in [*new.rglob("*"), new]:',
        new="for path in [new]:",
        only="power: an ONNX artifact",
    ),
    Guard(
        name="an artifact replaces the earlier one in one step",
        file="atomic/directories.py",
        old="                _publish(new, final, work / OLD)\n",
        new="                shutil.rmtree(final, ignore_errors=True)\n"
        "                flush_to_disk(final.parent)\n                new.rename(final)\n",
        only="power: an ONNX artifact",
    ),
    Guard(
        name="one run at a time writes to a directory",
        file="atomic/directories.py",
        old="            held = hold(descriptor, directory)\n",
        new="            held = True\n",
        only="concurrency: two conversions",
    ),
    Guard(
        name="a fork of a process that has used TensorFlow is refused",
        file="compat/forks.py",
        old="    if _forked_from is not None:\n        raise",
        new="    if False:\n        raise",
        only="concurrency: fit in a fork after a fit",
    ),
    Guard(
        name="the manifest has a checksum",
        file="exporting/manifest.py",
        old="if problem is None and not is_as_written(content):",
        new="if False:",
        only="files: manifest.json",
        share=0.2,
    ),
    Guard(
        name="each file of an artifact has a checksum",
        file="exporting/manifest.py",
        old="if found_record != recorded:",
        new="if found_record.bytes != recorded.bytes:",
        only="files: saved_model.pb of an artifact",
    ),
    Guard(
        name="a manifest of a newer format is refused",
        file="exporting/manifest.py",
        old='content.get("format") not in formats or',
        new="",
        only="files: manifest.json",
        share=0.1,
    ),
    Guard(
        name="each member of a checkpoint has a checksum",
        file="training/checkpointing/store.py",
        old="contents[info.filename] = archive.read(info)",
        new="member = archive.open(info)\n"
        "        member._expected_crc = None\n        contents[info.filename] = member.read()",
        only="files: the newest of three checkpoints",
        share=0.3,
    ),
    Guard(
        name="what tfopt writes as JSON has a checksum",
        file="atomic/checked_json.py",
        old="    return bool(document[CHECKSUM] ==",
        new="    return bool(True or document[CHECKSUM] ==",
        only="files: a time table",
    ),
    Guard(
        name="the schema of records has a checksum",
        file="data/records/schema.py",
        old="if CHECKSUM not in content or not is_as_written(content):",
        new="if False:",
        only="files: schema.json of records",
    ),
    Guard(
        name="a pipe in the place of a file is not waited for",
        file="atomic/files.py",
        old='os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # opening a pipe does not wait either\n'
        "        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):",
        new='os.O_RDONLY), "rb") as file:\n        if False:',
        only="files: manifest.json, inspected",
    ),
    Guard(
        name="ops that touch files are refused",
        file="graph/unsafe_ops.py",
        old="found = list(dict.fromkeys(found))",
        new="found = []",
        only="untrusted: a SavedModel",
    ),
    Guard(
        name="a .keras file is read in Keras' safe mode",
        file="graph/keras_file.py",
        old="safe_mode=not trusted)",
        new="safe_mode=False)",
        only="untrusted: a .keras file",
    ),
    Guard(
        name="a recipe names no code",
        file="recipe/recipe.py",
        old="        if not allow_code:\n            check_no_code(values)\n        values =",
        new="        values =",
        only="untrusted: a recipe",
    ),
    Guard(
        name="pickles hold nothing but arrays",
        file="data/sources/known_sets.py",
        old="if (module, name) not in ARRAY_NAMES:",
        new="if False:",
        only="untrusted: CIFAR's archive",
    ),
    Guard(
        name="huge images are refused",
        file="data/files/image_files.py",
        old="if width * height > MOST_PIXELS:",
        new="if False:",
        only="untrusted: an image",
    ),
    Guard(
        name="weights must be finite to be pruned",
        file="pruning/weights.py",
        old="if not np.isfinite(values).all():",
        new="if False:",
        only="numbers: prune",
    ),
    Guard(
        name="data must be finite",
        file="data/in_memory.py",
        old="    if check_finite:\n        check_all_finite(_named(x, y))\n",
        new="",
        only="numbers: data.arrays",
    ),
    Guard(
        name="infinite weights are told at export",
        file="exporting/parity.py",
        old="        _warn_of_infinite_weights(source, outputs[SOURCE])\n",
        new="",
        only="numbers: export in float32",
    ),
)


def main(work: Path, only: str, out: Path) -> None:
    """Records what the campaign makes of each removed guard whose name has the words `only`; the others stay."""
    from tfopt.atomic.files import write_text

    if outdated():
        raise SystemExit(f"tfopt holds what is removed not once: {'; '.join(outdated())}. Write these guards anew.")
    found = {each["guard"]: each for each in json.loads(out.read_text())["guards"]} if only and out.exists() else {}
    for guard in GUARDS:
        if only in guard.name:
            found[guard.name] = _without(guard, work / "copy")
            print(json.dumps(found[guard.name]), flush=True)
    guards = [found[guard.name] for guard in GUARDS if guard.name in found]
    content = {"removed": len(guards), "found": sum(bool(each["found"]) for each in guards), "guards": guards}
    write_text(out, json.dumps(content, indent=2) + "\n")


def outdated() -> list[str]:
    """Returns the names of the guards whose source tfopt does not hold, or more than once."""
    return [guard.name for guard in GUARDS if (ROOT / "tfopt" / guard.file).read_text().count(guard.old) != 1]


def _without(guard: Guard, copy: Path) -> dict[str, Any]:
    shutil.copytree(ROOT / "tfopt", copy / "tfopt", ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / "tfopt" / guard.file
    file.write_text(file.read_text().replace(guard.old, guard.new))
    found = _campaign(guard, copy)
    shutil.rmtree(copy)
    bad = [each for each in found["faults"] if "detail" in each]
    outcomes = sorted({each["outcome"] for each in bad})
    return {"guard": guard.name, "part": guard.only, "faults": found["rows"], "found": len(bad), "as": outcomes}


def _campaign(guard: Guard, copy: Path) -> Any:
    out = copy / "found.json"
    words = [sys.executable, str(CAMPAIGN), "--only", guard.only, "--share", str(guard.share), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"The campaign ended without the guard that {guard.name}: {done.stderr[-2000:]}")
    return json.loads(out.read_text())
