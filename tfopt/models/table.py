"""The table of models: published models by name, and a small model of each builder.

`tfopt models`, the tests and the benchmarks build from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfopt.models.mlp import mlp
from tfopt.models.sequences.convolutional import tcn
from tfopt.models.sequences.recurrent import lstm
from tfopt.models.text.decoder import gpt
from tfopt.models.text.encoder import text_encoder
from tfopt.models.vision.cnn import simple_cnn
from tfopt.models.vision.resnet import resnet_cifar

if TYPE_CHECKING:
    from collections.abc import Callable

    import keras


@dataclass(frozen=True, kw_only=True)
class TableModel:
    """A builder with the arguments that make one model.

    Attributes:
        builder: The builder.
        task: Name of the task that the model is for.
        input_shape: Shape of one example.
        outputs: Number of classes, tokens or values.
        arguments: More arguments of the builder.
        input_dtype: "int32" for tokens.
        parameters: The published number of trained parameters; None if no number is published.
        multiply_adds: The published multiply-adds of one forward pass; None if no number is published.
        reference: Where the numbers are published.

    Example:
        >>> SMALL_MODELS["mlp"].build().output_shape
        (None, 10)
    """

    builder: Callable[..., keras.Model]
    task: str = "classification"
    input_shape: tuple[int | None, ...]
    outputs: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    input_dtype: str = "float32"
    parameters: int | None = None
    multiply_adds: float | None = None
    reference: str = ""

    def build(self) -> keras.Model:
        """Builds the model."""
        return self.builder(self.input_shape, self.outputs, **self.arguments)


PUBLISHED_MODELS: dict[str, TableModel] = {
    "lenet5": TableModel(
        builder=simple_cnn,
        input_shape=(32, 32, 1),
        outputs=10,
        parameters=61_706,
        reference="LeCun et al. 1998, with full connections between the layers",
    ),
    # BERT publishes encoders without an output layer. Here there are no segment embeddings (2 * width parameters), and
    # there is an output layer of two classes (2 * width + 2).
    "bert_base": TableModel(
        builder=text_encoder,
        input_shape=(512,),
        outputs=2,
        input_dtype="int32",
        parameters=109_482_240 - 2 * 768 + 2 * 768 + 2,
        reference="Devlin et al. 2019, arXiv:1810.04805: 109,482,240 without an output layer",
    ),
    "bert_small": TableModel(
        builder=text_encoder,
        input_shape=(512,),
        outputs=2,
        arguments={"width": 512, "depth": 4, "heads": 8, "units": 2048},
        input_dtype="int32",
        parameters=28_763_648 - 2 * 512 + 2 * 512 + 2,
        reference="Turc et al. 2019, arXiv:1908.08962: 28,763,648 without an output layer",
    ),
    "gpt2_small": TableModel(
        builder=gpt,
        task="language_model",
        input_shape=(1024,),
        outputs=50_257,
        arguments={"width": 768, "depth": 12, "heads": 12, "positions": "learned", "tied": True, "dropout": 0.1},
        input_dtype="int32",
        parameters=124_439_808,
        reference="Radford et al. 2019",
    ),
}

# One small model of each builder, by the builder's name. It trains and exports in seconds.
SMALL_MODELS: dict[str, TableModel] = {
    "mlp": TableModel(builder=mlp, input_shape=(16,), outputs=10, arguments={"units": (32, 32)}),
    "resnet_cifar": TableModel(
        builder=resnet_cifar, input_shape=(16, 16, 3), outputs=10, arguments={"depth": 8, "width": 8}
    ),
    "simple_cnn": TableModel(builder=simple_cnn, input_shape=(32, 32, 1), outputs=10),
    "gpt": TableModel(
        builder=gpt,
        task="language_model",
        input_shape=(16,),
        outputs=64,
        arguments={"width": 32, "depth": 2, "heads": 2},
        input_dtype="int32",
    ),
    "lstm": TableModel(builder=lstm, input_shape=(8, 8), outputs=10, arguments={"units": (16,)}),
    "tcn": TableModel(builder=tcn, input_shape=(16, 8), outputs=10, arguments={"filters": 16, "blocks": 2}),
    "text_encoder": TableModel(
        builder=text_encoder,
        input_shape=(16,),
        outputs=4,
        arguments={"vocabulary": 64, "width": 32, "depth": 2, "heads": 2, "units": 64, "max_length": 16},
        input_dtype="int32",
    ),
}
