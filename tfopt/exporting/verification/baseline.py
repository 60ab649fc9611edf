"""Finds the float artifact that another artifact is compared with, and matches the names of inputs and outputs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tfopt.atomic.directories import MARK
from tfopt.errors import ArtifactError, ConfigError
from tfopt.exporting.manifest import Manifest, TensorRecord, check_is_artifact, read_manifest


def find_baseline(path: Path, manifest: Manifest, given: str | Path | None) -> tuple[Path | None, str]:
    """Returns the baseline's directory, or None and the reason.

    Raises:
        ConfigError: `given` is not a float artifact.
        ArtifactError: The baseline's manifest has changed since it was written.
    """
    if given is not None:
        try:
            check_is_artifact(Path(given))
        except ArtifactError as error:
            raise ConfigError(f"baseline must be an artifact. {error}") from error
        found = read_manifest(Path(given))
        if not found.is_float:
            raise ConfigError(
                f"baseline must be a float artifact. Received: {given}, whose precision is {found.precision}. Pass the "
                "float artifact of the same model."
            )
        return Path(given), ""
    if manifest.baseline is None:
        return None, "it has no float baseline"
    found_at = Path(os.path.normpath(path / manifest.baseline))
    if not (found_at / MARK).is_file():
        return None, f"its baseline {found_at} does not exist"
    other = read_manifest(found_at)
    return (found_at, "") if other.is_float else (None, f"its baseline {found_at} is not float but {other.precision}")


def input_names(wanted: Mapping[str, TensorRecord], path: Path, manifest: Manifest) -> dict[str, str]:
    """Returns an artifact's name for each of the wanted inputs.

    Names can differ, because Keras numbers unnamed inputs anew in every process. Then shapes and types decide.

    Raises:
        ConfigError: The artifact takes other inputs, or several inputs have the same shape and type.
    """
    own = manifest.signature.inputs
    if wanted.keys() == own.keys():
        names = {name: name for name in wanted}
    else:
        candidates = {name: [other for other, its in own.items() if its.fits(spec)] for name, spec in wanted.items()}
        names = {name: found[0] for name, found in candidates.items() if len(found) == 1}
    if not len(wanted) == len(own) == len({*names.values()}) or not all(
        own[names[name]].fits(spec) for name, spec in wanted.items()
    ):
        takes, given = (", ".join(f"{name} {spec}" for name, spec in specs.items()) for specs in (wanted, own))
        raise ConfigError(
            f"baseline must take the artifact's inputs, {takes}. Received: {path}, which takes {given}. If they are "
            "the same inputs, give them the same names in both models, as keras.Input(..., name='image') does."
        )
    return names


def output_names(wanted: Mapping[str, TensorRecord], path: Path, manifest: Manifest) -> dict[str, str]:
    """Returns an artifact's name for each of the wanted outputs. Where names differ, the order decides.

    Raises:
        ConfigError: The artifact has another number of outputs.
    """
    own = manifest.signature.outputs
    if own.keys() == wanted.keys():
        return {name: name for name in wanted}
    if len(own) != len(wanted):
        raise ConfigError(
            f"baseline must give the artifact's outputs, {list(wanted)}. Received: {path}, which gives {list(own)}."
        )
    return dict(zip(wanted, own, strict=True))
