"""Everything that was measured of a training, for the rules: what was watched, and the experiments."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.diagnosis.experiments import CannotMeasureError, Experiments, Pair, measurable, usual_ms
from tfopt.diagnosis.input_time import InputTime, input_time, start_saved
from tfopt.diagnosis.observation import Observation, StepCall
from tfopt.hardware import Hardware
from tfopt.profiling.cost import Efficiency, TrainCost, efficiency, train_cost
from tfopt.report import Diagnosis, StepBreakdown

# The step competes with the input pipeline for the processor if it takes so much longer than alone.
COMPETES, COMPETES_MS = 1.15, 0.3
# The starts of epochs are measured with another input if they take this share of the step; in whole epochs, if those
# are no longer than this.
STARTS, EPOCH_MS = 0.05, 3000.0
# Each replica is timed in so many steps.
ROUNDS = 5
# A change that saves less of the step than this is not advised.
WORTH = 0.05


class AbsentError(Exception):
    """The cause that a rule looks for is absent; the message is the figure that says so."""


@dataclass
class Measured:
    """The measurements of one training. The experiments run when a rule asks for them."""

    observation: Observation  # what was watched
    hardware: Hardware

    def __post_init__(self) -> None:
        seen = self.observation
        if seen.model is None or seen.batch is None or len(seen.calls) < 2:
            raise CannotMeasureError(
                f"fit must run at least 2 steps. Received: {seen.steps} steps. Train longer, or on more batches"
            )
        self.experiments = Experiments(seen.model, seen.batch, seen.spec)

    @property
    def model(self) -> keras.Model:
        assert self.observation.model is not None  # checked in __post_init__
        return self.observation.model

    @property
    def batch_size(self) -> int:
        first = next(
            each for each in keras.tree.flatten(self.observation.batch) if hasattr(each, "shape") or _parts(each)
        )
        return sum(int(part.shape[0]) for part in _parts(first) or [first])

    @property
    def batch_spec(self) -> Any:
        """The shapes and types of a batch, over all replicas."""

        def spec(value: Any) -> tf.TensorSpec | None:
            if value is None:  # an optional input that is missing
                return None
            parts = _parts(value) or [value]
            return tf.TensorSpec((sum(int(each.shape[0]) for each in parts), *parts[0].shape[1:]), parts[0].dtype)

        return keras.tree.map_structure(spec, self.observation.batch)

    @property
    def replicas(self) -> int:
        return int(self.model.distribute_strategy.num_replicas_in_sync)

    @functools.cached_property
    def input(self) -> InputTime | CannotMeasureError:
        """The data set alone, or why it cannot be measured."""
        try:
            return input_time(self.observation.data)
        except CannotMeasureError as error:
            return error

    @functools.cached_property
    def replica_ms(self) -> list[float]:
        """The time of each replica alone; empty with one replica."""
        if self.replicas < 2:
            return []
        with measurable():
            return replica_ms(self.model, self.observation.batch)

    @functools.cached_property
    def breakdown(self) -> StepBreakdown:
        """Where the time of a step goes. Each part is measured by itself."""
        return _breakdown(self)

    @functools.cached_property
    def builds(self) -> list[StepCall]:
        """The calls in which the step was traced or compiled again."""
        return self.observation.builds(self.experiments.in_graph().before_ms / 1e3)

    @functools.cached_property
    def steady(self) -> list[StepCall]:
        """The calls to measure: none that builds the step, and if possible none that begins an epoch."""
        seen = self.observation
        usual = [call for call in seen.settled if call not in self.builds and call is not seen.calls[0]]
        return [call for call in usual if not call.starts_epoch] or usual or seen.calls

    @functools.cached_property
    def call_ms(self) -> float:
        """Time of a step that has its batch in hand: the start of the call, and the computation."""
        if self.competes_in_call:
            return max(self.period_ms - self.wait_ms - self.gap_ms, 0.0)
        timed = [call for call in self.steady if call.in_hand]
        timed = timed or [call for call in self.steady if call.wait_s is not None]
        return _mean_ms(timed, "call_s") if timed else self.experiments.in_graph().before_ms

    @functools.cached_property
    def competes_in_call(self) -> bool:
        """Whether a call whose batches were taken before it does not take as long as the others.

        In a call of several steps, the input makes the batches of the next ones, and competes for the processor. A
        source in Python competes for Python's lock.
        """
        return self.model.steps_per_execution > 1 or comes_from_python(self.observation.data)

    @functools.cached_property
    def efficiency(self) -> Efficiency:
        with measurable():
            return efficiency(self.model, self.batch_spec, self.breakdown.step_ms, self.hardware)

    @functools.cached_property
    def cost(self) -> TrainCost:
        """The operations, bytes and kernels of a step, over all replicas."""
        with measurable():
            return train_cost(self.model, self.batch_spec)

    @functools.cached_property
    def wait_ms(self) -> float:
        """Mean wait of a step that begins no epoch."""
        waits = [call for call in self.steady if call.wait_s is not None and not call.starts_epoch]
        wait = _mean_ms(waits, "wait_s") if waits else 0.0
        if comes_from_python(self.observation.data):  # to take a batch, Python's lock is waited for once more
            wait = min(wait, max(self.period_ms - self.gap_ms - self.experiments.in_graph().before_ms, 0.0))
        return wait

    @functools.cached_property
    def start_ms(self) -> float:
        """Time per step of the starts of epochs, beyond a usual step: buffers fill, and threads start and end."""
        firsts = [call for call in self.observation.settled if call.starts_epoch and call not in self.builds]
        firsts = [call for call in firsts if call is not self.observation.calls[0]]
        untouched = [call for call in firsts if call.is_left_alone]
        if untouched:
            beyond = [1e3 * call.period_s - self.period_ms * call.steps for call in untouched]
        else:
            beyond = [1e3 * call.wait_s - self.wait_ms * call.steps for call in firsts if call.wait_s is not None]
        # Not the mean: once in a while, the end of an old iterator waits for its thread that tunes, which sleeps.
        return max(min(beyond), 0.0) / self.batches_per_epoch if beyond else 0.0

    @functools.cached_property
    def period_ms(self) -> float:
        """Mean time of a step that is left alone, with everything up to the next."""
        return _mean_ms(self.left_alone, "period_s")

    @functools.cached_property
    def left_alone(self) -> list[StepCall]:
        """The calls that ran as they do when nothing watches."""
        return [call for call in self.steady if call.is_left_alone] or self.steady

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of an epoch, as far as it is known."""
        seen = self.observation
        epochs = sum(call.starts_epoch for call in seen.calls) or 1
        return seen.batches_per_epoch or max(seen.steps // epochs, 1)

    def gain_of_examples(self, factor: int) -> tuple[float, float]:
        """Returns the share of the time per example that a larger batch saves, and how many times as long a step is."""
        parts, pair = self.breakdown, self.experiments.with_examples(factor)
        rest = parts.step_ms - self.call_ms - parts.input_ms
        new = (rest + self.call_ms * (1 - pair.saved)) / factor + parts.input_ms
        return min(max(1 - new / parts.step_ms, 0.0), 1.0), 1 - pair.saved

    def gain_of_input(self, name: str, change: Callable[[InputTime], tf.data.Dataset]) -> float:
        """Returns the share of the step that another input saves: the step is timed with either."""
        if isinstance(self.input, CannotMeasureError):
            raise self.input
        before, parts = self.input.dataset, self.breakdown
        starts, batches = share(self.start_ms, parts.step_ms), self.batches_per_epoch
        with measurable():
            after = change(self.input)
            if starts >= STARTS and batches * parts.step_ms <= EPOCH_MS:
                pair = self.experiments.whole_epochs(name, before, after, self._gap_s, batches)
                return share(self.period_ms + self.start_ms, parts.step_ms) * max(pair.saved, 0.0)
            pair = self.experiments.other_input(name, before, after, self._gap_s)
        fill = batches if self.input.has_cache else 0
        saved = starts * start_saved(before, after, fill) if starts >= STARTS else 0.0
        return saved + share(self.period_ms, parts.step_ms) * max(pair.saved, 0.0)

    def gain_of_other_xla(self) -> tuple[float, str]:
        """Returns the share of the step that the other setting of jit_compile saves, and the figures."""
        pair = self.experiments.other_xla()
        if self.model.jit_compile:
            return self.gain_of(pair, "without XLA")
        return self.gain_of(pair, "with XLA", "compiling")

    def gain_of(self, pair: Pair, form: str, building: str = "") -> tuple[float, str]:
        """Returns the share of the step that another form of its computation saves, and the figures.

        Args:
            pair: The step as it is, and in the other form.
            form: The other form, in words.
            building: What takes longer once in the other form, in a word. The gain is then less by it, if the length of
                the training is known.
        """
        figures, seen = f"{pair.after_ms:.3g} ms {form}, {pair.before_ms:.3g} ms as it is", self.observation
        saved_ms, build_ms = self.breakdown.compute_ms * pair.saved, 1e3 * pair.build_s
        if building and saved_ms > 0 and build_ms > 0:
            figures += f"; {building} takes {pair.build_s:.2g} s once, which {build_ms / saved_ms:,.0f} steps win back"
            if seen.length_is_known:
                total = max(seen.epochs * self.batches_per_epoch, seen.steps)
                saved_ms -= build_ms / total
                figures += f", of {total:,} of this training"
        return share(saved_ms, self.breakdown.step_ms), figures

    def gain_of_arrays(self) -> float:
        """Returns the share of the step that is saved if the examples are in arrays."""
        parts = self.breakdown
        batches = max(min(self.batches_per_epoch, int(EPOCH_MS / parts.step_ms)), 1)
        after = self.experiments.from_arrays(self._gap_s, batches)
        return share(self.period_ms + self.start_ms - after, parts.step_ms)

    @functools.cached_property
    def gap_ms(self) -> float:
        """Time per step between two calls."""
        between = sum(call.period_s - call.call_s - (call.wait_s or 0.0) for call in self.left_alone)
        return 1e3 * max(between, 0.0) / sum(call.steps for call in self.left_alone)

    @property
    def _gap_s(self) -> float:
        """Seconds between two calls."""
        return self.gap_ms * self.model.steps_per_execution / 1e3


def _breakdown(measured: Measured) -> StepBreakdown:
    seen, forms = measured.observation, measured.experiments.in_graph()
    gap, wait, call = measured.gap_ms, measured.wait_ms, measured.call_ms
    contention = call - forms.before_ms
    if contention < (COMPETES - 1) * forms.before_ms + COMPETES_MS:
        contention = 0.0
    if not isinstance(measured.input, CannotMeasureError):
        contention = min(contention, measured.input.batch_cpu_ms)  # more comes from other programs
    elif not comes_from_python(seen.data):
        contention = 0.0  # arrays cost nothing
    dispatch = (call - contention) * max(forms.saved, 0.0)
    build = sum(max(1e3 * each.call_s - call * each.steps, 0.0) for each in measured.builds) / seen.steps
    after = 1e3 * seen.after_epochs_s / seen.steps
    exchange, replicas, unavailable = 0.0, [], {}
    if measured.replicas > 1:
        try:
            replicas = measured.replica_ms
            exchange = min(exchange_ms(measured.model), max(call - max(replicas), 0.0))
            wait += call * max(measured.experiments.handing_over().saved, 0.0)
        except CannotMeasureError as error:
            unavailable["replica_ms"] = str(error)
    alone = measured.input
    if isinstance(alone, CannotMeasureError):
        unavailable["input_alone_ms"] = str(alone)
    return StepBreakdown(
        step_ms=measured.period_ms + measured.start_ms + build + after,
        input_ms=wait + measured.start_ms + contention,
        host_ms=gap + dispatch + build + after,
        compute_ms=max(call - dispatch - contention - exchange, 0.0),
        communication_ms=exchange,
        steps=seen.steps,
        batch_size=measured.batch_size,
        input_alone_ms=None if isinstance(alone, CannotMeasureError) else alone.batch_ms,
        callbacks_ms=1e3 * sum(seen.callbacks_s.values()) / seen.steps,
        build_ms=build,
        traces=sum(call.traces for call in seen.calls[1:]),
        replica_ms=replicas,
        unavailable=unavailable,
    )


def replica_ms(model: keras.Model, batch: Any) -> list[float]:
    """Returns the milliseconds that each replica of this process takes for loss and gradients, without an exchange.

    Each replica reads the clock before and after its own work, so a slow replica shows although all run together.
    """
    strategy = model.distribute_strategy

    def work(data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        begin = tf.timestamp()
        with tf.control_dependencies([begin]), tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=True)
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        with tf.control_dependencies([each for each in gradients if isinstance(each, tf.Tensor)]):
            return tf.timestamp() - begin

    run = tf.function(lambda data: strategy.run(work, args=(data,)))
    run(batch)
    rounds = [strategy.experimental_local_results(run(batch)) for _ in range(ROUNDS)]
    return [1e3 * sorted(float(each) for each in times)[ROUNDS // 2] for times in zip(*rounds, strict=True)]


def exchange_ms(model: keras.Model) -> float:
    """Returns the milliseconds of one sum of tensors like the gradients over all replicas, with nothing else to do."""
    strategy = model.distribute_strategy

    def work() -> Any:
        like = [tf.ones_like(variable.value) for variable in model.trainable_variables]
        replica = tf.distribute.get_replica_context()
        return tf.add_n([tf.reduce_sum(each) for each in replica.all_reduce(tf.distribute.ReduceOp.SUM, like)])

    run = tf.function(lambda: strategy.run(work))

    def call() -> None:
        for each in strategy.experimental_local_results(run()):
            each.numpy()

    begin = time.perf_counter()
    call()
    return usual_ms(call, seconds=min(0.5, 10 * (time.perf_counter() - begin)))


def is_worth(found: Diagnosis) -> bool:
    """Returns whether a change saves enough to be advised; an unknown gain may be enough."""
    return found.gain is None or found.gain >= WORTH


def comes_from_python(data: Any) -> bool:
    """Returns whether Python code makes the batches, one at a time.

    Example:
        >>> comes_from_python(iter([])), comes_from_python([1.0])
        (True, False)
    """
    return isinstance(data, Iterator | keras.utils.PyDataset)


def share(part: float, whole: float) -> float:
    """Returns a share between 0 and 1.

    Example:
        >>> share(3, 4), share(-1, 4)
        (0.75, 0.0)
    """
    return min(max(part / whole, 0.0), 1.0) if whole else 0.0


def _mean_ms(calls: list[StepCall], name: str) -> float:
    return 1e3 * sum(getattr(call, name) for call in calls) / sum(call.steps for call in calls)


def _parts(value: Any) -> list[Any]:
    return list(value.values) if isinstance(value, tf.distribute.DistributedValues) else []
