"""The file formats of artifacts: what each can hold, what writes it and what runs it.

A further format is an entry of `FORMATS`, a package with a module `write`, and a runtime for the verification.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tfopt.errors import ArtifactError, ConfigError

LOADED = {"ai_edge_litert": "ai_edge_litert.interpreter"}  # the module that loads a package's libraries

TELEMETRY = "ORT_DISABLE_TELEMETRY"
SENDS = "openvino_telemetry"


@contextmanager
def without_telemetry() -> Iterator[None]:
    """Imports ONNX Runtime and OpenVINO in its block so that they send no events. Both decide as they are imported.

    ONNX Runtime would leave files in TMPDIR too. OpenVINO would fork the process, the threads of TensorFlow and all,
    and leave files in the home directory. Whoever has set the variable, or imported OpenVINO before, decides otherwise.
    All is as before at the end.
    """
    variable, module = TELEMETRY not in os.environ, SENDS not in sys.modules
    if variable:
        os.environ[TELEMETRY] = "1"
    if module:
        sys.modules[SENDS] = None  # type: ignore[assignment] # OpenVINO does without it
    try:
        yield
    finally:
        if variable:
            del os.environ[TELEMETRY]
        if module:
            del sys.modules[SENDS]


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """A file format.

    Attributes:
        name: Its name in `ExportConfig.format`, and the name of tfopt's extra with its packages.
        what: A model in this format, in the words of messages.
        file: The file of the model in an artifact's directory.
        precisions: The precisions that it can hold. Empty means all.
        instead: Of other precisions, why it cannot hold them and what comes nearest.
        settings: The settings of ExportConfig that belong to this format alone.
        packages: The packages that write and run it, beside tfopt's own.
        needs: What serves it, in words for the manifest.
        writer: The module whose `write(lowered, directory, config)` writes it.
        runtime: The file in verification/ that runs it.
        saturates: Whether its int8 kernels saturate on x86-64 without VNNI or AMX. XNNPACK widens bytes before it
            multiplies them, and adds in 32 bits.
        compiles: Whether its runtime compiles a model for the sizes of its inputs, so that the file as it is, with open
            sizes, is another program.
    """

    name: str
    what: str
    file: str
    precisions: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    needs: str
    writer: str
    runtime: str
    saturates: bool = True
    compiles: bool = False

    def check_packages(self) -> None:
        """Raises ConfigError if a package is missing.

        Example:
            >>> FORMATS["saved_model"].check_packages()
        """
        missing = [name for name in self.packages if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"format={self.name!r} needs the packages {', '.join(self.packages)}. Received: an environment "
                f"without {', '.join(missing)}. Install them: pip install 'tfopt[{self.name}]'."
            )

    def import_packages(self) -> None:
        """Raises ConfigError if a package is missing or cannot be imported, as one without its libraries.

        Example:
            >>> FORMATS["saved_model"].import_packages()
        """
        self.check_packages()
        for name in self.packages:
            try:
                with without_telemetry():
                    import_module(LOADED.get(name, name))
            except ImportError as error:
                raise ConfigError(
                    f"format={self.name!r} needs the packages {', '.join(self.packages)}. Received: an environment in "
                    f"which {name} cannot be imported ({error}). Install it again, with what it needs."
                ) from error

    @property
    def write(self) -> Callable[..., None]:
        """The function that writes it, which may need the packages."""
        found: Any = import_module(self.writer)
        return found.write

    def model(self, path: Path) -> Path:
        """Returns what its runtime loads: of an artifact's directory the model's file, and any other path itself.

        Example:
            >>> FORMATS["onnx"].model(Path("model.onnx")).name
            'model.onnx'
        """
        return path / self.file if path.is_dir() and self.name != SAVED_MODEL else path


SAVED_MODEL = "saved_model"
NOT_IN_ONNX = {
    "bfloat16": "'float16' takes as many bytes and keeps more digits",
    "int4_weight_only": "operator set 18 has no integers of 4 bits; 'int8_weight_only' comes nearest",
}
FORMATS: dict[str, FileFormat] = {
    each.name: each
    for each in (
        FileFormat(
            name=SAVED_MODEL,
            what="SavedModel",
            file="saved_model.pb",
            settings=(
                *("compute", "float_weights", "node_times", "sparse_weights", "weights_in"),
                *("float_fallback", "xla_signature"),
            ),
            needs="TensorFlow",
            writer="tfopt.exporting.saved_model",
            runtime="tensorflow_only.py",
        ),
        FileFormat(
            name="onnx",
            what="ONNX file",
            file="model.onnx",
            precisions=("float32", "float16", "int8", "int8_weight_only"),
            instead=NOT_IN_ONNX,
            settings=("tensorrt",),
            packages=("onnx", "tf2onnx", "onnxruntime"),
            needs="a runtime for ONNX, such as ONNX Runtime, OpenVINO or TensorRT",
            writer="tfopt.exporting.onnx.write",
            runtime="onnxruntime_only.py",
        ),
        FileFormat(
            name="openvino",
            what="OpenVINO model",
            file="model.xml",
            precisions=("float32", "float16", "int8", "int8_weight_only"),
            instead=NOT_IN_ONNX,
            packages=("openvino", "onnx", "tf2onnx"),
            needs="OpenVINO",
            writer="tfopt.exporting.openvino",
            runtime="openvino_only.py",
            compiles=True,
        ),
        FileFormat(
            name="litert",
            what="LiteRT file",
            file="model.tflite",
            precisions=("float32", "float16", "int8"),
            packages=("ai_edge_litert",),
            needs="LiteRT",
            writer="tfopt.exporting.litert.write",
            runtime="litert_only.py",
            saturates=False,
        ),
    )
}


def has_model(path: Path) -> bool:
    """Whether a directory holds a model of any format."""
    return any((path / each.file).is_file() for each in FORMATS.values())


def check_one_model(path: Path) -> None:
    """Raises ArtifactError if a directory holds models of several formats, of which a path names none.

    Example:
        >>> check_one_model(Path("model.onnx"))
    """
    held = [each.file for each in FORMATS.values() if (path / each.file).is_file()]
    if len(held) > 1:
        raise ArtifactError(
            f"A directory must hold one model. Received: {path} with {', '.join(held)}. Name the file of one, or move "
            "the others elsewhere."
        )


def format_of(path: Path) -> FileFormat:
    """Returns the format of an artifact's directory or of a model's file; a SavedModel where no other is found."""
    for each in FORMATS.values():
        if (path / each.file).is_file() or (path.is_file() and path.suffix == Path(each.file).suffix):
            return each
    return FORMATS[SAVED_MODEL]


def files_of(path: Path) -> list[Path]:
    """Returns the files of a model's directory, or a model's file with those beside it that have its weights.

    Example:
        >>> files_of(Path("nowhere"))
        []
    """
    candidates = path.rglob("*") if path.is_dir() else [path, *_files_beside(path)]
    return sorted(file for file in candidates if file.is_file())


def _files_beside(path: Path) -> list[Path]:
    if path.suffix == ".xml":  # OpenVINO's
        return [path.with_suffix(".bin")]
    if path.suffix == ".onnx" and path.is_file():
        external: Any = import_module("tfopt.exporting.onnx.external")
        found: list[Path] = external.files(path)
        return found
    return []
