"""Keras' recurrent layers with less work in each turn of their loop, inside a scope.

Keras' LSTM, GRU, SimpleRNN and ConvLSTM on a CPU are a loop over the steps, and on small layers most of its time goes
into the many small ops of a turn. Here the same mathematics takes fewer:

- The product of the inputs and the kernel does not depend on the state. It is one product over many steps, before their
  loop. There it is fused and quantized like any other. A long sequence has two products and two loops: while the first
  loop runs, which keeps one thread busy, another thread computes the product for the second.
- A ConvLSTM convolves with the kernels of all four gates at once.
- A turn takes four steps, which share the counter, the condition, and the reads and writes of sequences.
- Without `return_sequences` nothing is written, and what a mask does to the outputs is done after the loop, at once.
- The loop reads no variables, so that TensorFlow runs independent loops, such as both directions, at the same time.

The results are equal up to rounding. A cell of one's own, stacked cells, and a layer for which Keras has cuDNN are left
as they are. So is training: TensorFlow's gradient of a loop gains nothing from longer turns (0.86 to 1.65 times the
speed on two cores, least for a Bidirectional LSTM).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.checks import check_reads, private, private_module
from tfopt.compat.replace import replaced

STEPS_PER_TURN = 4
SEVERAL_LOOPS_FROM = 64  # steps; the product of fewer takes no time that counts
# Of a ConvLSTM, whose inputs of all steps are as large as its images; of larger ones Keras computes step by step.
BYTES_TOGETHER = 64 * 2**20
ARGUMENTS = ("sequences", "initial_state", "mask", "training")
Step = Callable[..., tuple[Any, ...]]  # (inputs times kernel, *states) -> the next states, of which the first is output


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """While a model is traced, lets Keras' LSTM and GRU choose as on a machine with a GPU: the kernel of cuDNN.

    It replaces `_is_gpu_available` of keras.src.backend.tensorflow.rnn, which looks for a GPU; there is no public
    switch.

    Example:
        >>> layer = keras.layers.LSTM(4)
        >>> with as_on_a_gpu():
        ...     call = tf.function(lambda x: layer(x)).get_concrete_function(tf.TensorSpec((1, 8, 3)))
        >>> "CudnnRNNV3" in {operation.type for operation in call.graph.get_operations()}
        True
    """
    module = private_module("keras.src.backend.tensorflow.rnn")
    private(module, "_is_gpu_available", takes=())
    check_reads(private(module, "cudnn_ok"), "_is_gpu_available")
    with replaced(module, _is_gpu_available=lambda: True):
        yield


@contextlib.contextmanager
def short_loops() -> Iterator[None]:
    """While a model is called or traced for inference, gives the recurrent layers of Keras shorter loops.

    It replaces `inner_loop` of keras.layers.RNN, which Keras' layers call where there is no cuDNN; there is no public
    switch. Inside another such scope, the outer one goes on.

    Example:
        >>> layer = keras.layers.LSTM(4)
        >>> layer.build((None, 8, 3))
        >>> def ops():
        ...     call = tf.function(lambda x: layer(x)).get_concrete_function(tf.TensorSpec((1, 8, 3)))
        ...     return {operation.type for operation in call.graph.get_operations()}
        >>> with short_loops():
        ...     sorted(ops() & {"While", "StatelessWhile"})
        ['StatelessWhile']
        >>> sorted(ops() & {"While", "StatelessWhile"})
        ['While']
    """
    kind = keras.layers.RNN
    if isinstance(vars(kind).get("inner_loop"), functools.partialmethod):
        yield
        return
    original = private(kind, "inner_loop", takes=ARGUMENTS)
    check_reads(kind.call, "inner_loop")
    with replaced(kind, inner_loop=functools.partialmethod(_inner_loop, original)):
        yield


def _inner_loop(
    layer: Any, original: Callable[..., Any], sequences: Any, initial_state: Any, mask: Any, training: Any = False
) -> tuple[Any, Any, list[Any]]:
    """Returns the last output, the outputs of all steps (without `return_sequences` of one), and the last states."""
    states = tuple(initial_state) if isinstance(initial_state, (list, tuple)) else (initial_state,)
    if not _is_known(layer, sequences, states, mask, training):
        return original(layer, sequences, initial_state, mask, training=training)
    read = [_time_first(sequences, layer.go_backwards)]
    if mask is not None:
        mask = tf.cast(mask, tf.bool)[(..., *[None] * (states[0].shape.rank - 1))]
        read.append(_time_first(mask, layer.go_backwards))
    step = STEPS[_kind(layer)](layer.cell)
    product = functools.partial(_product, layer.cell)
    outputs, states = _loop(step, product, read, states, unroll=layer.unroll, keep=layer.return_sequences)
    if mask is not None:  # Keras' outputs are zero up to the first step that counts, whatever the initial state
        counts = read[1] if layer.zero_output_for_mask else tf.cumsum(tf.cast(read[1], tf.int32)) > 0
        outputs = tf.where(counts if layer.return_sequences else counts[-1:], outputs, tf.zeros_like(outputs))
    return outputs[-1], _swapped(outputs), list(states)


def _kind(layer: Any) -> type:
    """Returns the class of a layer's cell, or of a ConvLSTM itself, whose cell has no public name."""
    return type(layer if type(layer.cell).__name__ == "ConvLSTMCell" else layer.cell)


