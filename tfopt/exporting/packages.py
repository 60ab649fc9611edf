"""The packages that a file format needs beside tfopt's own."""

from __future__ import annotations

from importlib.util import find_spec

from tfopt.errors import ConfigError

PACKAGES = {"onnx": ("onnx", "tf2onnx", "onnxruntime")}


def check_packages(file_format: str) -> None:
    """Raises ConfigError if a package is missing that writes a format.

    Example:
        >>> check_packages("saved_model")
    """
    missing = [name for name in PACKAGES.get(file_format, ()) if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"format={file_format!r} needs the packages {', '.join(PACKAGES[file_format])}. Received: an environment "
            f"without {', '.join(missing)}. Install them: pip install 'tfopt[{file_format}]'."
        )
