"""Settings of the steps before and after a model that an artifact computes too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from tfopt.errors import ConfigError
from tfopt.settings.validation import check_fields


@dataclass(frozen=True, kw_only=True)
class PreprocessingConfig:
    """Makes the artifact take images as pixels: uint8, of any size, all images of a call of one size.

    The model's input is (pixels * scale - mean) / std, after a bilinear resize to the size that the model takes.

    Example:
        >>> PreprocessingConfig(scale=1 / 127.5, mean=(1.0,)).std  # pixels from -1 to 1
        ()
    """

    scale: Annotated[float, Gt(0)] = 1.0
    """Factor of the pixels, for example 0.00392157 (1/255) for a model that takes values from 0 to 1."""
    mean: tuple[float, ...] = ()
    """Numbers to subtract after scaling: one for all channels, or one for each. By default none."""
    std: tuple[Annotated[float, Gt(0)], ...] = ()
    """Numbers to divide by after that: one for all channels, or one for each. By default none."""
    reverse_channels: bool = False
    """Whether to reverse the channels before all this: RGB pixels for a model that takes BGR."""
    size: tuple[Annotated[int, Ge(1)], Annotated[int, Ge(1)]] | None = None
    """Height and width to resize to. By default those of the model's input; if these are open, images keep their
    size."""
    input: str | None = None
    """Name of the input that becomes pixels. By default the only input of images."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class PostprocessingConfig:
    """Makes the artifact compute probabilities and the best classes from its output.

    Example:
        >>> PostprocessingConfig(softmax=True, top_k=2, class_names=("cat", "dog", "owl")).top_k
        2
    """

    softmax: bool = False
    """Whether the output becomes probabilities: softmax over its last axis."""
    top_k: Annotated[int, Ge(1)] | None = None
    """Number of best classes. The artifact then has two more outputs, best first: "classes", the numbers or names of
    the classes, and "scores", their values of the output."""
    class_names: tuple[str, ...] = ()
    """Names of the classes in the order of the output. With them "classes" are strings, which only SavedModels have."""
    output: str | None = None
    """Name of the output that this is about. By default the only output."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.class_names and self.top_k is None:
            raise ConfigError(
                f"class_names are the names of the best classes, whose number is top_k. Received: "
                f"{len(self.class_names)} names and top_k=None. Set top_k too."
            )