def _is_known(layer: Any, sequences: Any, states: Sequence[Any], mask: Any, training: Any) -> bool:
    """Returns whether the layer's loop is one that is written anew here."""
    cell = layer.cell
    if _kind(layer) not in STEPS or "call" in vars(cell) or training not in (None, False):
        return False
    if not getattr(sequences, "dtype", None) == cell.compute_dtype == layer.compute_dtype:  # Keras promotes
        return False
    if getattr(cell, "data_format", "channels_last") != "channels_last":
        return False
    if hasattr(cell, "rank") and _together(sequences, states[0]) > BYTES_TOGETHER:
        return False
    if layer.unroll and mask is not None:  # backwards, Keras blanks other outputs without a loop than with one
        return False
    rank = 3 + getattr(cell, "rank", 0)
    given = [(sequences, rank), *((state, rank - 1) for state in states), *([] if mask is None else [(mask, 2)])]
    if not all(tf.is_tensor(each) and each.shape.rank == rank and 0 not in each.shape for each, rank in given):
        return False
    # Sizes that only some of them have would change from turn to turn.
    sizes = (*sequences.shape[2:], *(size for state in states for size in state.shape[1:]))
    return None not in sizes and all(state.shape[0] == sequences.shape[0] for state in states)


def _together(sequences: Any, state: Any) -> int:
    """Returns the bytes of the inputs of all gates in all steps. Of open sizes, 8 examples and 32 steps count."""
    batch, steps = (sequences.shape[0] or 8), (sequences.shape[1] or 32)
    return batch * steps * 4 * math.prod(size or 1 for size in state.shape[1:]) * sequences.dtype.size


def _time_first(sequences: Any, backwards: bool) -> Any:
    sequences = _swapped(sequences)
    return tf.reverse(sequences, [0]) if backwards else sequences


def _swapped(sequences: Any) -> Any:
    """Returns sequences with the batch and the steps, the first two axes, in the other order."""
    return tf.transpose(sequences, [1, 0, *range(2, sequences.shape.rank)])


def _product(cell: Any, inputs: Any) -> Any:
    """Returns each step of a sequence times the cell's kernel, plus its bias, from one product."""
    steps, batch, *shape = inputs.shape
    kernel = tf.convert_to_tensor(cell.kernel)
    examples = tf.reshape(inputs, [-1, *shape])
    if kernel.shape.rank == 2:
        product = tf.matmul(examples, kernel)
    else:
        options = {"strides": cell.strides, "padding": cell.padding, "dilation_rate": cell.dilation_rate}
        product = keras.ops.conv(examples, kernel, data_format=cell.data_format, **options)
    if cell.bias is not None:
        bias = tf.convert_to_tensor(cell.bias)
        # A GRU has another one for the state.
        product = tf.nn.bias_add(product, bias[0] if bias.shape.rank == 2 else bias)
    if steps is not None:
        return tf.reshape(product, [steps, -1, *product.shape[1:]])
    return tf.reshape(product, [-1, tf.shape(inputs)[1] if batch is None else batch, *product.shape[1:]])


