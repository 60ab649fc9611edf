"""Records a trace with TensorFlow's profiler, and leaves no profiler running, also if the traced code raises."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import tensorflow as tf

from tfopt.atomic.files import check_utf8
from tfopt.atomic.own_files import check_replaceable
from tfopt.errors import ConfigError
from tfopt.profiling.trace.events import CHROME_TRACE, is_chrome_trace, newest_trace, read_spaces, write_chrome_trace

STEP = "step"

MarkStep = Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def record_trace(directory: str | Path) -> Iterator[MarkStep]:
    """Records what TensorFlow does inside the block.

    Two forms of the trace are written. XProf and TensorBoard open the directory. Perfetto (ui.perfetto.dev) opens
    `trace.json.gz` in it. A trace grows by megabytes per step, so a few steps are enough. If the block raises, nothing
    is written and the profiler stops.

    Args:
        directory: Directory for the trace. It is made if needed. Earlier traces in it stay.
    Yields:
        A function that returns a context for one step. The steps are marked in the trace, and `summarize` counts them.
    Raises:
        ConfigError: Another profiler runs in this process, the block has stopped this one, or the directory has a
            `trace.json.gz` that tfopt did not write.
    Example:
        >>> import tempfile
        >>> from tfopt.profiling.trace import summarize
        >>> matrix = tf.ones((64, 64))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with record_trace(directory) as step:
        ...         for _ in range(3):
        ...             with step():
        ...                 _ = (matrix @ matrix).numpy()
        ...     summary = summarize(directory)
        >>> summary.steps, summary.operators[0].kind
        (3, 'MatMul')
    """
    check_utf8("directory", directory)
    check_replaceable(Path(directory) / CHROME_TRACE, is_chrome_trace)
    try:
        tf.profiler.experimental.start(str(directory))
    except tf.errors.AlreadyExistsError as error:
        raise ConfigError(
            "A process can run one profiler at a time. Received: a profiler runs already. End it first with "
            "tf.profiler.experimental.stop(), or remove profile_batch from keras.callbacks.TensorBoard."
        ) from error
    numbers = itertools.count()
    try:
        yield lambda: _marked(next(numbers))
    except BaseException:
        with contextlib.suppress(tf.errors.UnavailableError):  # the block has stopped it before it raised
            tf.profiler.experimental.stop(save=False)
        raise
    try:
        tf.profiler.experimental.stop()
    except tf.errors.UnavailableError as error:
        raise ConfigError(
            "The profiler must run until the end of the traced block. Received: the block has stopped it. Remove "
            "tf.profiler.experimental.stop() from the block, or profile_batch from keras.callbacks.TensorBoard."
        ) from error
    write_chrome_trace(read_spaces(newest_trace(directory)), Path(directory) / CHROME_TRACE)


@contextlib.contextmanager
def _marked(number: int) -> Iterator[None]:
    # `_r` makes the step a root, to which XProf counts the operators that it starts.
    with tf.profiler.experimental.Trace(STEP, step_num=number, _r=1):
        yield
