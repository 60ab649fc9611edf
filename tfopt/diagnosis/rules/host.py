"""Rules for the host: Python between two steps, callbacks, metrics in Python, and steps that are built again."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from tfopt.data.measurement.stages import PYTHON_OPS
from tfopt.diagnosis.experiments import IN_ONE_CALL, CannotMeasureError, measurable
from tfopt.diagnosis.measured import Measured, share
from tfopt.report import Diagnosis

# Below these shares of the step a change is not worth it.
BUILDS = CALLBACKS = METRICS = EAGER = 0.05
CALLS = 0.1
# What to change in a callback that works after each batch, by its class, and in one that works at the ends of epochs.
LESS_OFTEN = {
    "ModelCheckpoint": 'ModelCheckpoint(save_freq="epoch"), or a larger number',
    "BackupAndRestore": 'BackupAndRestore(save_freq="epoch"), or a larger number',
    "TensorBoard": 'TensorBoard(update_freq="epoch"), without profile_batch',
    "": "do its work, and call get_weights() or numpy(), at the end of an epoch (on_epoch_end) or every hundredth "
    "batch; write files in a thread",
}
LESS_AT_ENDS = {
    "ModelCheckpoint": "save_weights_only=True writes less, without the optimizer; save to a faster disk, or after "
    "longer epochs",
    "BackupAndRestore": "save to a faster disk, or after longer epochs",
    "TensorBoard": "TensorBoard(histogram_freq=0, embeddings_freq=0), or larger numbers: each n-th epoch",
    "": "it works at the ends of epochs only: do less there, only every few epochs, or in a thread",
}


def eager(measured: Measured) -> Diagnosis | str:
    """The step runs operation by operation."""
    if not measured.model.run_eagerly:
        return "the step runs as a graph"
    pair = measured.experiments.as_graph()
    return Diagnosis(
        cause="eager",
        title="the step runs eagerly, operation by operation",
        evidence=f"run_eagerly=True: {pair.before_ms:.3g} ms per step, and {pair.after_ms:.3g} ms as a graph",
        gain=share(measured.call_ms * pair.saved, measured.breakdown.whole_ms),
        advice="model.compile(..., run_eagerly=False), and no tf.config.run_functions_eagerly(True)",
    )


def recompilation(measured: Measured) -> Diagnosis | str:
    """The model is compiled anew, so every fit traces the step again."""
    seen = measured.observation
    again = [call for call in measured.builds if call.starts_epoch and call.fit > 1]
    if not again or seen.compilations < len(again):
        return f"{seen.compilations} calls of compile after the first fit"
    return _build(
        measured, "recompilation", f"the step was built {len(again)} times more because of compile",
        "call model.compile once, before the loop, and again only after a change of trainable; change the learning "
        "rate with model.optimizer.learning_rate = ...",
    )  # fmt: skip


def retraces(measured: Measured) -> Diagnosis | str:
    seen = measured.observation
    again = [call for call in measured.builds if not (call.starts_epoch and call.fit > 1)]
    shapes = {call.shapes for call in seen.calls if call.shapes is not None}
    if not again or len(shapes) < 2:
        return f"the step was built {len(again)} times more, for {len(shapes)} shapes"
    return _build(
        measured, "retraces", f"the step was built again for new shapes, {len(shapes)} of them",
        "give all batches one shape: padded_batch(padded_shapes=...), a few lengths with "
        "tf.data.Dataset.bucket_by_sequence_length, or batch(..., drop_remainder=True), which leaves the last examples "
        "of each epoch out",
    )  # fmt: skip


def callbacks(measured: Measured) -> Diagnosis | str:
    seen, parts = measured.observation, measured.breakdown
    used = share(parts.callbacks_ms, parts.whole_ms)
    if used < CALLBACKS or not seen.callbacks_s:
        return f"callbacks take {used:.1%} of the step"
    if seen.copies_s > sum(seen.callbacks_s.values()) / 2:
        return "the callbacks copy weights; see host_copies"
    name, seconds = max(seen.callbacks_s.items(), key=lambda each: each[1])
    at_ends = seen.epoch_ends_s.get(name, 0.0) > seconds / 2
    less = LESS_AT_ENDS if at_ends else LESS_OFTEN
    return Diagnosis(
        cause="blocking_callback",
        title=f"the callback {name} keeps the next {'epoch' if at_ends else 'step'} from starting",
        evidence=f"{1e3 * seconds / seen.steps:.3g} ms per step, {used:.0%} of the step (threshold {CALLBACKS:.0%})",
        gain=used,
        advice=less.get(name, less[""]),
    )


def host_copies(measured: Measured) -> Diagnosis | str:
    seen, parts = measured.observation, measured.breakdown
    copies_ms = 1e3 * seen.copies_s / seen.steps
    used = share(parts.callbacks_ms, parts.whole_ms)
    if used < CALLBACKS or copies_ms < parts.callbacks_ms / 2:
        return f"copies of weights to the host take {copies_ms:.3g} ms per step"
    slowest = max(seen.callbacks_s, key=lambda name: seen.callbacks_s[name])
    return Diagnosis(
        cause="host_copies",
        title="weights are copied to the host in every step",
        evidence=f"{seen.copied_bytes / seen.steps / 1e6:.3g} MB and {parts.callbacks_ms:.3g} ms per step, {used:.0%} "
        f"of the step (threshold {CALLBACKS:.0%})",
        gain=used,
        advice=LESS_OFTEN.get(slowest, LESS_OFTEN[""]),
    )


def host_metrics(measured: Measured) -> Diagnosis | str:
    """A metric, loss or layer calls Python inside the step."""
    found = sorted(set(_python_ops(measured)))
    if not found:
        return "no operation of the step calls Python"
    pair = measured.experiments.without_metrics()
    gain = share(measured.call_ms * pair.saved, measured.breakdown.whole_ms)
    if gain < METRICS:
        return Diagnosis(
            cause="python_in_step",
            title="the step calls Python code",
            evidence=f"{', '.join(found)} in the graph of the step, outside the metrics",
            gain=None,
            advice="write tf.py_function and tf.numpy_function as TensorFlow operations: they copy to the host and "
            "hold Python's lock",
        )
    return Diagnosis(
        cause="host_metric",
        title="a metric runs in Python",
        evidence=f"{', '.join(found)} in the step; {pair.before_ms:.3g} ms per step with the metrics, "
        f"{pair.after_ms:.3g} ms without",
        gain=gain,
        advice="use a metric of keras.metrics, or compute it in a callback at the end of an epoch",
    )


def short_steps(measured: Measured) -> Diagnosis | str:
    """The step is so short that Keras' loop takes a good part of it."""
    parts, model = measured.breakdown, measured.model
    loop = max(parts.host_ms - parts.callbacks_ms - parts.build_ms, 0.0)
    used = share(loop, parts.whole_ms)
    if used < CALLS:
        return f"calls of the step take {used:.1%} of it"
    if model.run_eagerly:
        return "the step runs eagerly; see eager"
    if model.steps_per_execution > 1:
        return f"steps_per_execution is {model.steps_per_execution}"
    steps = min(IN_ONE_CALL, measured.batches_per_epoch)
    if steps < 2:
        return "an epoch has one batch; see short_epochs"
    return Diagnosis(
        cause="short_steps",
        title="the steps are short: Keras' loop takes a good part of each",
        evidence=f"{loop:.3g} of {parts.whole_ms:.3g} ms are Python and the start of a call (threshold {CALLS:.0%})",
        gain=share(loop * (1 - 1 / steps), parts.whole_ms),
        advice=f"model.compile(..., steps_per_execution={steps}). Keras then calls a callback once in {steps} batches",
        settings={"training.steps_per_execution": steps},
    )


def _build(measured: Measured, cause: str, title: str, advice: str) -> Diagnosis | str:
    parts = measured.breakdown
    used = share(parts.build_ms, parts.whole_ms)
    if used < BUILDS:
        return f"building the step again takes {used:.1%} of the time"
    return Diagnosis(
        cause=cause,
        title=title,
        evidence=f"tracing and compiling take {parts.build_ms:.3g} of {parts.whole_ms:.3g} ms per step (threshold "
        f"{BUILDS:.0%})",
        gain=used,
        advice=advice,
    )


def _python_ops(measured: Measured) -> Iterator[str]:
    """Yields the operations of the step that call Python."""
    model, spec = measured.model, measured.observation.spec
    if measured.replicas > 1 or model.run_eagerly:
        raise CannotMeasureError("the graph of the step is not traced under a strategy or in an eager run")
    with measurable():
        step = tf.function(lambda batch: model.train_step(batch), autograph=False)  # as Keras traces it
        graph = step.get_concrete_function(spec).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    yield from (node.op for node in nodes if node.op in PYTHON_OPS)
