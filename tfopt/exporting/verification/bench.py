"""Benchmarks models side by side: artifacts of tfopt and models of other programs, each in processes of its own.

Every model has a process for each number of threads. All of them are loaded before the first call is timed, and wait
idle while another has its turn. A model that fails says why in its row, and the others go on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Lt, MinLen

from tfopt.atomic.scratch import scratch_directory
from tfopt.errors import ArtifactError, ConfigError
from tfopt.exporting.config import DEFAULT_SIGNATURE
from tfopt.exporting.verification.candidate import Candidate
from tfopt.exporting.verification.measured import missing_instructions
from tfopt.exporting.verification.scoring import Scoreboard, chunks
from tfopt.exporting.verification.verify import Gate, OnStep
from tfopt.hardware import detect
from tfopt.report.benchmark import BenchmarkReport, best_of
from tfopt.report.ranking import judged, undecided
from tfopt.settings.validation import check_value
from tfopt.tasks.scorer import Metric, check_metric, higher_is_better
from tfopt.tasks.scores import Score
from tfopt.timing import in_turns

PAUSE_S = 0.05  # before a turn: threads of ONNX Runtime spin for some 30 ms after their last call
ROUNDS = 9  # so many that the interval of the ratios leaves out a round that something else has disturbed
MORE_ROUNDS = 18  # with 27, it leaves out seven at each end
BatchSizes = Annotated[tuple[Annotated[int, Ge(1)], ...], MinLen(1)]
Threads = Annotated[tuple[Annotated[int, Ge(0)], ...], MinLen(1)]
Seconds = Annotated[float, Ge(0), Lt(math.inf)]
OpenSize = Annotated[int, Ge(1)] | None


def benchmark(
    models: Sequence[str | Path],
    *,
    batch_sizes: Sequence[int] = (1,),
    threads: Sequence[int] = (0,),
    inputs: Any = None,
    open_size: int | None = None,
    data: Any = None,
    metric: str | Metric | Score = "accuracy",
    baseline: str | Path | None = None,
    gate: float | None = None,
    seconds: float = 0.15,
    trusted: bool = False,
    on_step: OnStep = lambda words: None,
) -> BenchmarkReport:
    """Measures models side by side in fresh processes, and names the fastest and the smallest on this machine.

    All models are timed in turns, so a change of the machine's speed favours none. A model that fails has the reason in
    its row.

    Args:
        models: Artifacts of `tfopt.export` in any format, SavedModels, and files of any format that tfopt writes, such
            as model.onnx. A .keras file is exported with Keras' own `model.export`, and that SavedModel is measured.
        batch_sizes: Numbers of examples in a call. A model with a fixed batch size has only calls of that size.
        threads: Numbers of intra-op threads. 0 is the default of the model's runtime (in LiteRT one for each core), and
            one above the number of cores means all cores.
        inputs: Examples for the timed calls: an array, or arrays by the name of the input. None draws them: for an
            artifact as its manifest says, for another model as for the first one with such inputs, or else numbers
            from 0 to 1.
        open_size: The size of every axis that a model leaves open, besides the batch. None means that in an
            artifact's manifest, and 64 for other models.
        data: Labelled examples for the scores, as in `tfopt.verify`.
        metric: The measure for these examples, as in `tfopt.verify`.
        baseline: The one of the models whose score the others are compared with. None means the first artifact with
            float weights or .keras file, or the first model if there is neither.
        gate: The least share of the baseline's score that a model must have to be named, for example 0.99, the rule of
            MLPerf. The share of a score of which less is better, such as an error, is the baseline's score by the
            model's own.
        seconds: How long each model is timed in one round. There are nine rounds, and eighteen more for those models
            between which nine do not decide. With 0, a round has three calls, and there are no more than nine.
        trusted: Whether the models may touch files and the network when they run, and a .keras file may hold code.
            Otherwise such a model is refused before anything of it runs.
        on_step: Is called with a few words when a step begins.
    Returns: A report. `report.fastest` has an entry for each batch size, `report.smallest` is a name.
    Raises:
        ConfigError: A setting is out of range, `baseline` is none of the models, there is a gate but no data, or the
            data or the inputs do not fit.
        ArtifactError: A path does not exist, or no model could be measured. The message has the reasons.
    Example:
        >>> import keras, tempfile
        >>> from tfopt.exporting import ExportConfig, export
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> directory = tempfile.mkdtemp()
        >>> paths = [f"{directory}/{name}" for name in ("saved_model", "onnx")]
        >>> for path in paths:
        ...     _ = export(model, path, ExportConfig(format=Path(path).name))
        >>> report = benchmark(paths, seconds=0)
        >>> report.ok, report.smallest
        (True, 'onnx')
    """
    sizes = tuple(dict.fromkeys(check_value("batch_sizes", batch_sizes, BatchSizes)))
    machine = detect()
    asked = check_value("threads", threads, Threads)
    counts = tuple(dict.fromkeys(min(count, machine.logical_cores) for count in asked))
    check_value("open_size", open_size, OpenSize)
    check_value("seconds", seconds, Seconds)
    check_value("gate", gate, Gate)
    check_metric(metric)
    if gate is not None and data is None:
        raise ConfigError(f"gate needs labelled examples. Received: gate={gate} without data. Pass data (--data).")
    found = candidates(models, trusted)
    first = _baseline(found, baseline)
    given = given_inputs(inputs)
    with ExitStack() as stack:
        directory = stack.enter_context(scratch_directory())
        for number, each in enumerate(found):
            on_step(f"loading {each.path}")
            with each.noting_failure():
                each.open(directory / str(number))
                each.start(stack, counts)
        for each in sorted(running(found), key=lambda each: each.manifest is None):  # artifacts know their inputs
            with each.noting_failure():
                each.choose_inputs(running(found), given, open_size)
                each.make_batches(sizes)
        if first is None:
            first = next((each for each in running(found) if each.is_float), next(iter(running(found)), None))
        if data is not None and first is not None and not first.failure:
            _score(found, first, data, metric, on_step)
        for size in sizes:
            on_step(f"timing calls of batch {size}")
            _time(found, size, counts, seconds, on_step)
        rows = tuple(each.row(sizes, None if data is None else first, higher_is_better(metric)) for each in found)
    if not running(found):
        reasons = " ".join(f"{each.name}: {each.failure}" for each in found)
        raise ArtifactError(f"At least one model must run. Received: {len(found)} that cannot be measured. {reasons}")
    warnings = cautions(running(found))
    if gate is not None and first is not None and all(row.score_share is None for row in rows if not row.failure):
        reason = "could not be measured" if first.failure else "has no score above 0"
        warnings.append(f"no model can reach the gate: the baseline, {first.name}, {reason}")
    on_gpu = any("GPU" in each.loaded["devices"] for each in running(found))
    return judged(
        rows,
        device=machine.device(on_gpu),
        cores=machine.logical_cores,
        batch_sizes=sizes,
        threads=counts,
        rounds=ROUNDS,
        seconds=seconds,
        baseline=None if data is None or first is None else first.name,
        higher_is_better=higher_is_better(metric),
        gate=gate,
        warnings=warnings,
    )


def candidates(models: str | Path | Sequence[str | Path], trusted: bool) -> list[Candidate]:
    """Returns the models of these paths. Their names are the shortest ends of the paths that tell them apart."""
    paths = list(dict.fromkeys(map(Path, [models] if isinstance(models, str | Path) else models)))
    if not paths:
        raise ConfigError("models must be at least one path. Received: none. Name artifacts or files of models.")
    for path in paths:
        if not path.exists():
            raise ArtifactError(f"A model must exist. Received: {path}, which does not. Check the path.")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [Candidate(path, str(Path(*path.parts[-depth:])), trusted) for path in paths]


def _baseline(found: Sequence[Candidate], given: str | Path | None) -> Candidate | None:
    if given is None:
        return None
    named = next((each for each in found if each.path.resolve() == Path(given).resolve()), None)
    if named is None:
        raise ConfigError(
            f"baseline must be one of the models. Received: baseline={str(given)!r}. The models are "
            f"{', '.join(str(each.path) for each in found)}."
        )
    return named


def given_inputs(inputs: Any) -> dict[str, np.ndarray]:
    """Returns given inputs as arrays by name."""
    if inputs is None:
        return {}
    arrays = {str(name): np.asarray(value) for name, value in inputs.items()} if isinstance(inputs, Mapping) else {}
    arrays = arrays or {"inputs": np.asarray(inputs)}
    sizes = {value.shape[0] if value.ndim else 0 for value in arrays.values()}
    if len(sizes) > 1 or 0 in sizes or any(value.dtype.kind not in "fiubSU" for value in arrays.values()):
        shown = {name: (value.dtype.name, value.shape) for name, value in arrays.items()}
        raise ConfigError(
            f"inputs must be an array, or arrays by the name of the input, with as many examples each. Received: "
            f"{shown}. Pass one array if the models have one input."
        )
    return arrays


def running(found: Sequence[Candidate]) -> list[Candidate]:
    """Returns the models that have not failed."""
    return [each for each in found if not each.failure]


def _score(
    found: Sequence[Candidate], baseline: Candidate, data: Any, metric: str | Metric | Score, on_step: OnStep
) -> None:
    """Scores the models on labelled data, chunk by chunk."""
    known = {} if baseline.manifest is None else baseline.manifest.signature.outputs
    ops = {name: known[name].op if name in known else None for name in baseline.outputs}
    scoreboard = Scoreboard(metric, ops)
    done = 0
    for inputs, labels in chunks(data, baseline.specs):
        on_step(f"scoring, {done:,} examples done")
        done += len(next(iter(inputs.values())))
        outputs: dict[Candidate, dict[str, np.ndarray]] = {}
        for each in running([baseline, *(other for other in found if other is not baseline)]):
            with each.noting_failure():
                own = each.predict(inputs, baseline)
                for name, like in next(iter(outputs.values()), own).items():
                    if own[name].size != like.size or (own[name].dtype.kind == "f" and np.isnan(own[name]).any()):
                        raise ArtifactError(
                            f"The outputs must be numbers, as many as those of the baseline. Received: {name!r} "
                            f"{own[name].shape} for {like.shape}, or NaN among them."
                        )
                outputs[each] = own
        if not outputs:
            return
        scoreboard.add(labels, outputs, next(iter(outputs)))
    for each, scores in scoreboard.scores().items():
        each.scores = scores


def _time(found: Sequence[Candidate], size: int, threads: Sequence[int], seconds: float, on_step: OnStep) -> None:
    """Times the calls of one batch size in turns: every model on every number of threads, then those close to the best.

    Of these, each model counts with its best number of threads.
    """
    sides = [(each, count) for each in running(found) if size in each.batches for count in threads]
    pause = PAUSE_S if len(sides) > 1 else 0.0

    def take_turns(sides: Sequence[tuple[Candidate, int]], rounds: int) -> None:
        turns = in_turns([partial(each.time, size, count, seconds, pause) for each, count in sides], rounds)
        for (each, count), calls in zip(sides, turns, strict=True):
            each.calls_ms.setdefault((size, count), []).extend(calls)

    if sides:
        take_turns(sides, ROUNDS)
    bests = {each: best for each, _ in sides if not each.failure and (best := best_of(each.times, size))}
    close = undecided({each: best.round_ms for each, best in bests.items()}) if seconds and bests else []
    if close:
        on_step(f"more rounds of batch {size} for {', '.join(each.name for each in close)}")
        take_turns([(each, bests[each].threads) for each in close], MORE_ROUNDS)


def cautions(found: Sequence[Candidate]) -> list[str]:
    """Returns what to know of the models before one is taken: inputs of other sizes than the first's, wrong results."""
    sizes = {each: sorted(str(spec.shape) for spec in each.drawn.values()) for each in found}
    unlike = [
        f"{each.name} was timed on inputs of the shape {' and '.join(own)}, and {found[0].name} on "
        f"{' and '.join(sizes[found[0]])}"
        for each, own in sizes.items()
        if own != sizes[found[0]]
    ]
    if unlike and any(None in (spec.shape or ())[1:] for each in found for spec in each.specs.values()):
        unlike.append("pass open_size (--open-size) or inputs (--inputs) to time all models on the same sizes")
    missing = {each.name: missing_instructions(each.manifest, DEFAULT_SIGNATURE) for each in found if each.manifest}
    no_numbers = [
        f"{each.name}: its outputs hold NaN on the inputs of the timed calls" for each in found if each.has_nan
    ]
    return [*unlike, *(f"{name}: {problem}" for name, problem in missing.items() if problem is not None), *no_numbers]
