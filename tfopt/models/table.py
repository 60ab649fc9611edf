"""The table of models: published models by name, and a small model of each builder.

`tfopt models`, the tests and the benchmarks build from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from tfopt import models
from tfopt.models.building import keras
from tfopt.models.keras_models import keras_builder


@dataclass(frozen=True)
class TableModel:
    """A builder with the arguments that make one model.

    Attributes:
        builder: The builder.
        input_shape: Shape of one example. By default that of ImageNet, as the number of outputs.
        outputs: Number of classes, tokens or values.
        arguments: More arguments of the builder.
        task: Name of the task that the model is for.
        input_dtype: "int32" for tokens.
        parameters: The published number of trained parameters; None if no number is published.
        multiply_adds: The published multiply-adds of one forward pass; None if no number is published.
        reference: Where the numbers are published.

    Example:
        >>> SMALL_MODELS["mlp"].build().output_shape
        (None, 10)
    """

    builder: Callable[..., keras.Model]
    input_shape: tuple[int | None, ...] = (224, 224, 3)
    outputs: int = 1000
    arguments: Mapping[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    task: str = "classification"
    input_dtype: str = "float32"
    parameters: int | None = None
    multiply_adds: float | None = None
    reference: str = ""

    def build(self) -> keras.Model:
        """Builds the model."""
        return self.builder(self.input_shape, self.outputs, **self.arguments)


PUBLISHED_MODELS: dict[str, TableModel] = {
    "lenet5": TableModel(
        models.simple_cnn,
        (32, 32, 1),
        10,
        parameters=61_706,
        reference="LeCun et al. 1998, with full connections between the layers",
    ),
    # BERT publishes encoders without an output layer. Here there are no segment embeddings (2 * width parameters), and
    # there is an output layer of two classes (2 * width + 2).
    "bert_base": TableModel(
        models.text_encoder,
        (512,),
        2,
        input_dtype="int32",
        parameters=109_482_240 - 2 * 768 + 2 * 768 + 2,
        reference="Devlin et al. 2019, arXiv:1810.04805: 109,482,240 without an output layer",
    ),
    "bert_small": TableModel(
        models.text_encoder,
        (512,),
        2,
        {"width": 512, "depth": 4, "heads": 8, "units": 2048},
        input_dtype="int32",
        parameters=28_763_648 - 2 * 512 + 2 * 512 + 2,
        reference="Turc et al. 2019, arXiv:1908.08962: 28,763,648 without an output layer",
    ),
    "gpt2_small": TableModel(
        models.gpt,
        (1024,),
        50_257,
        {"width": 768, "depth": 12, "heads": 12, "positions": "learned", "tied": True, "dropout": 0.1},
        task="language_model",
        input_dtype="int32",
        parameters=124_439_808,
        reference="Radford et al. 2019",
    ),
    "vit_tiny": TableModel(models.vit, parameters=5_717_416, reference="Touvron et al. 2021 (DeiT-Ti)"),
    "vit_small": TableModel(
        models.vit,
        arguments={"width": 384, "heads": 6},
        parameters=22_050_664,
        multiply_adds=4.6e9,
        reference="Touvron et al. 2021 (DeiT-S)",
    ),
    "vit_base": TableModel(
        models.vit,
        arguments={"width": 768, "heads": 12},
        parameters=86_567_656,
        multiply_adds=17.6e9,
        reference="Dosovitskiy et al. 2021 (ViT-B/16)",
    ),
    "convnext_tiny": TableModel(
        models.convnext, parameters=28_589_128, multiply_adds=4.5e9, reference="Liu et al. 2022"
    ),
    "unet": TableModel(
        models.unet,
        (256, 256, 3),
        2,
        task="segmentation",
        parameters=31_037_698,
        reference="milesial/Pytorch-UNet, with the same padding and batch normalization",
    ),
    "resnet50": TableModel(
        models.resnet50, parameters=25_557_032, multiply_adds=4.09e9, reference="torchvision, resnet50"
    ),
    "mobilenet_v2": TableModel(
        models.mobilenet_v2,
        parameters=3_504_872,
        multiply_adds=300e6,
        reference="Sandler et al. 2018, table 4; parameters as torchvision counts them",
    ),
    "mobilenet_v3_small": TableModel(
        models.mobilenet_v3,
        parameters=2_542_856,
        multiply_adds=56e6,
        reference="Howard et al. 2019, table 3; parameters as torchvision counts them",
    ),
    "mobilenet_v3_large": TableModel(
        models.mobilenet_v3,
        arguments={"size": "large"},
        parameters=5_483_032,
        multiply_adds=219e6,
        reference="Howard et al. 2019, table 3; parameters as torchvision counts them",
    ),
    "efficientnet_v2_b0": TableModel(
        models.efficientnet_v2,
        parameters=7_139_704,
        multiply_adds=0.72e9,
        reference="keras.applications, EfficientNetV2B0: 7.2 million with moving statistics; Tan and Le 2021, table 10",
    ),
    "efficientnet_v2_s": TableModel(
        models.efficientnet_v2,
        input_shape=(384, 384, 3),
        arguments={"size": "s"},
        parameters=21_458_488,
        multiply_adds=8.37e9,
        reference="torchvision, efficientnet_v2_s",
    ),
    # The very graphs of keras.applications, which earlier measurements used.
    "keras:ResNet50": TableModel(
        keras_builder("keras:ResNet50"),
        parameters=25_583_592,
        multiply_adds=3.8e9,
        reference="He et al. 2016, table 1; parameters of keras.applications, which adds biases to the convolutions",
    ),
    "keras:MobileNetV2": TableModel(
        keras_builder("keras:MobileNetV2"),
        parameters=3_504_872,
        multiply_adds=300e6,
        reference="Sandler et al. 2018, table 4",
    ),
    "keras:EfficientNetV2B0": TableModel(
        keras_builder("keras:EfficientNetV2B0"),
        parameters=7_139_704,
        multiply_adds=0.72e9,
        reference="keras.applications",
    ),
}

# One small model of each builder, by the builder's name. It trains and exports in seconds.
SMALL_MODELS: dict[str, TableModel] = {
    "convnext": TableModel(models.convnext, (16, 16, 3), 10, {"depths": (1, 1), "widths": (16, 32), "patch_size": 2}),
    "mlp": TableModel(models.mlp, (16,), 10, {"units": (32, 32)}),
    "resnet_cifar": TableModel(models.resnet_cifar, (16, 16, 3), 10, {"depth": 8, "width": 8}),
    "simple_cnn": TableModel(models.simple_cnn, (32, 32, 1), 10),
    "gpt": TableModel(
        models.gpt, (16,), 64, {"width": 32, "depth": 2, "heads": 2}, task="language_model", input_dtype="int32"
    ),
    "lstm": TableModel(models.lstm, (8, 8), 10, {"units": (16,)}),
    "tcn": TableModel(models.tcn, (16, 8), 10, {"filters": 16, "blocks": 2}),
    "text_encoder": TableModel(
        models.text_encoder,
        (16,),
        4,
        {"vocabulary": 64, "width": 32, "depth": 2, "heads": 2, "units": 64, "max_length": 16},
        input_dtype="int32",
    ),
    "unet": TableModel(models.unet, (16, 16, 3), 3, {"width": 8, "depth": 2}, task="segmentation"),
    "vit": TableModel(models.vit, (16, 16, 3), 10, {"patch_size": 4, "width": 32, "depth": 2, "heads": 2}),
    "resnet50": TableModel(models.resnet50, (32, 32, 3), 10, {"depths": (1, 1), "width": 8, "small_images": True}),
    "mobilenet_v2": TableModel(models.mobilenet_v2, (32, 32, 3), 10, {"alpha": 0.1}),
    "mobilenet_v3": TableModel(models.mobilenet_v3, (32, 32, 3), 10, {"alpha": 0.25}),
    "efficientnet_v2": TableModel(models.efficientnet_v2, (32, 32, 3), 10, {"alpha": 0.25}),
}
