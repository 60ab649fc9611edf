"""The shapes of a recipe's examples where the examples themselves are not at hand: zeros of these shapes.

The full forms of the recipes train on data sets that this machine may not have. What a step costs, and where it runs,
depends on the shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.data import Examples
from tfopt.data.arguments import height_and_width
from tfopt.data.config import DataConfig
from tfopt.errors import ConfigError
from tfopt.recipe import Recipe

# Sources whose examples every machine has.
HERE = ("diabetes", "digit_masks", "digits", "synthetic", "text", "text_classes")
# Sources whose inputs are numbers of tokens.
OF_TOKENS = ("imdb", "text", "text_classes")
# Sources of encoded images, of which the pipeline decodes a box.
OF_FILES = ("image_folder", "tfds")
DOWNLOADED = {
    "mnist": ((28, 28, 1), 10),
    "fashion_mnist": ((28, 28, 1), 10),
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
}
BYTES = 256  # the tokens of a text that is read byte by byte
COUNT = 8


@dataclass(frozen=True)
class Shape:
    """The shape of one example, and the number of outputs."""

    input_shape: tuple[int, ...]
    outputs: int


def known_shape(data: DataConfig) -> Shape | None:
    """Returns the shape of one example of a source, without a download; None if it is unknown.

    Example:
        >>> known_shape(DataConfig(source="cifar10"))
        Shape(input_shape=(32, 32, 3), outputs=10)
        >>> known_shape(DataConfig(source="tfds", arguments={"name": "imagenet2012", "image_size": [160, 192]}))
        Shape(input_shape=(160, 192, 3), outputs=1000)
    """
    arguments = data.arguments
    size, name = arguments.get("image_size"), str(arguments.get("name") or arguments.get("directory"))
    if name.startswith("imagenet") and size is not None:
        return Shape((*height_and_width(size), 3), 1000)
    if arguments.get("class_names") and size is not None:
        return Shape((*height_and_width(size), 3), len(arguments["class_names"]))
    if data.source == "imdb" and "length" in arguments:
        return Shape((arguments["length"],), 2)
    if data.source == "text" and "directory" in arguments and "length" in arguments:
        return Shape((arguments["length"],), BYTES)
    if data.source in HERE and "directory" not in arguments:
        examples = data.load()
        return Shape(tuple(examples.input_shape), examples.outputs)
    found = DOWNLOADED.get(str(data.source))
    return None if found is None else Shape(*found)


def zeros_like(recipe: Recipe, shape: Shape | None = None) -> Examples:
    """Returns zeros in the shape of a recipe's examples, for one of the tasks of tfopt.

    Args:
        recipe: The recipe.
        shape: The shape of one example; None asks `known_shape`.
    Raises:
        ConfigError: The shape is unknown, or the task is not one of tfopt's.
    Example:
        >>> from tfopt.recipes import RECIPES
        >>> zeros_like(RECIPES["resnet50"].form("full")).input_shape
        (224, 224, 3)
    """
    shape = shape or known_shape(recipe.data)
    if shape is None:
        raise ConfigError(
            "The shape of an example must be known. Received: "
            f"source {recipe.data.source!r} of {recipe.name!r}, which is not on this machine. "
            "Give --input-shape and --outputs (in Python input_shape and outputs), for example 224 224 3 and 1000."
        )
    of_tokens = recipe.data.source in OF_TOKENS
    inputs = tf.zeros(shape.input_shape, tf.int32 if of_tokens else tf.float32)
    data = tf.data.Dataset.from_tensors((inputs, _targets(recipe, shape))).repeat(COUNT)
    return Examples(
        name="zeros",
        train=data,
        test=data,
        outputs=shape.outputs,
        decodes_boxes=recipe.data.source in OF_FILES,
        ignored_target=recipe.data.arguments.get("ignored_target"),
    )


def _targets(recipe: Recipe, shape: Shape) -> Any:
    match recipe.find_task().name:
        case "classification":
            return tf.zeros((), tf.int32)
        case "segmentation":
            return tf.zeros(shape.input_shape[:-1], tf.int32)
        case "language_model":
            return tf.zeros(shape.input_shape, tf.int32)
        case "regression" | "multi_label_classification":
            return tf.zeros((shape.outputs,))
        case name:
            raise ConfigError(
                f"The shape of the targets must be known. Received: the task {name!r} of {recipe.name!r}. "
                "Its examples must be on this machine."
            )
