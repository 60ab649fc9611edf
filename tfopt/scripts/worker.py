"""Runs a script with M logical CPU devices: `tfopt launch --devices-per-worker M` on a machine without GPUs.

python -m tfopt.scripts.worker M (-m MODULE | SCRIPT) [ARGS...]
"""

import sys

import tensorflow as tf

from tfopt.scripts.run_script import run_script

if __name__ == "__main__":
    devices, script, *arguments = sys.argv[1:]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * int(devices))
    sys.exit(run_script(script, arguments))
