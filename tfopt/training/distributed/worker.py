"""Runs a script with M logical CPU devices: `tfopt launch --devices-per-worker M` on a machine without GPUs.

python -m tfopt.training.distributed.worker M (-m MODULE | SCRIPT) [ARGS...]
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf


def main(words: Sequence[str]) -> None:
    """Runs a script as `python SCRIPT ARGS` would, or a module as `python -m MODULE ARGS` would."""
    devices, *script = words
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * int(devices))
    # `python -m` puts the working directory first in sys.path, as a module expects. A script expects its own directory.
    if script[0] == "-m":
        sys.argv = script[1:]
        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = script
        sys.path[0] = str(Path(script[0]).resolve().parent)
        runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
