"""Settings of clustering."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from tfopt.settings.flags import Layers
from tfopt.settings.validation import Remedy, check_fields


@dataclass(frozen=True, kw_only=True)
class ClusteringConfig:
    """How many values the weights of a layer share, and which layers.

    Raises:
        ConfigError: A value is out of range.

    Example:
        >>> ClusteringConfig(clusters=32, exclude=("logits",)).per
        'layer'
    """

    clusters: Annotated[int, Ge(2), Le(256), Remedy("A weight takes 4 bits with up to 16, and 8 bits with more.")] = 16
    """Largest number of different values in a layer, zero included. A file stores up to 16 in 4 bits for each weight,
    and more in 8 bits."""
    per: Literal["layer", "channel"] = "layer"
    """Weights that share their values: those of a layer, or of each output channel. The latter is more accurate, and a
    file holds the values of each channel."""
    minimum_size: Annotated[int, Ge(1), Remedy("1024 is usual.")] = 1024
    """Smallest number of weights in a kernel that is clustered. An export keeps smaller ones in float32 anyway."""
    exclude: Layers = ()
    """Names, paths or classes of layers that are not clustered, with * and ? as wildcards, as in `PruningConfig`."""
    include: Layers = ()
    """Names, paths or classes of the only layers that are clustered. Without any, all are, except depthwise
    convolutions, which must be named."""

    epochs: Annotated[int, Ge(1)] = 5
    """Number of epochs of a recipe's fine-tuning, in which the shared values are trained."""
    learning_rate: Annotated[float, Gt(0), Lt(math.inf)] | None = None
    """Learning rate of a recipe's fine-tuning. By default the learning rate of its training."""

    def __post_init__(self) -> None:
        check_fields(self)
