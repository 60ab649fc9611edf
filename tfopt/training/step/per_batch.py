"""Which callbacks act on each batch, so that a fit with them has one step per call into TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.replace import callbacks_of
from tfopt.compat.trainer import profiles_batches

# The methods of a callback that Keras calls around each step. Under several steps per execution it calls them less.
PER_BATCH = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
PER_TEST_BATCH = ("on_test_batch_begin", "on_test_batch_end")

# The attribute of the callbacks of tfopt that count the steps of a call themselves.
FOLLOWS = "_follows_several_steps"


def _always(_: Any) -> bool:
    return True


def _saves_by_epoch(callback: Any) -> bool:
    return bool(callback.save_freq == "epoch")


def _writes_by_epoch(callback: Any) -> bool:
    """Returns whether a TensorBoard writes nothing for a batch; its scalars of batches go to a writer of the script."""
    by_epoch = callback.update_freq == "epoch" and not profiles_batches(callback)
    return by_epoch and not bool(tf.summary.should_record_summaries())


# Methods of Keras' own callbacks that need no call for each step, and the condition for that.
HARMLESS: dict[Any, Callable[[Any], bool]] = {
    keras.callbacks.ProgbarLogger.on_train_batch_end: _always,
    keras.callbacks.ProgbarLogger.on_test_batch_end: _always,
    keras.callbacks.ModelCheckpoint.on_train_batch_end: _saves_by_epoch,
    keras.callbacks.BackupAndRestore.on_train_batch_end: _saves_by_epoch,
    keras.callbacks.OrbaxCheckpoint.on_train_batch_end: _saves_by_epoch,
    keras.callbacks.TensorBoard.on_train_batch_begin: _writes_by_epoch,
    keras.callbacks.TensorBoard.on_train_batch_end: _writes_by_epoch,
    keras.callbacks.TensorBoard.on_test_batch_begin: _writes_by_epoch,
    # The runtime ends a call with the step that it looks for: `ending` in training/step/fit.py.
    keras.callbacks.TerminateOnNaN.on_batch_end: _always,
}


def per_batch_callback(callbacks: Any, *, validates: bool) -> str | None:
    """Returns the class of the first callback that must be called for each batch, or None.

    Args:
        callbacks: The argument of `fit`.
        validates: Whether the fit validates, so that the callbacks see its batches too.
    Example:
        >>> per_batch_callback([keras.callbacks.EarlyStopping()], validates=True)
        >>> per_batch_callback([keras.callbacks.TensorBoard(update_freq="batch")], validates=False)
        'TensorBoard'
    """
    for callback in callbacks_of(callbacks):
        if getattr(callback, FOLLOWS, False):
            continue
        for name in PER_BATCH + (PER_TEST_BATCH if validates else ()):
            method = getattr(callback, name)
            function = getattr(method, "__func__", method)
            if function is getattr(keras.callbacks.Callback, name):
                continue
            if function not in HARMLESS or not HARMLESS[function](callback):
                return type(callback).__name__
    return None