def _loop(
    step: Step,
    product: Callable[[Any], Any],
    read: Sequence[Any],
    states: tuple[Any, ...],
    *,
    unroll: bool,
    keep: bool,
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the outputs of all steps, or of the last one if they need not be kept, and the last states.

    Args:
        step: From the inputs of a step times the kernel, and the states, to the next states.
        product: From the inputs of several steps to these times the kernel.
        read: The inputs, and the mask if there is one: steps first, then the batch.
        states: The states before the first step.
        unroll: Whether there is to be no loop.
        keep: Whether all outputs are needed.
    """
    steps = read[0].shape[0]
    if unroll:
        outputs, states = _take(step, [tf.unstack(each) for each in (product(read[0]), *read[1:])], states)
        return tf.stack(outputs if keep else outputs[-1:]), states
    kept = []
    for first, last in _pieces(steps):
        inputs, *masks = (each[first:last] for each in read)
        piece = [product(inputs), *masks]
        for part, count, turns in _parts(piece):
            outputs, states = _turns(step, part, states, count, turns, keep)
            kept.append(outputs)
    return tf.concat(kept, 0) if keep else states[0][None], states


def _pieces(steps: int | None) -> list[tuple[int, int | None]]:
    """Returns the first step of each loop and the one after its last.

    A product over many steps takes some third of the time that the loop takes for them. So that of three quarters is
    ready when the loop over the first quarter ends.
    """
    if steps is None or steps < SEVERAL_LOOPS_FROM:
        return [(0, steps)]
    first = steps // 4 // STEPS_PER_TURN * STEPS_PER_TURN
    return [(0, first), (first, steps)]


def _parts(read: Sequence[Any]) -> list[tuple[list[Any], int, Any]]:
    """Returns sequences in full turns and what is left of them, each with its steps per turn and number of turns."""
    steps = read[0].shape[0]
    if steps is None:
        return [(list(read), 1, tf.shape(read[0])[0])]
    whole = steps - steps % STEPS_PER_TURN
    return [
        ([each[first:last] for each in read], count, (last - first) // count)
        for first, last, count in ((0, whole, STEPS_PER_TURN), (whole, steps, steps - whole))
        if first < last
    ]


def _turns(
    step: Step, read: Sequence[Any], states: tuple[Any, ...], count: int, turns: Any, keep: bool
) -> tuple[Any, tuple[Any, ...]]:
    """Runs a loop with `count` steps in each turn. Returns the outputs, None if they are not kept, and the states."""
    shape = (read[0].shape[1], *states[0].shape[1:])
    if count > 1:
        read = [tf.reshape(each, [turns, count, -1, *each.shape[2:]]) for each in read]
    arrays = [tf.TensorArray(each.dtype, turns).unstack(each) for each in read]
    block = shape if count == 1 else (count, *shape)
    written = (tf.TensorArray(states[0].dtype, turns, element_shape=block),) if keep else ()

    def body(number: Any, written: Any, states: Any) -> Any:
        found = [array.read(number) for array in arrays]
        outputs, states = _take(step, [[each] if count == 1 else tf.unstack(each, count) for each in found], states)
        kept = (array.write(number, outputs[0] if count == 1 else tf.stack(outputs)) for array in written)
        return number + 1, tuple(kept), states

    _, written, states = tf.while_loop(lambda number, *_: number < turns, body, (tf.constant(0), written, states))
    if not keep:
        return None, states
    outputs = written[0].stack()
    return outputs if count == 1 else tf.reshape(outputs, [turns * count, -1, *shape[1:]]), states


def _take(step: Step, read: Sequence[Sequence[Any]], states: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
    """Takes steps one after the other, and returns their outputs and the last states. Masked ones keep the states."""
    outputs = []
    for inputs, *masks in zip(*read, strict=True):
        new = step(inputs, *states)
        states = tuple(map(functools.partial(tf.where, masks[0]), new, states)) if masks else new
        outputs.append(states[0])
    return outputs, states


def _lstm(cell: Any) -> Step:
    recurrent = tf.convert_to_tensor(cell.recurrent_kernel)

    def product(output: Any) -> Any:
        if recurrent.shape.rank == 2:
            return tf.matmul(output, recurrent)
        return keras.ops.conv(output, recurrent, padding="same", data_format=cell.data_format)

    def step(inputs: Any, output: Any, carry: Any) -> tuple[Any, ...]:
        gates = tf.split(inputs + product(output), 4, -1)
        admit, keep, emit = (cell.recurrent_activation(gates[place]) for place in (0, 1, 3))
        carry = keep * carry + admit * cell.activation(gates[2])
        return emit * cell.activation(carry), carry

    return step


def _gru(cell: Any) -> Step:
    recurrent = tf.convert_to_tensor(cell.recurrent_kernel)
    bias = tf.convert_to_tensor(cell.bias)[1] if cell.use_bias and cell.reset_after else None
    parts = [2 * cell.units, cell.units]
    for_gates, for_new = tf.split(recurrent, parts, 1)

    def step(inputs: Any, state: Any) -> tuple[Any, ...]:
        gates, new = tf.split(inputs, parts, 1)
        if cell.reset_after:
            product = tf.matmul(state, recurrent)
            of_gates, of_new = tf.split(product if bias is None else tf.nn.bias_add(product, bias), parts, 1)
        else:
            of_gates = tf.matmul(state, for_gates)
        keep, reset = map(cell.recurrent_activation, tf.split(gates + of_gates, 2, 1))
        new = cell.activation(new + (reset * of_new if cell.reset_after else tf.matmul(reset * state, for_new)))
        return (new + keep * (state - new),)

    return step


def _simple(cell: Any) -> Step:
    recurrent = tf.convert_to_tensor(cell.recurrent_kernel)
    return lambda inputs, output: (cell.activation(inputs + tf.matmul(output, recurrent)),)


STEPS: dict[type, Callable[[Any], Step]] = {
    keras.layers.LSTMCell: _lstm,
    keras.layers.GRUCell: _gru,
    keras.layers.SimpleRNNCell: _simple,
    keras.layers.ConvLSTM1D: _lstm,
    keras.layers.ConvLSTM2D: _lstm,
    keras.layers.ConvLSTM3D: _lstm,
}
