"""Settings of an export, and the options of the command `tfopt export`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self, get_args

import tyro
from annotated_types import Ge, MinLen

from tfopt.errors import ConfigError
from tfopt.exporting.formats import FORMATS
from tfopt.exporting.processing.config import PostprocessingConfig, PreprocessingConfig
from tfopt.quantization.config import QuantizationConfig
from tfopt.quantization.weight_only import WeightOnlyConfig
from tfopt.settings.validation import check_fields

Precision = Literal[
    "float32", "float16", "bfloat16", "int8", "int8_weight_only", "int4_weight_only", "codebook_weight_only"
]
Format = Literal["saved_model", "onnx", "openvino", "litert"]
Formats = Annotated[tuple[Format, ...], MinLen(1)]
Compute = Literal["float32", "auto", "bfloat16", "float16"]
Int8Nodes = Literal["faster", "all"]
FloatWeights = Literal["float32", "int8"]
WeightsIn = Literal["variables", "constants"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
DEFAULT_SIGNATURE, FLOAT_SIGNATURE, XLA_SIGNATURE = "serving_default", "serving_float", "serving_xla"


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Settings of the artifact.

    Example:
        >>> ExportConfig(precision="int8").format
        'saved_model'
    """

    format: Format = "saved_model"
    """Format of the artifact. "onnx" is for ONNX Runtime, OpenVINO and TensorRT: one file model.onnx, in precision
    "float32", "float16" (the weights), "int8" (pairs of quantize and dequantize around every operand) or
    "int8_weight_only". "openvino" writes the same in OpenVINO's own format, model.xml and model.bin. "litert" is for
    LiteRT, on phones, boards and desktops: one file model.tflite of builtin operators, in precision "float32",
    "float16" or "int8". Each needs the extra of its name."""
    precision: Precision = "float32"
    """Precision of the artifact. "int8" runs int8 kernels and needs calibration data. The others compute in float32 and
    differ in the stored weights: "int8_weight_only" and "int4_weight_only" store integers with scales, "float16" and
    "bfloat16" store half the bits of float32, and "codebook_weight_only" stores weights that `tfopt.cluster` has
    clustered as they are, in 4 or 8 bits. The setting compute gives the products another type than float32."""
    compute: Compute = "float32"
    """Type of the products and of what lies between them. Sums, norms, softmax, inputs and outputs stay in float32.
    "bfloat16" or "float16" belong to precision="float32" or to the same type. "auto" is bfloat16 if this machine
    multiplies it and is measured to be faster, and float32 otherwise. With precision="int8", "bfloat16" and "auto" are
    about the products that are not in int8."""
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    """Settings of the quantization, for int8 only."""
    int8_nodes: Int8Nodes = "faster"
    """Nodes that run in int8: "faster" chooses the nodes that are measured to be faster in int8 on this machine; "all"
    chooses every node with an int8 kernel. Other formats than "saved_model" always have all; `tfopt bench` compares
    them with float32."""
    float_weights: FloatWeights = "float32"
    """With int8: how the weights of nodes that compute in float32 are stored. "int8" makes the artifact as small as if
    all nodes ran in int8, and it decodes these weights once, before the first call. Nodes that the quantization
    excludes keep float32 weights, and so do weights of fewer values than weight_only.minimum_size."""
    batch_sizes: Annotated[tuple[Annotated[int, Ge(1)], ...], MinLen(1)] = (1, 8)
    """Batch sizes at which int8_nodes="faster", compute="auto" and threads measure the model. Each counts the same."""
    threads: tuple[Annotated[int, Ge(1)], ...] = ()
    """Numbers of intra-op threads on which the artifact is timed at each of batch_sizes, for example (1, 16); one above
    the number of cores means all cores. The manifest then has the best number for each batch size, and `tfopt.verify`
    shows it with advice for servers. By default none are timed."""
    node_times: Annotated[str, MinLen(1)] | None = None
    """JSON file with the measured times of the nodes. If the file exists, its times are used, and nothing is measured.
    If not, the times are measured and the file is written."""
    weight_only: WeightOnlyConfig = field(default_factory=WeightOnlyConfig)
    """Settings of stored weights, not used for float32, and for int8 only with float_weights="int8"."""
    sparse_weights: bool = False
    """With float32 or int8: whether weights with many zeros are stored without them, for a smaller artifact. They are
    decoded once, before the first call, to exactly the same values. Calls are as fast as without."""
    weights_in: WeightsIn = "variables"
    """Where weights are that a kernel reads as they are stored. From "variables" they are loaded once. With "constants"
    float32 convolutions keep their weights in the layout that they compute with, so calls with one example are faster;
    but the first call takes several times as long, and needs several times the memory."""
    tensorrt: bool = False
    """With format="onnx" and int8: whether to quantize as TensorRT demands: activations in ranges symmetric about 0,
    all zero points 0, and biases in float32."""
    float_fallback: bool = False
    """With int8: whether to write a second signature "serving_float", which computes in float32 with the same int8
    weights. A TensorFlow without the int8 kernels can call it."""
    xla_signature: bool = False
    """Whether to write the signature "serving_xla" too, which XLA compiles at its first call. With int8 it computes in
    float32."""
    preprocessing: PreprocessingConfig | None = None
    """Steps before the model that the artifact computes too: it takes pixels (uint8) of any size. Calibration data
    stays what the model takes. By default none."""
    postprocessing: PostprocessingConfig | None = None
    """Steps after the model that the artifact computes too: probabilities and the best classes. By default none."""
    trusted: bool = False
    """Whether the model's source is trusted: the model may hold ops that touch files or the network when it runs, and a
    .keras file may hold code. Without it, such a model is refused before anything of it runs."""

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_format()
        self._check_postprocessing()
        own_way = "which stores all weights in its own way"
        for name, used, owners, reason in (
            ("float_fallback", self.float_fallback, "'int8'", "whose artifact computes in float32 anyway"),
            ("float_weights", self.float_weights == "int8", "'int8'", own_way),
            ("sparse_weights", self.sparse_weights, "'float32' or 'int8'", own_way),
        ):
            if used and self.precision not in ("float32", "int8"):
                raise ConfigError(
                    f"{name} belongs to precision={owners}. Received: precision={self.precision!r}, {reason}. "
                    f"Leave {name} out."
                )
        allowed = ("float32", self.compute, *(["int8"] if self.compute == "bfloat16" else []))
        if self.compute not in ("float32", "auto") and self.precision not in allowed:
            *others, last = map(repr, allowed)
            raise ConfigError(
                f"compute={self.compute!r} belongs to precision={', '.join(others)} or {last}. Received: "
                f"precision={self.precision!r}, whose weights are stored for other products. Leave compute out."
            )
        if self.quantization.training:
            raise ConfigError(
                "training must be False in an export. Received: quantization=QuantizationConfig(training=True, ...). "
                "Pass this config to tfopt.quantize, train the model that it returns, and export that model."
            )

    def of_format(self, name: Format) -> Self:
        """Returns these settings for a format, without those that belong to another one.

        Example:
            >>> ExportConfig(weights_in="constants").of_format("onnx").weights_in
            'variables'
        """
        others = [setting for each in FORMATS.values() if each.name != name for setting in each.settings]
        defaults: dict[str, Any] = {setting: self.__dataclass_fields__[setting].default for setting in others}
        if name != "saved_model" and self.postprocessing is not None:  # which alone has strings
            defaults["postprocessing"] = replace(self.postprocessing, class_names=())
        return replace(self, format=name, **defaults)

    def _check_format(self) -> None:
        if self.tensorrt and (self.format, self.precision) != ("onnx", "int8"):
            raise ConfigError(
                f"tensorrt belongs to format='onnx' and precision='int8'. Received: format={self.format!r}, "
                f"precision={self.precision!r}. Leave tensorrt out."
            )
        held, instead = FORMATS[self.format].precisions, FORMATS[self.format].instead.get(self.precision)
        if held and self.precision not in held:
            raise ConfigError(
                f"precision must be one of {', '.join(held)} with format={self.format!r}. "
                f"Received: precision={self.precision!r}{f' ({instead})' if instead else ''}. Choose one of them, or "
                "format='saved_model'."
            )
        for owner in FORMATS.values():
            for name in owner.settings if owner.name != self.format else ():
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise ConfigError(
                        f"{name} belongs to format={owner.name!r}. Received: {name}={getattr(self, name)!r} with "
                        f"format={self.format!r}. Leave {name} out."
                    )

    def _check_postprocessing(self) -> None:
        after = self.postprocessing
        if after is None:
            return
        if not after.softmax and after.top_k is None:
            raise ConfigError(
                "postprocessing must compute something. Received: softmax=False and top_k=None. Set one of them, or "
                "leave postprocessing out."
            )
        if after.class_names and self.format != "saved_model":
            raise ConfigError(
                f"class_names belong to format='saved_model', which has strings. Received: class_names with "
                f"format={self.format!r}. Leave class_names out: the artifact gives the numbers of the classes."
            )
        if after.class_names and self.xla_signature:
            raise ConfigError(
                "class_names are strings, which XLA cannot compile. Received: class_names with xla_signature=True. "
                "Leave one of them out."
            )


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ExportConfig):
    """Writes a model as a SavedModel that needs only TensorFlow, or as a file for another runtime."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="IN")]
    """Model to export: a .keras file or the directory of a SavedModel."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Directory for the artifact. An earlier artifact in it is replaced."""
    calibration_data: str | None = None
    """Examples for the calibration: a .npy file of inputs, a .npz file with an array x (or one for each input of the
    model, by its name), or the training part of a data source or of a recipe (name or .toml file)."""
    evaluation_data: str | None = None
    """Labelled examples for max-accuracy-drop: a .npz file with x and y, or the test part of a data source or of a
    recipe. By default the labelled calibration data."""
    baseline: str | None = None
    """Float artifact for the comparison by `tfopt verify`. By default IN, if IN is an artifact."""
    formats: tuple[Format, ...] = ()
    """Several formats at once, for example saved_model onnx: OUT then has a directory of each format's name, with an
    artifact from the same calibration. By default OUT is one artifact of --format."""
    json: bool = False
    """Print JSON."""
