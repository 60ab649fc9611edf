"""Runs the first two blocks of the README and records what they print, for the README to show.

python benchmarks/front_door.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tempfile
from typing import Any

from page_tables import RESULTS, ROOT
from write_pages import write_pages

import tfopt
from tfopt.atomic.files import write_text


def readme_blocks() -> list[str]:
    """Returns the first two blocks of Python in the README."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[:2]


def main() -> None:
    blocks = readme_blocks()
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        for block in blocks:
            exec(compile(block, "README.md", "exec"), names)
    record = {
        "what": "what the first two blocks of the README print",
        "code": blocks,
        "cores": os.cpu_count(),
        "ledger": str(tfopt.ledger(names["model"])),
        "receipt": dataclasses.asdict(names["receipt"]),
    }
    write_text(RESULTS / "front_door.json", json.dumps(record, indent=2) + "\n")
    write_pages()


if __name__ == "__main__":
    main()
