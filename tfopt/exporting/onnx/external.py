"""Weights of an ONNX file that are in other files, as in every model of more than 2 GiB.

They count as part of the model if they lie in its directory. A location that leads outside may name any file. In a
cache of Hugging Face, the model and its weights are links into one other directory: a link may lead to a file beside
that to which the link of the model leads. ONNX Runtime has the same rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx


def files(path: Path) -> list[Path]:
    """Returns the files beside an ONNX file that have its weights."""
    found = locations(onnx.load(str(path), load_external_data=False))
    return [path.with_name(each) for each in found if lies_beside(path, each)]


def locations(model: Any) -> list[str]:
    """Returns the other files that tensors of a model name, each once."""
    external = (each for each in _tensors(model) if each.data_location == onnx.TensorProto.EXTERNAL)
    named = {next((item.value for item in each.external_data if item.key == "location"), "") for each in external}
    return sorted(named)


def lies_beside(path: Path, location: str) -> bool:
    """Returns whether a location is a file in the directory of the ONNX file, or a link to one beside the linked file.

    Example:
        >>> [lies_beside(Path("model.onnx"), each) for each in ("model.onnx.data", "../data", "/data", "")]
        [True, False, False, False]
    """
    linked, is_name = (path.parent / location).resolve().parent, Path(location).name == location not in ("", "..")
    return is_name and linked in (path.parent.resolve(), path.resolve().parent)


def _tensors(message: Any) -> Iterator[Any]:
    """Yields all tensors in a message: initializers and attributes, also of loops, branches and functions."""
    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in [value] if hasattr(value, "ListFields") else value:
                yield from _tensors(each)
