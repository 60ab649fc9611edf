"""Watches an unmodified script while it trains, and says what holds the training back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfopt.errors import TrainingError
from tfopt.scripts.hook import script_line
from tfopt.scripts.run_script import run_script

if TYPE_CHECKING:
    from tfopt.diagnosis.diagnose import DoctorHook
    from tfopt.report import DiagnosisReport


class _Doctor:
    """A `FitHook` that imports TensorFlow only when the script trains: a script may set its environment before."""

    def __init__(self, steps: int, *, stops: bool) -> None:
        self._steps, self._stops = steps, stops
        self.hook: DoctorHook | None = None

    def compile(self, model: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._made().compile(model, original, args, kwargs)

    def fit(self, model: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hook, line = self._made(), script_line()
        if not hook.observation.is_enough:
            seen = hook.follow(model)
            seen.where = seen.where or line
        history = hook.fit(model, original, args, kwargs)
        if self._stops and hook.observation.is_enough:
            raise SystemExit(0)
        return history

    def predict(self, model: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._made().predict(model, original, args, kwargs)

    def _made(self) -> DoctorHook:
        if self.hook is None:
            from tfopt.diagnosis.diagnose import DoctorHook

            self.hook = DoctorHook(self._steps, stops=self._stops)
        return self.hook


def diagnose_script(
    path: str, arguments: Sequence[str], *, steps: int = 100, stops: bool = False, trace_dir: str | None = None
) -> tuple[int, DiagnosisReport | TrainingError]:
    """Runs a script as Python would, watches its first training steps, and measures when it has ended.

    The script computes what it computes without this, unless it `stops` after these steps. The experiments train its
    model further after its end.

    Returns: The script's exit code, and the report; or why there is none.
    Raises:
        ConfigError: There is no such script; see `run_script`.
    """
    name = f"-m {arguments[0]}" if path == "-m" and arguments else path
    doctor = _Doctor(steps, stops=stops)
    code = run_script(path, arguments, doctor)
    if doctor.hook is None or doctor.hook.observation.model is None:
        return code, TrainingError(
            f"The script must train with keras.Model.fit. Received: {name}, which did not call it. "
            "Call tfopt.diagnose on its model, or write its loop with fit."
        )
    from tfopt.diagnosis.diagnose import report

    print("tfopt: the script has ended; measuring its step", file=sys.stderr, flush=True)  # noqa: T201
    try:
        seen = doctor.hook.observation
        return code, report(seen, f"{name}, fit in {seen.where}", trace_dir)
    except TrainingError as error:
        return code, error
