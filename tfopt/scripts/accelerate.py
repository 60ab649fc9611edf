"""Puts tfopt's training step under an unmodified script.

What the script computes stays as it is: Keras compiles the model, prepares the data in its own order and calls the
callbacks. Only the function that runs the steps is replaced, by one that makes several steps in a call into
TensorFlow. A fit whose callbacks act on each batch still has one step per call. XLA stays as Keras chose it.

What needs Keras or TensorFlow is imported inside the functions, which run when the script has imported them: a script
may set environment variables before, and Keras may run on another backend, where TensorFlow stays out.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from tfopt.errors import TfoptError
from tfopt.report import Change, PassReport, Skip
from tfopt.scripts.hook import script_line
from tfopt.scripts.run_script import run_script

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfopt.hardware import Hardware
    from tfopt.training import Plan


@dataclass(frozen=True, kw_only=True)
class Accelerated:
    """The end of a script under `accelerate`."""

    exit_code: int
    report: PassReport  # what was applied to each fit, and what could not be, by the lines of the script


def accelerate(
    path: str,
    arguments: Sequence[str],
    *,
    precision: str = "float32",
    xla: bool = True,
    steps_per_execution: Literal["auto"] | int = "auto",
) -> Accelerated:
    """Runs a script that knows nothing of tfopt, with tfopt's training step in each `fit` that can have it.

    The script's models are built with the dtype policy `precision`; "float32" leaves it as it is, and others, also
    "auto", change the weights beyond rounding. XLA may compile the step only where Keras chose it, and with `xla`.
    A fit in which something looks at each step has one step per call, whatever `steps_per_execution` is.

    Raises:
        ConfigError: There is no such script; see `run_script`.
    Example:
        >>> import pathlib, tempfile
        >>> text = '''
        ... import keras, numpy as np
        ... model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        ... model.compile("sgd", "mse")
        ... model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
        ... '''
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     script = pathlib.Path(directory, "train.py")
        ...     _ = script.write_text(text)
        ...     done = accelerate(str(script), [])
        >>> done.exit_code, done.report.changed[0].detail
        (0, "tfopt's step, 10 steps per call into TensorFlow, XLA off")
    """
    hook = AccelerateHook(precision=precision, xla=xla, steps_per_execution=steps_per_execution)
    with contextlib.ExitStack() as at_end:

        def begin(keras: ModuleType) -> None:
            if keras.config.backend() != "tensorflow":
                return
            at_end.callback(keras.config.set_dtype_policy, keras.config.dtype_policy())
            hook.begin(keras)

        code = run_script(path, arguments, hook, when_imported=None if precision == "float32" else begin)
    return Accelerated(exit_code=code, report=hook.report(None if path == "-m" else path))


@dataclass
class AccelerateHook:
    """Puts the step under each model that the script compiles, and decides the steps per execution of each fit."""

    precision: str = "float32"
    xla: bool = True
    steps_per_execution: Literal["auto"] | int = "auto"
    _changed: dict[Change, int] = field(default_factory=dict)
    _skipped: list[Skip] = field(default_factory=list)
    _plans: weakref.WeakKeyDictionary[Any, Plan] = field(default_factory=weakref.WeakKeyDictionary)
    _hardware: Hardware | None = None
    _policy: str = "float32"
    _fits: int = 0

    def begin(self, keras: ModuleType) -> None:
        """Sets the dtype policy that the script's models are built with."""
        decided = self._plan()
        self._policy = decided.precision
        keras.config.set_dtype_policy(self._policy)
        reason = next(each.reason for each in decided.decisions if each.setting == "precision")
        self._changed[Change(name="the script", kind="precision", detail=f"{decided.precision}: {reason}")] = 1

    def compile(
        self, model: keras.Model, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Lets Keras compile the model, and puts the step under it."""
        import keras

        if keras.config.backend() != "tensorflow":
            original(*args, **kwargs)
            reason = f"Keras runs on {keras.config.backend()}, tfopt on TensorFlow. Set KERAS_BACKEND=tensorflow"
            self._skip(Skip(name=script_line(), kind=type(model).__name__, reason=reason))
            return
        from tfopt.scripts.obstacles import gpus_unused, obstacle
        from tfopt.training.step.runtime import uninstall

        if self._plans.pop(model, None) is not None:
            uninstall(model)
        if self.precision != "float32":
            from tfopt.models.float32_outputs import float32_outputs, half_outputs

            for each in float32_outputs(model).changed if model.built and half_outputs(model) else ():
                self._changed[Change(name=each.name, kind=f"output of {model.name}", detail=each.detail)] = 1
        original(*args, **kwargs)
        place = script_line()
        found = obstacle(model, place)
        try:
            found = found or gpus_unused(model, place, gpus=self._put_step(model))
        except TfoptError as error:  # the script goes on without it
            found = Skip(name=place, kind=type(model).__name__, reason=str(error))
        if found is not None:
            self._skip(found)
        policy = model.dtype_policy.name
        if policy != self._policy and self.precision != "float32":
            reason = f"the script itself chose {policy}. Leave out set_dtype_policy, clear_session and dtype="
            self._skip(Skip(name=place, kind=f"precision of {model.name}", reason=reason))

    def fit(
        self,
        model: keras.Model,
        original: Callable[..., keras.callbacks.History],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> keras.callbacks.History:
        """Trains with several steps per call where nothing in the script looks at single steps."""
        self._fits += 1
        try:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
        except TypeError:
            return original(*args, **kwargs)  # which raises the error of Keras
        with self.around_fit(model, given):
            return original(*args, **kwargs)

    @contextlib.contextmanager
    def around_fit(self, model: keras.Model, given: dict[str, Any]) -> Iterator[bool]:
        """Within it, a fit with the given arguments has its steps per call. Yields whether it has tfopt's step."""
        if model not in self._plans:
            yield False
            return
        place = script_line()
        from tfopt.compat.replace import callbacks_of, steps_per_execution
        from tfopt.training.step.fit_callback import FitCallback
        from tfopt.training.step.runtime import uninstall

        if not any(isinstance(each, FitCallback) for each in callbacks_of(given.get("callbacks"))):
            uninstall(model)
            reason = f"the fit of {type(model).__name__} must pass its callbacks to super().fit, since tfopt adds one"
            self._skip(Skip(name=place, kind=f"fit of {model.name}", reason=reason))
            yield False
            return
        steps, reason = self._steps(model, given)
        detail = f"{self._step_of(model)}, {reason}, XLA {'on' if model.jit_compile else 'off'}"
        change = Change(name=place, kind=f"fit of {model.name}", detail=detail)
        self._changed[change] = self._changed.get(change, 0) + 1
        with steps_per_execution(model, steps, "predict_function"):
            yield True

    def report(self, script: str | None) -> PassReport:
        """Returns what was applied, and what could not be. A script's own training loops are listed, a module's not."""
        skipped = list(self._skipped)
        if script is not None and "keras" in sys.modules:
            from tfopt.scripts.obstacles import own_loops

            skipped += [] if self._fits else own_loops(script)
        changed = [
            Change(name=each.name, kind=each.kind, detail=each.detail + (f" ({times} times)" if times > 1 else ""))
            for each, times in self._changed.items()
        ]
        if not changed and not skipped and not self._fits:
            reason = "it called no fit of Keras. Train with model.fit, or see `tfopt doctor` for what the loop costs"
            skipped = [Skip(name=script or "the module", kind="script", reason=reason)]
        return PassReport(name="accelerate", changed=changed, skipped=skipped)

    def _plan(self, strategy: tf.distribute.Strategy | None = None) -> Plan:
        import tensorflow as tf

        from tfopt.hardware import detect
        from tfopt.training import TrainingConfig, plan

        self._hardware = self._hardware or detect()
        config = TrainingConfig(
            precision=self.precision,  # type: ignore[arg-type]
            jit_compile="auto" if self.xla else False,
            strategy=strategy or "none",
            steps_per_execution=self.steps_per_execution,
            sparse_embedding_gradients=strategy is None,  # as Keras, for the same weights
            global_batch_size=64 if strategy is None else strategy.num_replicas_in_sync,  # the script decides over it
            stop_on_nan=False,
            memory_growth=False,  # the script decides over the memory
            tensor_float_32=bool(tf.config.experimental.tensor_float_32_execution_enabled()),
        )
        return plan(config, self._hardware)

    def _put_step(self, model: keras.Model) -> int:
        """Puts the step under a compiled model. Returns the number of GPUs of this machine."""
        from tfopt.compat.trainer import built_under
        from tfopt.training.compile import put_step
        from tfopt.training.xla import xla_blockers

        decided = self._plan(built_under(model))
        if model.jit_compile and (not self.xla or xla_blockers(model)):
            model.jit_compile = False
        put_step(model, decided)
        self._plans[model] = decided
        return len(decided.hardware.gpus)

    def _steps(self, model: keras.Model, given: dict[str, Any]) -> tuple[int, str]:
        """Returns the steps of a call into TensorFlow, and the reason."""
        from tfopt.scripts.obstacles import why_single_steps

        asked = model.steps_per_execution
        if asked != 1:
            return asked, f"{asked} steps per call into TensorFlow as the script asks"
        if reason := why_single_steps(model, given):
            return 1, f"one step per call because {reason}"
        steps = self._plans[model].steps_per_execution
        return steps, f"{steps} steps per call into TensorFlow"

    def _step_of(self, model: keras.Model) -> str:
        decided = self._plans[model]
        if decided.strategy is None:
            return "tfopt's step"
        s = "s" if decided.replicas > 1 else ""
        return f"Keras' step on {decided.replicas} replica{s} of {type(decided.strategy).__name__}"

    def _skip(self, found: Skip) -> None:
        if found not in self._skipped:
            self._skipped.append(found)
