"""Writes the SavedModel of an artifact, which needs only TensorFlow and has each of its weights once."""

from __future__ import annotations

import errno
from pathlib import Path

import tensorflow as tf

from tfopt.exporting.config import ExportConfig
from tfopt.exporting.lowering import Lowered
from tfopt.exporting.signatures import make_signatures

# The errors of TensorFlow's file system for a full disk and for a limit on the size of files.
FILE_ERRORS = {tf.errors.ResourceExhaustedError: errno.ENOSPC, tf.errors.OutOfRangeError: errno.EFBIG}


def write(lowered: Lowered, directory: Path, config: ExportConfig) -> None:
    """Writes a SavedModel with a signature for each graph."""
    # Custom gradients, for example of swish, are for training. Those of a frozen graph cannot be saved.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    module, signatures = make_signatures(lowered.graphs, config.weights_in, decoded_at_call=lowered.in_variables)
    try:
        tf.saved_model.save(module, str(directory), signatures=signatures, options=options)
    except tf.errors.OpError as error:
        raise OSError(FILE_ERRORS.get(type(error), errno.EIO), error.message) from error
