"""What a server should set, in the manifest of an artifact: how it gets there, and whether it holds on this machine."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from tfopt.atomic.checked_json import with_checksum
from tfopt.atomic.directories import MARK, staged_directory
from tfopt.errors import ArtifactError, ExportError
from tfopt.exporting.manifest import MANIFEST_FORMAT, Manifest, read_intact_manifest
from tfopt.hardware import detect
from tfopt.report import ManyRequests, TunedServing

TUNE_HERE = "run tfopt tune here"


def write_tuned(path: Path, measured: Manifest, tuned: TunedServing) -> None:
    """Writes the settings into the manifest of an artifact. Its other files stay the same files.

    A new directory of hard links takes the place of the artifact in one step, so it is whole and intact at all times,
    also after a kill. A temporary file in the artifact itself would be one that its manifest does not list.

    Args:
        path: The artifact's directory.
        measured: Its manifest when it was measured.
        tuned: The settings.
    Raises:
        ArtifactError: The artifact has changed since it was measured, or is damaged.
        ExportError: The directory cannot be written.
    """
    place = path.resolve()  # a link to it stays
    if read_intact_manifest(place) != measured:
        raise ArtifactError(
            f"The artifact must be the one that was measured. Received: {path}, which was replaced meanwhile. Tune it "
            "again."
        )
    try:
        with staged_directory(place) as new:
            for name in measured.files:
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                _link(place / name, new / name)
            # What was read is in the present format, whatever it was written in.
            changed = replace(measured, format=MANIFEST_FORMAT, tuned=tuned)
            (new / MARK).write_text(json.dumps(with_checksum(changed.to_dict())), encoding="utf-8")
    except ExportError as error:
        raise ExportError(f"{error} Or write nothing: write=False (--no-write).") from error


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # the file system has no links
        shutil.copy2(source, target)


def measured_elsewhere(tuned: TunedServing) -> str:
    """Returns in words that settings were measured on another machine than this one; "" if they were not."""
    machine = detect()
    return tuned.elsewhere(machine.device(tuned.on_gpu), machine.logical_cores)


def in_words(tuned: TunedServing) -> str:
    """Returns the settings in words, and whether they hold on this machine."""
    elsewhere = measured_elsewhere(tuned)
    return f"{tuned} ({f'{elsewhere}: {TUNE_HERE}' if elsewhere else 'measured on this machine'})"


def many_requests(manifest: Manifest, *, any_machine: bool = False) -> tuple[ManyRequests | None, str]:
    """Returns the way to compute many requests that was measured, and why tuned settings are not used, or "".

    Args:
        manifest: The manifest of an artifact.
        any_machine: Whether settings count that `tfopt.tune_serving` measured on another machine than this one.
    """
    reason = ""
    if manifest.tuned is not None:
        reason = "" if any_machine else measured_elsewhere(manifest.tuned)
        if not reason:
            return manifest.tuned.many_requests, ""
    return None if manifest.serving is None else manifest.serving.many_requests, reason
