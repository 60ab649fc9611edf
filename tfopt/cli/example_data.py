"""Example data that a command line names: a NumPy file, a source, or a recipe with its source and its task."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.cli.preparation import look_beside, read_recipe
from tfopt.data import Examples
from tfopt.data.config import DataConfig
from tfopt.data.examples import Split
from tfopt.data.sources import SOURCES
from tfopt.errors import ConfigError
from tfopt.recipe import Recipe
from tfopt.recipes import RECIPES
from tfopt.settings.calls import is_code
from tfopt.settings.validation import check_stored
from tfopt.tasks.scores import Score
from tfopt.tasks.task import Task

DEFAULT_METRIC = "accuracy"
ARRAYS = (".npy", ".npz")
# What NumPy raises for an incomplete or damaged file.
DAMAGED = (EOFError, zipfile.BadZipFile, zlib.error, SyntaxError, tokenize.TokenError)


@dataclass(frozen=True, kw_only=True)
class ExampleData:
    """Examples that a command line names."""

    arrays: Any = None  # inputs, or (inputs, labels), of a file; None for a source
    examples: Examples | None = None  # the examples of a source; None for a file
    task: Task | None = None  # the task of a recipe; None if no recipe is named

    def part(self, split: Split) -> Any:
        """Returns the arrays of a file, or batches of a part of a source."""
        return self.arrays if self.examples is None else self.examples.batches(split)

    def metric(self, metric: str | None, task: str | None) -> str | Score:
        """Returns the metric that the user names, or the score of the task, or the accuracy."""
        if metric is not None and task is not None:
            raise ConfigError(
                "metric and task must not be given together: a task has its score. Received: "
                f"metric={metric!r}, task={task!r}. Leave one of them out."
            )
        if metric is not None:
            return metric
        found = self.task if task is None else Recipe(name="", task=task).find_task()
        if found is None:
            return DEFAULT_METRIC
        if self.examples is not None:
            return found.score(self.examples)
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices(self.arrays)
        return found.score(Examples(name="file", train=dataset, test=dataset, outputs=0))


def find_example_data(name: str, *, files: bool = True) -> ExampleData:
    """Returns the examples of a file, a source or a recipe.

    Args:
        name: A .npy file of inputs; a .npz file with an array x, or one for each input by its name, and y for labels;
            the name of a source, or package.module:function; or a recipe, by its name or its .toml file.
        files: Whether the name may be that of a NumPy file.
    Raises:
        ConfigError: The file, source or recipe does not exist, or the file has other content.
    Example:
        >>> for x, y in find_example_data("digits").part("test").take(1):
        ...     print(x.shape)
        (32, 32, 32, 1)
    """
    if name in SOURCES or is_code(name):
        look_beside()
        return ExampleData(examples=DataConfig(source=name).load())
    if name in RECIPES or name.endswith(".toml"):
        recipe = read_recipe(name)
        return ExampleData(examples=recipe.data.load(), task=recipe.find_task())
    if not files or Path(name).suffix not in ARRAYS:
        raise ConfigError(
            f"Example data must be {'a .npy file, a .npz file, ' if files else ''}a recipe (a .toml file, "
            f"{', '.join(sorted(RECIPES))}) or a source ({', '.join(sorted(SOURCES))}, or package.module:function). "
            f"Received: {name!r}. {'Save arrays with numpy.save or numpy.savez.' if files else 'Name one of them.'}"
        )
    return ExampleData(arrays=_labelled(name))


def read_arrays(name: str) -> Any:
    """Returns the array of a .npy file, or the arrays of a .npz file by name.

    Raises:
        ConfigError: The file does not exist, or cannot be read.
    """
    check_stored("Example data", name)
    try:
        loaded = np.load(name)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return {each: loaded[each] for each in loaded.files}
    except (OSError, ValueError, *DAMAGED) as error:
        raise ConfigError(
            f"Example data must be a readable NumPy file. Received: {name!r} ({error}). Write it again with numpy.save "
            "or numpy.savez."
        ) from error


def _labelled(name: str) -> Any:
    """Returns the inputs of a file, or (inputs, labels). Of a model with several inputs, they are a dict."""
    loaded = read_arrays(name)
    if isinstance(loaded, np.ndarray):
        return loaded
    labels = loaded.pop("y", None)
    if not loaded:
        raise ConfigError(
            "A .npz file must hold an array x, or one for each input by its name, and y for labels. Received: "
            f"{name} without inputs. Write it again with numpy.savez(file, x=inputs, y=labels)."
        )
    # Beside x, other arrays are inputs only if they have as many examples.
    fitting = {name for name, each in loaded.items() if "x" not in loaded or each.shape[:1] == loaded["x"].shape[:1]}
    inputs = loaded["x"] if fitting == {"x"} else loaded
    return inputs if labels is None else (inputs, labels)
