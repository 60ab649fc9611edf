"""The power is cut while something is written: what had not been flushed to the disk is gone.

A file system may write the new name of a file to the disk before the file's content. So after a cut, each file that was
not flushed (fsync) since its last change is empty here, whatever its name. The cut comes after each flush and each
renaming in turn, or after the call has returned.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from campaign.fault import Fault, digest, make_template

KIND = "power"
CALLS = ("fsync", "rename", "replace")
WHOLE = "what is there is whole, earlier or new, and can be written again"
LIMIT_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Written:
    """Something that is written in the place of an earlier one.

    Attributes:
        part: Its name in the table.
        write: Writes it with a word in it, "earlier" or "new".
        read: Returns that word; anything else, or an error, if what is there is not whole.
        goes_on: Whether there is no earlier one, and the next call goes on where the cut was.
    """

    part: str
    write: Callable[[Path, str], Any]
    read: Callable[[Path], Any]
    goes_on: bool = False


def _export(**settings: Any) -> Callable[[Path, str], None]:
    def write(place: Path, word: str) -> None:
        import keras

        import tfopt

        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)], name=word)
        tfopt.export(model, place / "model", tfopt.ExportConfig(**settings))

    return write


def _read_artifact(place: Path) -> str:
    from tfopt.exporting.manifest import read_intact_manifest

    return read_intact_manifest(place / "model").model


def _values(word: str) -> np.ndarray:
    return np.arange(40.0, dtype="float32").reshape(20, 2) + len(word)


def _word(values: np.ndarray) -> str | None:
    return next((word for word in ("earlier", "new") if np.array_equal(values, _values(word))), None)


def _save_checkpoint(place: Path, word: str) -> None:
    from tfopt.training.checkpointing.store import CheckpointStore

    store = CheckpointStore(place / "checkpoints")
    store.save({"earlier": 1, "new": 2}[word], {"w": _values(word)}, {"epoch": 1})


def _load_checkpoint(place: Path) -> str | None:
    from tfopt.training.checkpointing.store import CheckpointStore

    found = CheckpointStore(place / "checkpoints").load_newest()
    return found and _word(found.arrays["w"])


def _convert(place: Path, word: str) -> None:
    from tfopt.data import arrays, convert

    convert(arrays(_values(word), np.arange(20) % 2), place / "records")


def _read_records(place: Path) -> str | None:
    from tfopt.data.files.tfrecord import tfrecord

    examples = tfrecord(directory=place / "records")
    parts = [examples.decoded(part).as_numpy_iterator() for part in ("train", "test")]
    rows = np.stack([x for part in parts for x, _ in part])
    return _word(rows[np.argsort(rows[:, 0])])


def _save_report(place: Path, word: str) -> None:
    from tfopt.report import DiagnosisReport, StepBreakdown
    from tfopt.reporting.saved_report import save_report

    breakdown = StepBreakdown(step_ms=10, input_ms=6, host_ms=1, compute_ms=3, steps=100, batch_size=32)
    save_report(DiagnosisReport(name=word, breakdown=breakdown, diagnoses=[]), place)


def _read_report(place: Path) -> str:
    from tfopt.reporting.saved_report import load_report

    return load_report(place).recipe


WRITTEN = (
    Written(part="a SavedModel", write=_export(), read=_read_artifact),
    Written(part="an ONNX artifact", write=_export(format="onnx"), read=_read_artifact),
    Written(part="a LiteRT artifact", write=_export(format="litert"), read=_read_artifact),
    Written(part="a checkpoint", write=_save_checkpoint, read=_load_checkpoint),
    Written(part="a diagnosis", write=_save_report, read=_read_report),
    Written(part="records", write=_convert, read=_read_records, goes_on=True),
)


def faults(work: Path, *, share: float = 1.0, only: str = "") -> Iterator[Fault]:
    """Yields a cut after each flush and each renaming of each writer, and one after its end."""
    for number, written in enumerate(WRITTEN):
        if only and only not in f"{KIND}: {written.part}":
            continue
        template, counted = work / f"power-{number}", work / f"power-{number}-counted"
        template.mkdir(parents=True)
        if not written.goes_on:
            make_template(written.part, partial(written.write, template, "earlier"), template.with_suffix(".log"))
        shutil.copytree(template, counted)
        calls = _until_cut(written, counted)
        for call in range(1, calls + 1):
            if call * share % 1 < share:
                yield _fault(written, template, call, f"after call {call} of {calls}")
        yield _fault(written, template, None, "after the end")


def _fault(written: Written, template: Path, call: int | None, how: str) -> Fault:
    def act(place: Path) -> Any:
        _until_cut(written, place, call)
        found = [] if written.goes_on else [written.read(place)]
        if found == ["earlier"] and call is not None:
            found = ["new"]
        written.write(place, "new")
        return [*found, written.read(place)]

    return Fault(
        kind=KIND,
        part=written.part,
        how=how,
        act=act,
        template=template,
        expected=digest(["new"] if written.goes_on else ["new", "new"]),
        must=WHOLE,
        keeps=False,
        limit_s=LIMIT_S,
    )


def _until_cut(written: Written, place: Path, call: int | None = None) -> int:
    """Writes in a process that ends after a call of the system, and empties what it has not flushed.

    Returns: The number of the calls.
    """
    calls = place.with_suffix(".calls")

    def write() -> None:
        flushed = {_content(path) for path in _files(place)}
        made = 0

        def watched(name: str) -> Callable[..., Any]:
            original = getattr(os, name)

            def call_it(*arguments: Any, **settings: Any) -> Any:
                nonlocal made
                result = original(*arguments, **settings)
                if name == "fsync":
                    flushed.add(_content(arguments[0]))
                made += 1
                if made == call:
                    cut()
                return result

            return call_it

        def cut() -> None:
            for path in _files(place):
                if _content(path) not in flushed:
                    os.truncate(path, 0)
            calls.write_text(str(made))
            os._exit(0)

        for name in CALLS:
            setattr(os, name, watched(name))  # in this process, which ends here
        written.write(place, "new")
        cut()

    make_template(written.part, write, place.with_suffix(".writing"))
    return int(calls.read_text())


def _files(place: Path) -> list[Path]:
    return [path for path in sorted(place.rglob("*")) if path.is_file() and not path.is_symlink()]


def _content(file: Path | int) -> tuple[int, int, int]:
    """Returns what a file has as long as nothing is written to it."""
    status = os.stat(file)  # noqa: PTH116 - of an open file too
    return status.st_ino, status.st_size, status.st_mtime_ns
