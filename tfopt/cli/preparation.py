"""What every command does before its work: it finds the user's own code, reads recipes, and starts TensorFlow.

Code of the user has names of the form package.module:name. A name that the user types is imported. A name in a recipe
file is imported only with the flag --allow-code.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfopt.errors import check_keras_backend
from tfopt.terminal import notices_hidden

if TYPE_CHECKING:
    from tfopt.recipe import Recipe

FLAG, IMPORT = "--allow-code", "--import"
_ALLOWED = ContextVar("_ALLOWED", default=False)


@contextmanager
def code_of_files_allowed(allowed: bool) -> Iterator[None]:
    """Sets, for one command, whether recipe files may name code."""
    token = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def read_recipe(*names: str, form: str | None = None) -> Recipe:
    """Returns the recipe of a name or a .toml file, with the settings of further ones laid over it, or a form of it."""
    from tfopt.recipes import compose

    allowed = _ALLOWED.get()
    if allowed:
        look_beside(*(name for name in names if name.endswith(".toml")))
    recipe = compose(*names, allow_code=allowed)
    if form is None:
        return recipe
    return recipe.quick() if form == "quick" else recipe.form(form)


def look_beside(*files: str) -> None:
    """Lets Python find modules beside files and in the working directory, as it does for a script."""
    folders = dict.fromkeys([*(str(Path(file).resolve().parent) for file in files), str(Path.cwd())])
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def import_modules(names: Sequence[str]) -> None:
    """Imports modules of the user, from the working directory too; without any, nothing of TensorFlow is imported."""
    if not names:
        return
    look_beside()
    start_tensorflow()
    from tfopt.settings.calls import import_module

    for name in names:
        import_module(IMPORT, name)


def arguments_of(builder: Callable[..., Any]) -> dict[str, Any]:
    """Returns the keyword arguments of a function, with their defaults."""
    parameters = inspect.signature(builder).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def start_tensorflow() -> None:
    """Imports TensorFlow and lets it look for GPUs, without the notices that it writes at every log level.

    The notices also say why there is no GPU; `tfopt devices` shows that reason.
    """
    check_keras_backend()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow obeys it from its first operation on
    with notices_hidden():
        import tensorflow as tf

        tf.config.list_physical_devices()
