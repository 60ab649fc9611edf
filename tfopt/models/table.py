"""The table of models: published models by name, and a small model of each builder.

`tfopt models`, the tests and the benchmarks build from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfopt.models.keras_models import keras_builder
from tfopt.models.sequences import lstm, tcn
from tfopt.models.simple import mlp, simple_cnn
from tfopt.models.text.transformers import gpt, text_encoder
from tfopt.models.vision.applications import efficientnet_v2, mobilenet_v2, mobilenet_v3
from tfopt.models.vision.convnext import convnext
from tfopt.models.vision.resnet import resnet50, resnet_cifar
from tfopt.models.vision.unet import unet
from tfopt.models.vision.vit import vit

if TYPE_CHECKING:
    from collections.abc import Callable

    import keras


@dataclass(frozen=True, kw_only=True)
class TableModel:
    """A builder with the arguments that make one model.

    Attributes:
        builder: The builder.
        task: Name of the task that the model is for.
        input_shape: Shape of one example. By default that of ImageNet, as the number of outputs.
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
    input_shape: tuple[int | None, ...] = (224, 224, 3)
    outputs: int = 1000
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
    "vit_tiny": TableModel(
        builder=vit,
        parameters=5_717_416,
        reference="Touvron et al. 2021 (DeiT-Ti)",
    ),
    "vit_small": TableModel(
        builder=vit,
        arguments={"width": 384, "heads": 6},
        parameters=22_050_664,
        multiply_adds=4.6e9,
        reference="Touvron et al. 2021 (DeiT-S)",
    ),
    "vit_base": TableModel(
        builder=vit,
        arguments={"width": 768, "heads": 12},
        parameters=86_567_656,
        multiply_adds=17.6e9,
        reference="Dosovitskiy et al. 2021 (ViT-B/16)",
    ),
    "convnext_tiny": TableModel(
        builder=convnext,
        parameters=28_589_128,
        multiply_adds=4.5e9,
        reference="Liu et al. 2022",
    ),
    "unet": TableModel(
        builder=unet,
        task="segmentation",
        input_shape=(256, 256, 3),
        outputs=2,
        parameters=31_037_698,
        reference="milesial/Pytorch-UNet, with the same padding and batch normalization",
    ),
    "resnet50": TableModel(
        builder=resnet50,
        parameters=25_557_032,
        multiply_adds=4.09e9,
        reference="torchvision, resnet50",
    ),
    "mobilenet_v2": TableModel(
        builder=mobilenet_v2,
        parameters=3_504_872,
        multiply_adds=300e6,
        reference="Sandler et al. 2018, table 4; parameters as torchvision counts them",
    ),
    "mobilenet_v3_small": TableModel(
        builder=mobilenet_v3,
        parameters=2_542_856,
        multiply_adds=56e6,
        reference="Howard et al. 2019, table 3; parameters as torchvision counts them",
    ),
    "mobilenet_v3_large": TableModel(
        builder=mobilenet_v3,
        arguments={"size": "large"},
        parameters=5_483_032,
        multiply_adds=219e6,
        reference="Howard et al. 2019, table 3; parameters as torchvision counts them",
    ),
    "efficientnet_v2_b0": TableModel(
        builder=efficientnet_v2,
        parameters=7_139_704,
        multiply_adds=0.72e9,
        reference="keras.applications, EfficientNetV2B0: 7.2 million with moving statistics; Tan and Le 2021, table 10",
    ),
    "efficientnet_v2_s": TableModel(
        builder=efficientnet_v2,
        input_shape=(384, 384, 3),
        outputs=1000,
        arguments={"size": "s"},
        parameters=21_458_488,
        multiply_adds=8.37e9,
        reference="torchvision, efficientnet_v2_s",
    ),
    # The very graphs of keras.applications, which earlier measurements used.
    "keras:ResNet50": TableModel(
        builder=keras_builder("keras:ResNet50"),
        parameters=25_583_592,
        multiply_adds=3.8e9,
        reference="He et al. 2016, table 1; parameters of keras.applications, which adds biases to the convolutions",
    ),
    "keras:MobileNetV2": TableModel(
        builder=keras_builder("keras:MobileNetV2"),
        parameters=3_504_872,
        multiply_adds=300e6,
        reference="Sandler et al. 2018, table 4",
    ),
    "keras:EfficientNetV2B0": TableModel(
        builder=keras_builder("keras:EfficientNetV2B0"),
        parameters=7_139_704,
        multiply_adds=0.72e9,
        reference="keras.applications",
    ),
}

# One small model of each builder, by the builder's name. It trains and exports in seconds.
SMALL_MODELS: dict[str, TableModel] = {
    "convnext": TableModel(
        builder=convnext,
        input_shape=(16, 16, 3),
        outputs=10,
        arguments={"depths": (1, 1), "widths": (16, 32), "patch_size": 2},
    ),
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
    "unet": TableModel(
        builder=unet, task="segmentation", input_shape=(16, 16, 3), outputs=3, arguments={"width": 8, "depth": 2}
    ),
    "vit": TableModel(
        builder=vit,
        input_shape=(16, 16, 3),
        outputs=10,
        arguments={"patch_size": 4, "width": 32, "depth": 2, "heads": 2},
    ),
    "resnet50": TableModel(
        builder=resnet50,
        input_shape=(32, 32, 3),
        outputs=10,
        arguments={"depths": (1, 1), "width": 8, "small_images": True},
    ),
    "mobilenet_v2": TableModel(builder=mobilenet_v2, input_shape=(32, 32, 3), outputs=10, arguments={"alpha": 0.1}),
    "mobilenet_v3": TableModel(builder=mobilenet_v3, input_shape=(32, 32, 3), outputs=10, arguments={"alpha": 0.25}),
    "efficientnet_v2": TableModel(
        builder=efficientnet_v2, input_shape=(32, 32, 3), outputs=10, arguments={"alpha": 0.25}
    ),
}
