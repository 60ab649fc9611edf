"""The options of the commands; the sentence below a field is its help. `tfopt export` has its own in exporting."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

import tyro
from annotated_types import Ge

from tfopt.errors import ConfigError
from tfopt.settings.validation import check_fields

AtLeastOne = Annotated[int, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class DevicesOptions:
    """Shows the processor, its instructions for fast arithmetic, the memory and the GPUs of this machine.

    An unknown value is shown with the reason. With --advise, estimates what a recipe would do on the GPUs that tfopt
    knows.
    """

    advise: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE.toml")] = None
    """Recipe whose memory and step time are estimated on each known GPU, and measured on this machine."""
    form: str | None = None
    """Form of the recipe, for example full."""
    input_shape: tuple[int, ...] | None = None
    """Shape of one example, for a recipe of classification whose examples are not on this machine."""
    outputs: AtLeastOne | None = None
    """Number of classes, together with --input-shape."""
    measure: bool = True
    """Measure some steps on this machine, and state the error of the estimate for it."""
    gpus: tuple[AtLeastOne, ...] = ()
    """Numbers of GPUs, for example 1 8 64 512: the step of the recipe on so many, with its batch on each."""
    card: str | None = None
    """GPU for --gpus, as the advice names it. By default the best per watt."""
    gpus_per_host: AtLeastOne = 8
    """Number of GPUs of each host, for --gpus."""
    network: str = "infiniband_8x200"
    """Network between the hosts, for --gpus: ethernet_10, ethernet_25, ethernet_50, ethernet_100, infiniband_100,
    infiniband_200, infiniband_8x200 or infiniband_8x400 (Gbit/s of each host)."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.advise is None:
            others = (each for each in fields(self) if each.name not in ("advise", "json"))
            for each in others:
                if getattr(self, each.name) != each.default:
                    flag = f"--{each.name.replace('_', '-')}"
                    raise ConfigError(f"{flag} needs a recipe. Received: no --advise. Add --advise NAME.")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Measures an exported artifact in a fresh process that imports only TensorFlow."""

    artifact: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """Directory of the artifact."""
    baseline: str | None = None
    """Directory of the float artifact to compare with. The manifest names the default."""
    data: str | None = None
    """Labelled examples for the score: a .npz file with x and y, the name of a data source, or a recipe (name or .toml
    file) with its source and task. Of a source, the test part is taken."""
    task: str | None = None
    """Task whose score is computed on the examples: classification, multi_label_classification, segmentation,
    language_model or regression, or package.module:name of your own. By default the task of the recipe, otherwise
    classification."""
    metric: str | None = None
    """Score to compute on the examples, instead of the task's. "accuracy" finds out the kind of classifier.
    "categorical_accuracy", "binary_accuracy" (for probabilities) and "binary_accuracy_from_logits" name the kind.
    "mean_iou", "bits_per_byte" and "mean_absolute_error" are for other tasks."""
    batch_size: int = 1
    """Number of examples in each timed call."""
    signature: str | None = None
    """Signature to call, for example serving_float. By default serving_default, if TensorFlow can run it here."""
    trusted: bool = False
    """Run an artifact that touches files or the network. Without it, such an artifact is refused before it runs."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Runs SCRIPT [ARGS...], a Python file or -m MODULE, in several workers that train together.

    Write the script after the options. The exit code is the one of the worker that failed first, 143 after SIGTERM, 130
    after Ctrl-C.
    """

    workers: int
    """Number of worker processes."""
    devices_per_worker: int | None = None
    """Number of GPUs for each worker, by default an equal share. Without GPUs, the number of logical CPU devices, by
    default one."""


@dataclass(frozen=True, kw_only=True)
class AccelerateOptions:
    """Runs SCRIPT [ARGS...], a Python file or -m MODULE, with tfopt's training step in each fit that can have it.

    The script is not changed and need not know tfopt. Write it after the options. Its output and its exit code stay. A
    report on standard error says what was applied to which line, and what could not be.
    """

    precision: Literal["auto", "float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    """Dtype policy of the script's models. float32 changes nothing. The others change the weights beyond rounding."""
    xla: bool = True
    """Whether XLA may compile the step where Keras chose it."""
    report: str | None = None
    """File to which the report is written as JSON."""
