"""JSON documents with a checksum of their own, which shows that somebody has edited one.

The checksum is of the values, not of the text, so a document may be indented anew. A document of an earlier version has
none, and counts as it was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

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


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
