"""JSON documents with a checksum of their own, which shows that somebody has edited one.

The checksum is of the values, not of the text, so a document may be indented anew. A document of an earlier version has
none, and counts as it was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from tfopt.atomic.files import read_stored
from tfopt.atomic.own_files import json_in
from tfopt.errors import ArtifactError

T = TypeVar("T")
CHECKSUM = "sha256"
EDITED = "its checksum does not match: it was edited or damaged"


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content as JSON holds it, with its checksum in front, in place of an earlier one.

    Example:
        >>> document = with_checksum({"step": 3})
        >>> is_as_written(document), is_as_written({**document, "step": 4}), is_as_written({"step": 4})
        (True, False, True)
    """
    plain = json.loads(json.dumps({key: value for key, value in content.items() if key != CHECKSUM}))
    return {CHECKSUM: _checksum(plain), **plain}


def is_as_written(document: Any) -> bool:
    """Whether a document that was read is what `with_checksum` returned, or has no checksum."""
    if not isinstance(document, dict) or CHECKSUM not in document:
        return True
    return bool(document[CHECKSUM] == _checksum({key: document[key] for key in document.keys() - {CHECKSUM}}))


def read_as_written(file: Path, form: TypeAdapter[T], what: str, remedy: str) -> T:
    """Returns the value in a file that holds what `with_checksum` returned.

    Args:
        file: The file.
        form: The type of the value.
        what: What the file holds, at the beginning of a sentence: "The outcome of a trial".
        remedy: What to do if it is damaged.
    Raises:
        ArtifactError: It is damaged, or cannot be read.
    """
    try:
        content = json_in(read_stored(file))
        if not is_as_written(content):
            raise ValueError(EDITED)
        values = {key: value for key, value in content.items() if key != CHECKSUM}
        return form.validate_json(json.dumps(values), strict=True)
    except (AttributeError, OSError, ValueError) as error:  # pydantic's ValidationError is a ValueError
        reason = " ".join(str(error).split())[:200]
        raise ArtifactError(f"{what} must be as it was written. Received: {file} ({reason}). {remedy}") from error


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
