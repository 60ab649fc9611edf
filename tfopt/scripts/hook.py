"""Tells a hook of every `compile` and `fit` of Keras in this process, and of every `predict` if it wants to know.

The hook replaces the methods in the class of Keras that defines them, so it sees every model: functional and
Sequential ones, subclasses that call `super().fit`, and scripts that took `keras.Model` before or after. A script that
sets environment variables before it imports Keras still has their effect: Keras is not imported for the hook.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import keras

METHODS = ("compile", "fit", "predict")
CALL = "call_hook"  # the frame between the script and a hook


class FitHook(Protocol):
    """What happens instead of `keras.Model.compile` and `keras.Model.fit`.

    `original` is Keras' own method, bound to the model. A hook that calls `original(*args, **kwargs)` and returns the
    result changes nothing. While a hook runs, further calls of `compile` and `fit` go to Keras: those of the hook
    itself, and those of a callback. A hook that has a method `predict` too, of the same form, is called for that.
    """

    def compile(
        self, model: keras.Model, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Compiles the model."""

    def fit(
        self,
        model: keras.Model,
        original: Callable[..., keras.callbacks.History],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> keras.callbacks.History:
        """Trains the model."""


@contextlib.contextmanager
def hooked(hook: FitHook, when_imported: Callable[[ModuleType], None] | None = None) -> Iterator[None]:
    """Within it, the hook is called for each `compile` and `fit`. Afterwards Keras' own methods are back.

    If Keras is not imported yet, its methods are replaced when it is. `when_imported` is called with Keras once it is
    imported, before the script uses it.

    Example:
        >>> import keras, numpy as np
        >>> class Count:
        ...     fits = 0
        ...     def compile(self, model, original, args, kwargs):
        ...         original(*args, **kwargs)
        ...     def fit(self, model, original, args, kwargs):
        ...         self.fits += 1
        ...         return original(*args, **kwargs)
        >>> count = Count()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> with hooked(count):
        ...     history = model.fit(np.zeros((4, 2)), np.zeros(4), verbose=0)
        >>> count.fits
        1
    """
    restore = contextlib.ExitStack()
    busy = threading.local()

    def replace(keras: ModuleType) -> None:
        from tfopt.compat.replace import replaced  # here, because it imports Keras

        for name in (each for each in METHODS if hasattr(hook, each)):
            # Where Keras defines it: a loaded model asks whether its class has overridden it.
            owner = next(cls for cls in keras.Model.__mro__ if name in vars(cls))
            restore.enter_context(replaced(owner, **{name: _calling(hook, name, vars(owner)[name], busy)}))
        if when_imported is not None:
            when_imported(keras)

    finder = None
    if "keras" in sys.modules:
        replace(sys.modules["keras"])
    else:
        finder = _AfterImport("keras", replace)
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        restore.close()


def _calling(hook: FitHook, name: str, original: Callable[..., Any], busy: threading.local) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_hook(model: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(busy, "now", False):
            return original(model, *args, **kwargs)
        busy.now = True
        try:
            return getattr(hook, name)(model, functools.partial(original, model), args, kwargs)
        finally:
            busy.now = False

    return call_hook


class _AfterImport(MetaPathFinder):
    """Calls a function with a module once, when the module has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then
        self._asks = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._asks:
            return None
        self._asks = True  # the others
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then(module: ModuleType) -> None:
            # Only now: TensorFlow asks where Keras is, and imports it later.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            self._then(module)

        spec.loader.exec_module = execute_then  # type: ignore[method-assign]
        return spec


def script_line() -> str:
    """Returns the line of the script whose `compile` or `fit` a hook is handling, as "file:line".

    It is the innermost line that belongs to no library. In a model that overrides `fit`, it is where that calls Keras'.
    """
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_filename == __file__ and frame.f_code.co_name == CALL):
        frame = frame.f_back
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "unknown" if frame is None else place(frame.f_code.co_filename, frame.f_lineno)


def place(file: str, line: int) -> str:
    """Returns a line of a file as "file:line", the file from the working directory on if it is there."""
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else file}:{line}"


@functools.cache
def _is_library(file: str) -> bool:
    path = Path(file)
    if file.startswith("<") or {"site-packages", "dist-packages"}.intersection(path.parts):
        return True
    return any(path.is_relative_to(root) for root in (Path(__file__).parents[1], sysconfig.get_path("stdlib")))
