"""Samples the machine while any program runs."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from tfopt.errors import ConfigError
from tfopt.profiling.monitoring.readers import Figures, open_reader
from tfopt.report import Utilization

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def monitor_command(command: Sequence[str], interval_s: float = 0.5) -> tuple[int, Utilization]:
    """Runs a program, and samples the GPUs or its processor load until it ends.

    Signals are handed on to the program.

    Args:
        command: The program and its words.
        interval_s: Seconds between samples.
    Returns: The exit code, 128 and the number of the signal after a signal; and the timeline.
    Raises:
        ConfigError: The program cannot be started, or the interval is not above 0.
    Example:
        >>> import sys
        >>> code, timeline = monitor_command([sys.executable, "-c", "raise SystemExit(3)"], interval_s=0.1)
        >>> code, len(timeline.seconds) >= 1
        (3, True)
    """
    if not interval_s > 0:
        raise ConfigError(f"interval_s must be above 0. Received: interval_s={interval_s}. Use 0.5, the default.")
    try:
        process = subprocess.Popen(list(command))
    except OSError as error:
        raise ConfigError(
            f"The command must be a program. Received: {command[0]} ({error}). Check its name."
        ) from error
    before = {each: signal.signal(each, lambda number, _: process.send_signal(number)) for each in FORWARDED}
    samples: list[tuple[float, Figures]] = []
    began = time.perf_counter()
    try:
        reader = open_reader(interval_s, process.pid)
        try:
            while True:
                samples.append((time.perf_counter() - began, _read(reader)))
                try:
                    process.wait(interval_s)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            reader.close()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    names = dict.fromkeys(name for _, figures in samples for name in figures)
    timeline = Utilization(
        source=reader.source,
        seconds=[seconds for seconds, _ in samples],
        series={name: [figures.get(name) for _, figures in samples] for name in names},
    )
    code = process.returncode
    return (128 - code if code < 0 else code), timeline


def _read(reader: Any) -> Figures:
    try:
        figures: Figures = reader.read()
    except Exception as error:  # noqa: BLE001 - the program goes on after any error of a reading
        reader.failures[f"{type(error).__name__}: {error}"] += 1
        return {}
    return figures
