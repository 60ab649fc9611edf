"""The process of one trial: `python -m tfopt.trials.child DIRECTORY` calls the function that a file there names."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from tfopt.atomic.files import write_text
from tfopt.settings.calls import import_code
from tfopt.terminal import without_colors

STDIN = 0
REQUEST, ANSWER = "request.json", "answer.json"


def answer(directory: Path) -> None:
    """Calls the function of the request, and writes what it returns or the error that it raises."""
    request = json.loads((directory / REQUEST).read_text(encoding="utf-8"))
    try:
        found = {"result": import_code("function", request["function"])(**request["arguments"])}
    except Exception as error:  # noqa: BLE001 - whatever a trial raises is its outcome
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {without_colors(str(error))}"}
    write_text(directory / ANSWER, json.dumps(found))


def _end_with_parent() -> None:
    """Ends this process when the parent does, also if that is killed: nothing else closes the pipe.

    It does not read from sys.stdin, which would be locked meanwhile: a fork of this process, such as a worker of the
    user's multiprocessing, closes sys.stdin first, and would wait for ever.
    """
    while os.read(STDIN, 1):
        continue
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # SIGTERM is an exception, which ends what the function has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    code: str | int | None = 0
    try:
        answer(Path(sys.argv[1]))
    except SystemExit as ended:
        code = ended.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)  # without waiting for threads: TensorFlow's, and that of the pipe
