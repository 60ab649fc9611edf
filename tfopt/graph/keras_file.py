"""From a .keras file to its model: one that is damaged, holds code or cannot fit into memory is refused with a word."""

from __future__ import annotations

import re
import zipfile
from importlib.util import find_spec
from pathlib import Path

import keras

from tfopt.data.sizes import available_memory_bytes
from tfopt.errors import ArtifactError
from tfopt.report.formatting import memory_size
from tfopt.settings.validation import check_stored

OTHER_BACKENDS = ("jax", "jaxlib", "flax", "torch")
# Bytes of the JSON that describes a model, unpacked. Of keras.applications NASNetLarge has the most, 1.0 MB.
LARGEST_CONFIG = 64 * 2**20
TRUST = "If you trust its source, pass trusted=True (--trusted)."
JSON_FILES = ("config.json", "metadata.json")


def load_keras(file: Path, trusted: bool, *, compiled: bool = False, remedy: str = TRUST) -> keras.Model:
    """Returns the model of a .keras file, with its optimizer and losses if `compiled`.

    `remedy` says what to do about code in the file.

    Raises:
        ArtifactError: The file is damaged or larger than the free memory when it is unpacked; or it holds code and is
            not trusted.
    """
    check_stored("A model", file)
    if not file.exists():
        raise ArtifactError(
            f"source must be a readable .keras file. Received: {file}, which is missing. Check the path."
        )
    try:
        _check_sizes(file)
        return keras.saving.load_model(file, compile=compiled, safe_mode=not trusted)
    except ArtifactError:
        raise
    except Exception as error:  # a damaged file fails in many ways, from BadZipFile to KeyError
        if not trusted and "safe_mode=False" in str(error):  # Keras' remedy, which no caller of tfopt can follow
            line = next(each for each in str(error).splitlines() if "safe_mode=False" in each)
            raise ArtifactError(
                f"A .keras file must hold no code and name no files. Received: {file} "
                f"({line.partition(' If you trust')[0].strip()}). {remedy}"
            ) from error
        cause = _innermost(error)
        # Of a file that is cut, Keras says that there is none.
        cut = file.suffix == ".keras" and file.is_file() and not zipfile.is_zipfile(file)
        reason = "it is not a whole zip archive" if cut else first_line(cause)
        raise ArtifactError(
            f"source must be a readable .keras file. Received: {file} ({reason}). {_remedy(cause)}"
        ) from error


def _innermost(error: BaseException) -> BaseException:
    """Returns the first of the errors that led to an error: Keras' own last one tells of its classes only."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def _remedy(error: BaseException) -> str:
    """Returns what to do about an error of `load_model`. A file of another backend may name that backend's code."""
    foreign = re.search(rf"'module': '({'|'.join(OTHER_BACKENDS)})\b.*?'class_name': '(\w+)'", str(error))
    if foreign is not None:
        return (
            f"The model uses {foreign[2]} of {foreign[1]}, which TensorFlow cannot run: replace it by one of keras.ops "
            "or keras.activations, and save the model again."
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        missing = find_spec(package) is None
        return f"Install the package {package}{'' if missing else ' in the version that wrote the file'}."
    if str(error).startswith("Could not locate"):
        of_module = re.search(r"Full object config: \{'module': '([\w.]+)'", str(error))
        where = f", in {of_module[1]}" if of_module else ""
        return (
            f"Import the code that registers it{where} (--import of the command), which must be written with keras.ops "
            "to run in TensorFlow."
        )
    return "Check the path." if isinstance(error, FileNotFoundError) else "Save it again."


def _check_sizes(file: Path) -> None:
    """Refuses what would fill the memory, before anything is unpacked. A file of 14 MB may hold 3 GB of zeros."""
    if not zipfile.is_zipfile(file):  # Keras says what is wrong with it
        return
    with zipfile.ZipFile(file) as archive:
        sizes = {each.filename: each.file_size for each in archive.infolist()}
    for name in JSON_FILES:
        if sizes.get(name, 0) > LARGEST_CONFIG:
            raise ArtifactError(
                f"{name} of a .keras file must have at most {memory_size(LARGEST_CONFIG)}. Received: {file}, where it "
                f"unpacks to {memory_size(sizes[name])}. No Keras model needs that: do not load the file."
            )
    total, free = sum(sizes.values()), available_memory_bytes()
    if total > free:
        raise ArtifactError(
            f"A .keras file must fit into the free memory, {memory_size(free)}. Received: {file}, of "
            f"{memory_size(file.stat().st_size)}, which unpacks to {memory_size(total)}. Use a machine with more "
            "memory; if you do not know its source, do not load it."
        )


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its text, without the configuration that Keras adds."""
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line.partition(' Full object config')[0]}"
