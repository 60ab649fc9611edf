"""TensorFlow's own count of the memory of its GPUs.

NVML says how much memory all processes hold. TensorFlow takes nearly all of it at once, or keeps what it has taken, so
that says little. TensorFlow counts what the tensors of this process take, now and at most.
"""

from __future__ import annotations

import tensorflow as tf

from tfopt.compat.tensorflow import has_started

NOW, PEAK = "tensorflow_memory_bytes", "tensorflow_memory_peak_bytes"
Figures = dict[str, float | None]


class TensorFlowMemory:
    """The memory that tensors of this process take on each GPU, now and at most.

    The peak counts since the start of the process, or since `tf.config.experimental.reset_memory_stats`.

    Attributes:
        unavailable: Why there is no value.

    Example:
        >>> memory = TensorFlowMemory()
        >>> bool(memory.read()) or memory.unavailable["tensorflow_memory_peak_bytes"].startswith("TensorFlow ")
        True
    """

    def __init__(self) -> None:
        self.unavailable = {PEAK: "TensorFlow has not started its devices"}
        self._devices: list[tuple[int, str]] | None = None

    def read(self) -> Figures:
        """Returns the present values by name, for example "gpu0_tensorflow_memory_bytes"."""
        if self._devices is None:
            if not has_started():  # to ask for the devices would start them, before the program has set memory growth
                return {}
            self._devices = self._find()
        figures: Figures = {}
        for number, device in self._devices:
            memory = tf.config.experimental.get_memory_info(device)
            figures |= {f"gpu{number}_{NOW}": float(memory["current"]), f"gpu{number}_{PEAK}": float(memory["peak"])}
        return figures

    def _find(self) -> list[tuple[int, str]]:
        """Returns the number of each GPU in CUDA_VISIBLE_DEVICES, and the name of TensorFlow's device."""
        visible = tf.config.get_visible_devices("GPU")
        if not visible:
            self.unavailable = {PEAK: "TensorFlow uses no GPU, and does not count the memory of a processor"}
            return []
        # In a cluster, the list has the devices of all workers. Those of this one have a memory to ask for.
        devices = [each.name for each in tf.config.list_logical_devices("GPU") if _is_here(each.name)]
        if len(devices) != len(visible):
            self.unavailable = {PEAK: "TensorFlow has divided the GPUs into logical devices"}
            return []
        self.unavailable = {}
        return [(int(gpu.name.rpartition(":")[2]), name) for gpu, name in zip(visible, devices, strict=True)]


def _is_here(device: str) -> bool:
    try:
        tf.config.experimental.get_memory_info(device)
    except (ValueError, tf.errors.OpError):
        return False
    return True
