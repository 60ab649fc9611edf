"""The trials of a script: it runs until its first fit, which is measured in its place, and then ends.

For the batch size, the data of the fit gets other batches. For the speed settings, it stays as it is, and the fit runs
as `tfopt accelerate` would run it with the settings of the trial.

What needs Keras or TensorFlow is imported when the script has imported them: it may set environment variables before.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import shlex
import signal
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tfopt.errors import TrainingError
from tfopt.scripts.accelerate import AccelerateHook
from tfopt.scripts.hook import script_line
from tfopt.scripts.run_script import run_script
from tfopt.tuning.limit import kept, of_json

if TYPE_CHECKING:
    from tfopt.tuning.facts import Facts
    from tfopt.tuning.first_fit import Fit

TERMINATED = 128 + signal.SIGTERM
OF_TENSORFLOW = re.compile(r"[IWEF]\d{4} |WARNING: All log messages")
SEED = 0  # of the trials of scripts that set none: the losses of two trials are compared


def train(
    workload: dict[str, Any], trial: dict[str, Any], limit: dict[str, Any] | None, directory: str
) -> dict[str, Any]:
    """As `tfopt.tuning.trial.train`, for a script."""
    with kept(of_json(limit), Path(directory)) as used:

        def measure(fit: Fit) -> dict[str, Any]:
            from tfopt.tuning.first_fit import in_an_epoch, training_of
            from tfopt.tuning.trial import Trial, measured

            training, examples = training_of(fit, rebatches=True)
            found = measured(training, Trial(**trial), used, Path(directory))
            return {**found, "examples": in_an_epoch(fit, training, examples), "largest": None}

        return _at_first_fit(workload, Path(directory), measure)


def compare(
    workload: dict[str, Any], side: dict[str, Any], limit: dict[str, Any] | None, directory: str
) -> dict[str, Any]:
    """As `tfopt.tuning.comparison.compare`, for a script. Its settings are those of `command`."""
    hook = accelerated(side["settings"])
    with kept(of_json(limit), Path(directory)) as used:

        def measure(fit: Fit) -> dict[str, Any]:
            from tfopt.tuning.comparison import Side, compared
            from tfopt.tuning.first_fit import facts_of_fit, training_of

            scope = contextlib.nullcontext(True) if hook is None else hook.around_fit(fit.model, dict(fit.given))
            with scope as has_step:
                if hook is not None and not has_step:
                    skipped = [each.reason for each in hook.report(None).skipped]
                    raise TrainingError(f"tfopt's step must fit under the script. Received: {'; '.join(skipped)}.")
                training, examples = training_of(fit, rebatches=False)
                return {
                    **compared(training, Side(**side), used),
                    "facts": None if hook else facts_of_fit(fit, training, examples).to_dict(),
                }

        return _at_first_fit(workload, Path(directory), measure, hook)


def accelerated(settings: Mapping[str, Any]) -> AccelerateHook | None:
    """Returns what `tfopt accelerate` puts under a script for some settings; None if it stays as it is.

    Example:
        >>> accelerated({"step": "tfopt", "steps_per_execution": 50}).steps_per_execution, accelerated({})
        (50, None)
    """
    if not settings:
        return None
    return AccelerateHook(
        precision=settings.get("precision", "float32"),
        xla=settings.get("jit_compile", True),
        steps_per_execution=settings.get("steps_per_execution", "auto"),
    )


def command(settings: Mapping[str, Any], script: str, words: Sequence[str]) -> str:
    """Returns the command that runs a script with some settings.

    Example:
        >>> command({"step": "tfopt", "steps_per_execution": 50, "jit_compile": False}, "train.py", ["--epochs", "3"])
        'tfopt accelerate --no-xla --steps-per-execution 50 train.py --epochs 3'
    """
    hook = accelerated(settings)
    if hook is None:
        return shlex.join(["python", script, *words])
    flags = [] if hook.precision == "float32" else ["--precision", hook.precision]
    flags += [] if hook.xla else ["--no-xla"]
    steps = hook.steps_per_execution
    flags += [] if steps == "auto" else ["--steps-per-execution", str(steps)]
    return shlex.join(["tfopt", "accelerate", *flags, script, *words])


def lines(settings: Mapping[str, Any], facts: Facts) -> tuple[str, ...]:
    """Returns what to change in a script, so that it trains with some settings without `tfopt accelerate`.

    Returns: The changes; none where the settings are empty or tfopt's step cannot be put at the line that compiles.
    """
    if not settings or not facts.compiled_at:
        return ()
    found, precision = [], settings.get("precision", "float32")
    if precision != "float32":
        found.append(
            f"before the model is built: keras.config.set_dtype_policy({precision!r}); its last layer takes "
            "dtype='float32'"
        )
    of_plan = {  # as `tfopt accelerate` has them
        "precision": precision,
        "strategy": "none",
        "jit_compile": settings.get("jit_compile", facts.values["jit_compile"]),
        "steps_per_execution": settings.get("steps_per_execution", "auto"),
        "sparse_embedding_gradients": True,
        "stop_on_nan": False,
        "memory_growth": False,
    }
    words = ", ".join(f"{name}={value!r}" for name, value in of_plan.items())
    given = ["optimizer='rmsprop'"] if "optimizer" not in facts.compiled_with else []
    given += [f"{name}=..." for name in facts.compiled_with if name not in ("jit_compile", "steps_per_execution")]
    found.append(
        f"{facts.compiled_at}, in place of model.compile(...), with its own values for the dots: tfopt.compile(model, "
        f"tfopt.plan(tfopt.TrainingConfig({words})), {', '.join(given)})"
    )
    return tuple(found)


def _at_first_fit(
    workload: Mapping[str, Any],
    directory: Path,
    measure: Callable[[Fit], dict[str, Any]],
    hook: AccelerateHook | None = None,
) -> dict[str, Any]:
    """Runs a script until its first fit, and returns what was measured there."""

    def begin(keras: ModuleType) -> None:
        keras.utils.set_random_seed(SEED)
        if hook is not None and hook.precision != "float32":
            hook.begin(keras)

    first = _FirstFit(measure, hook)
    errors: list[BaseException] = []
    words = list(workload["words"])
    code = run_script(workload["name"], words, first, when_imported=begin, on_error=errors.append)
    if code == TERMINATED:  # not the script's end, but that of a trial that hangs or is not worth its time
        raise SystemExit(code)
    if first.error is not None:
        raise first.error
    if first.found is None:
        received = "no call of it"
        if code:
            cause = _cause(errors[-1]) if errors else _last_line(directory)  # argparse has said it there
            received = f"{workload['name']}, which ended with exit code {code} before{cause and f': {cause}'}"
        raise TrainingError(
            f"The script must train with keras.Model.fit. Received: {received.rstrip('.')}. Run it without tfopt first."
            " With --directory, the log.txt of the trial has its output."
        )
    return first.found


def _cause(error: BaseException) -> str:
    words = " ".join(str(error).split())[:300]
    return words if isinstance(error, SystemExit) else f"{type(error).__name__}: {words}"


def _last_line(directory: Path) -> str:
    """Returns what the process of a trial has said last."""
    from tfopt.trials.process import LOG

    log = directory / LOG
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    said = [" ".join(each.split())[:300] for each in lines if each.strip() and not OF_TENSORFLOW.match(each)]
    return said[-1] if said else ""


class _FirstFit:
    """A `FitHook` that measures the first fit of the script, and then ends the script."""

    def __init__(self, measure: Callable[[Fit], dict[str, Any]], accelerated: AccelerateHook | None) -> None:
        self._measure, self._accelerated = measure, accelerated
        self._compiled: weakref.WeakKeyDictionary[Any, tuple[str, list[str]]] = weakref.WeakKeyDictionary()
        self.found: dict[str, Any] | None = None
        self.error: Exception | None = None

    def compile(self, model: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._accelerated is None:
            original(*args, **kwargs)
        else:
            self._accelerated.compile(model, original, args, kwargs)
        self._compiled[model] = script_line(), [*inspect.signature(original).bind(*args, **kwargs).arguments]

    def fit(self, model: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.found is not None or self.error is not None:  # the script has gone on after its end
            raise SystemExit(0)
        at = script_line()
        from tfopt.tuning.first_fit import Fit

        try:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            compiled_at, compiled_with = self._compiled.get(model, (at, None))
            fit = Fit(model=model, original=original, given=given, compiled_at=compiled_at, at=at)
            self.found = self._measure(replace(fit, compiled_with=compiled_with))
        except Exception as error:  # noqa: BLE001 - it is the outcome of the trial
            self.error = error
        raise SystemExit(0)
