"""Audits an unmodified script: it runs to its first `fit`, whose training step is traced, and ends there."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tfopt.errors import TrainingError
from tfopt.scripts.hook import script_line
from tfopt.scripts.run_script import run_script

if TYPE_CHECKING:
    import keras

    from tfopt.report import Audit


class _EndError(BaseException):
    """Ends a fit that has made its batches; no `except Exception` of the script holds it up."""


class _AuditHook:
    """A `FitHook` that takes the model and a batch of the first fit, and ends the script."""

    def __init__(self, card: str | None) -> None:
        self._card = card
        self._jit_compile: dict[int, Any] = {}  # by the identity of the model; Keras keeps what it makes of it
        self.audit: Audit | None = None
        self.error: Exception | None = None

    def compile(
        self, model: keras.Model, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        self._jit_compile[id(model)] = given.get("jit_compile")

    def fit(
        self, model: keras.Model, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.audit is not None or self.error is not None:  # the script has gone on after its end
            raise SystemExit(0)
        from tfopt.compat.replace import replaced

        place, batches, prepare = script_line(), [], model.make_train_function

        def step(iterator: Any) -> None:
            batches.append(next(iterator))
            raise _EndError

        def make(force: bool = False) -> None:
            prepare(force)  # where tfopt.compile has compiled the model, its callbacks ask what this has found
            model.train_function = step

        with contextlib.suppress(_EndError), replaced(model, make_train_function=make):
            original(*args, **kwargs)
        if batches:
            self._look_at(model, batches[0], place)
        raise SystemExit(0)

    def _look_at(self, model: keras.Model, batch: Any, place: str) -> None:
        from tfopt.advisor.audit import audit
        from tfopt.training.step.runtime import plan_of

        asked = self._jit_compile.get(id(model))
        of_plan = plan_of(model) is not None  # which compiled the model for this machine
        try:
            jit_compile = None if of_plan or asked in (None, "auto") else bool(asked)
            found = audit(model, batch, card=self._card, jit_compile=jit_compile)
            self.audit = replace(found, name=f"{found.name}, fit in {place}")
        except Exception as error:  # noqa: BLE001 - raised anew when the script has ended
            self.error = error


def audit_script(path: str, arguments: Sequence[str], card: str | None = None) -> Audit:
    """Runs a script as Python would up to its first `fit`, and audits the training step of its model.

    Args:
        path: The script, or "-m" with the name of a module as the first of the arguments.
        arguments: The words of the script.
        card: A GPU, as in `tfopt.audit`.
    Raises:
        ConfigError: There is no such script, or no such card; see `run_script`.
        TrainingError: The script has made no batch of a fit.
        UnsupportedModelError: TensorFlow cannot trace the step.
    Example:
        >>> import pathlib, tempfile
        >>> text = '''
        ... import keras, numpy as np
        ... model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        ... model.compile("sgd", "mse")
        ... model.fit(np.ones((64, 8)), np.ones((64, 8)))
        ... '''
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     script = pathlib.Path(directory, "train.py")
        ...     _ = script.write_text(text)
        ...     found = audit_script(str(script), [], "A100")
        >>> found.batch_size, found.problems
        (32, [])
    """
    hook = _AuditHook(card)
    code = run_script(path, arguments, hook)
    if hook.error is not None:
        raise hook.error
    if hook.audit is None:
        name = f"-m {arguments[0]}" if path == "-m" and arguments else path
        if code != 0:
            raise TrainingError(
                f"The script must reach the first step of its first fit. Received: {name}, which ended with the exit "
                f"code {code} before. See what it wrote above; words of its own follow after --."
            )
        raise TrainingError(
            f"The script must train with keras.Model.fit. Received: {name}, which did not call it, or whose fit made "
            "no batch. Call tfopt.audit on its model."
        )
    return hook.audit
