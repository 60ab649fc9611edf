"""What can be known of a training step, or of an artifact, on a GPU that is not at hand.

The graph is traced from shapes alone; nothing runs. Each of its operations is looked up in TensorFlow's registry of
kernels, XLA is asked whether it lowers the step for a GPU, and the estimates of memory and the figures of the card's
datasheet say the rest. Not known without a card are times, the memory that XLA and cuDNN take beyond the tensors, and
faults of drivers and kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfopt.advisor.advise import RESERVED_BYTES, machine_with
from tfopt.advisor.recipe_step import batch_specs, compiled_model, first_batch, plan_on
from tfopt.advisor.shapes import Shape, zeros_like
from tfopt.atomic.directories import MARK
from tfopt.compat.layers import layers_inside
from tfopt.compat.recurrent import as_on_a_gpu
from tfopt.data import Examples
from tfopt.errors import ConfigError, TfoptError, UnsupportedModelError
from tfopt.exporting.formats import SAVED_MODEL
from tfopt.exporting.manifest import read_manifest
from tfopt.graph.source import saved_model_function
from tfopt.hardware import GPU_CARDS, Hardware, detect
from tfopt.hardware.gpus import card_name
from tfopt.hardware.machine_code import machine_code
from tfopt.profiling.audit import gradients_of_values, placements, tensor_core_share, why_not_lowered
from tfopt.profiling.cost import kernels
from tfopt.profiling.cost.memory import step_bytes
from tfopt.profiling.cost.training import train_graph
from tfopt.profiling.tensor_cores import tensor_core_alignment
from tfopt.recipe import Recipe
from tfopt.recipes import RECIPES, find_recipe
from tfopt.report import Audit, OpWithoutKernel
from tfopt.runner.work import place_augmentation
from tfopt.training import Plan
from tfopt.training.step.runtime import plan_of
from tfopt.training.xla import compilation_cause, layer_of, xla_blockers

DEFAULT_CARD = "A100 SXM4 80GB"
FULL = "full"
XLA = "jit_compile"  # the setting
OTHER_RUNTIME = "An audit looks up TensorFlow's kernels, which it does not use: audit a SavedModel of the same model."
REMEDIES = {
    ".keras": "Load it, and call tfopt.audit(model, (x, y)) in Python; or export it, and audit the artifact.",
    ".pb": "Name the directory that it is in.",
    ".py": "Audit a script by `tfopt devices --audit SCRIPT.py`.",
    **dict.fromkeys((".onnx", ".tflite", ".xml"), OTHER_RUNTIME),
}
# What XLA says of a function with variables if it has no device.
WITHOUT_VARIABLES = "does not support resource arguments"
OPEN = 128  # what an open size of an artifact's inputs counts as; the batch is one example


def audit(
    subject: Recipe | keras.Model | str | Path,
    batch: Any = None,
    *,
    card: str | None = None,
    form: str | None = FULL,
    input_shape: Sequence[int] | None = None,
    outputs: int | None = None,
    jit_compile: bool | None = None,
    trusted: bool = False,
) -> Audit:
    """Says what is known of a training step, or of an artifact, on a GPU, without one.

    Args:
        subject: A recipe, its name or file, of which the training step is traced; a compiled Keras model; or the
            directory of a SavedModel, of which the serving function is looked at.
        batch: For a model, a batch as `fit` trains on it, of arrays or `tf.TensorSpec`: (x, y) or (x, y,
            sample_weight).
        card: A GPU of tfopt.hardware.GPU_CARDS, as NVML names it or in short (H100, A100-80GB). None takes the GPU of
            this machine or, without one, the A100 with 80 GB.
        form: Form of the recipe; None is the recipe as it stands, and "full" also, where it has no such form.
        input_shape, outputs: Shape of one example and number of outputs, for a recipe whose examples are not known.
        jit_compile: Whether XLA is to compile the step of a model. None takes it as on, unless its plan says otherwise
            or, on a machine with a GPU, its `compile`: without one, Keras turns XLA off by itself.
        trusted: Whether an artifact may touch files and the network.
    Raises:
        ConfigError: The card is unknown, or the shapes of the examples are; or TensorFlow was built without CUDA.
        UnsupportedModelError: The model is not compiled, or the artifact is unsafe.
        ArtifactError: The directory holds no SavedModel.
    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        >>> model.compile("sgd", "mse")
        >>> found = audit(model, (tf.TensorSpec((16, 8)), tf.TensorSpec((16, 8))), card="L4")
        >>> found.problems, found.lowers, found.machine_code
        ([], True, 'native')
    """
    if not tf.sysconfig.get_build_info().get("is_cuda_build"):
        raise ConfigError(
            "An audit needs a TensorFlow that holds the kernels for GPUs. Received: one that was built without CUDA. "
            "Install the package tensorflow for Linux, which needs no GPU."
        )
    name = card_name(card) if card is not None else default_card(detect())
    if isinstance(subject, keras.Model):
        if batch is None:
            raise ConfigError(
                "A batch must be given with a model. Received: batch=None. Pass (x, y), of arrays or of tf.TensorSpec."
            )
        return _step(subject, batch, name, name=subject.name, xla_off=_why_xla_is_off(subject, jit_compile))
    if isinstance(subject, str | Path) and Path(subject).is_dir():
        return _artifact(Path(subject), name, trusted)
    if isinstance(subject, str | Path) and _is_another_file(Path(subject)):
        raise ConfigError(
            "subject must be a recipe, the directory of a SavedModel, or a compiled model with a batch. Received: "
            f"{str(subject)!r}. {REMEDIES.get(Path(subject).suffix, 'Give one of them.')}"
        )
    recipe = find_recipe(subject)
    if form is not None and (form != FULL or FULL in recipe.forms):
        recipe = recipe.quick() if form == "quick" else recipe.form(form)
    if (input_shape is None) != (outputs is None):
        raise ConfigError(
            "input_shape and outputs must be given together. Received: "
            f"input_shape={input_shape}, outputs={outputs}. Give both, or none."
        )
    shape = None if input_shape is None or outputs is None else Shape(tuple(input_shape), outputs)
    return _recipe(recipe, zeros_like(recipe, shape), name)


def _is_another_file(path: Path) -> bool:
    return path.suffix != ".toml" and str(path) not in RECIPES and path.is_file()


def default_card(hardware: Hardware) -> str:
    """Returns the name of the GPU of a machine, or of the one that audits take without one."""
    return card_name(hardware.gpus[0].name) if hardware.gpus else DEFAULT_CARD


def _recipe(recipe: Recipe, examples: Examples, card: str) -> Audit:
    decided = plan_on(recipe, machine_with(card, GPU_CARDS[card]))
    with as_on_a_gpu():
        model = compiled_model(recipe, examples, decided)
    specs = batch_specs(recipe, first_batch(recipe, examples))
    others = _augmentation_graphs(recipe, examples, decided)
    off = None if decided.jit_compile else next(each.reason for each in decided.decisions if each.setting == XLA)
    return _step(model, specs, card, name=recipe.name, xla_off=off, others=others)


def _why_xla_is_off(model: keras.Model, asked: bool | None) -> str | None:
    """Returns why a compiled model asks for no XLA; None if it does, or leaves it to the GPU."""
    if model.run_eagerly:
        return "run_eagerly=True"
    if tf.config.functions_run_eagerly():
        return "run_functions_eagerly(True)"
    if asked is None:
        decided = plan_of(model)
        of_keras = model.jit_compile or not detect().gpus
        asked = of_keras if decided is None else decided.config.jit_compile is not False
    return None if asked else f"{XLA}=False"


def _augmentation_graphs(recipe: Recipe, examples: Examples, decided: Plan) -> list[Any]:
    """Returns the graph of an augmentation in the training step, which runs before what XLA compiles."""
    augmentation, decisions = place_augmentation(recipe, examples, decided)
    if augmentation is None or decisions[0].value != "device":
        return []
    size = recipe.training.global_batch_size
    specs = tf.nest.map_structure(lambda spec: tf.TensorSpec([size, *spec.shape], spec.dtype), examples.element_spec)
    changed = tf.function(lambda example, seed: augmentation(example, seed), autograph=False)
    return [changed.get_concrete_function(specs, tf.TensorSpec((2,), tf.int64)).graph]


def _step(
    model: keras.Model, batch: Any, card: str, *, name: str, xla_off: str | None, others: Sequence[Any] = ()
) -> Audit:
    """Audits a compiled model's step, and the other graphs that run with it, on a GPU of the table."""
    _check_batch(batch)
    figures, unavailable, error = GPU_CARDS[card], dict[str, str](), None
    with as_on_a_gpu(), _supports_jit_kept(model):
        graph, examples = _traced(model, batch)
        blockers = xla_blockers(model)  # Keras may find out in the trace
        uses_xla = xla_off is None and not blockers
        can_ask = uses_xla and type(model).train_step is keras.Model.train_step
        if can_ask:
            function, specs = gradients_of_values(model, _specs(batch))
            error = why_not_lowered(function, *specs)
    if error is not None:
        unavailable["lowers"] = compilation_cause(error, model)
    elif uses_xla and not can_ask:
        unavailable["lowers"] = f"{type(model).__name__} has its own train_step"
    elif not uses_xla:
        unavailable["lowers"] = f"{blockers[0].name}: {blockers[0].reason}" if blockers else str(xla_off)
    found = placements(graph, *others)
    share, slow = tensor_core_share(kernels(graph, fused=False), figures)
    if share is None:
        unavailable["tensor_core_share"] = "the step has no matrix product of known size"
    alignment = tensor_core_alignment(model)
    code = machine_code(figures.compute_capability)
    return Audit(
        name=name,
        subject="training step",
        batch_size=examples,
        card=card,
        precision=model.dtype_policy.name,
        jit_compile=uses_xla,
        operations=found.operations,
        on_host=tuple(_with_layers(each, model) for each in found.on_host),
        not_in_xla=tuple(_with_layers(each, model) for each in found.not_in_xla),
        lowers=error is None if can_ask else None,
        memory_bytes=step_bytes(graph, model, _specs(batch)) + RESERVED_BYTES,
        card_memory_bytes=figures.memory_bytes,
        tensor_core_share=share,
        not_in_tensor_cores=slow,
        misaligned=tuple(str(row) for row in alignment.rows if not row.is_output),
        machine_code=code.kind,
        machine_code_detail=code.detail,
        unavailable=unavailable,
    )


def _traced(model: keras.Model, batch: Any) -> tuple[Any, int]:
    try:
        return train_graph(model, batch)
    except TfoptError:
        raise
    except Exception as error:  # of the model's own code, or of an operation without a gradient
        remedy = "A step that runs eagerly need not be one." if model.run_eagerly else "Mend the model or its loss."
        raise UnsupportedModelError(
            f"The training step must be one that TensorFlow can trace. Received: {model.name!r}, whose step raises "
            f"{type(error).__name__} ({_first_line(error)}). {remedy}"
        ) from error


@contextlib.contextmanager
def _supports_jit_kept(model: keras.Model) -> Iterator[None]:
    """Lets layers that Keras finds unfit for XLA on a GPU be as before in the end."""
    before = [(layer, layer.supports_jit) for layer in layers_inside(model)]
    try:
        yield
    finally:
        for layer, supports in before:
            layer.supports_jit = supports


def _check_batch(batch: Any) -> None:
    for value in tf.nest.flatten(batch):
        if isinstance(value, tf.RaggedTensor | tf.RaggedTensorSpec | tf.SparseTensor | tf.SparseTensorSpec):
            raise ConfigError(
                "A batch must be of dense tensors, whose sizes are known. Received: a "
                f"{type(value).__name__} of shape {value.shape}. Pad it to one size, as padded_batch of tf.data "
                "does, or call to_tensor or tf.sparse.to_dense on it."
            )
        if value is not None and value.shape[:1] == (0,):
            raise ConfigError(f"A batch must hold examples. Received: shape={tuple(value.shape)}. Pass one or more.")


def _specs(batch: Any) -> Any:
    """Returns the specs of a batch, in the order (x, y, sample_weight). `fit` makes arrays in float64 float32."""

    def spec(value: Any) -> Any:
        if value is None or isinstance(value, tf.TensorSpec):
            return value
        dtype = tf.as_dtype(value.dtype)
        wide = dtype == tf.float64 and not tf.is_tensor(value)
        return tf.TensorSpec(value.shape, keras.config.floatx() if wide else dtype)

    return keras.tree.map_structure(spec, tuple(batch) if isinstance(batch, list) else batch)


def _with_layers(found: OpWithoutKernel, model: keras.Model) -> OpWithoutKernel:
    """Returns a record with the layers that its operations are in, or the scopes of those outside of layers."""
    places = []
    for path in found.places:
        layer = layer_of(path, model)
        places.append(layer[0] if layer else _scope(path))
    return replace(found, places=tuple(dict.fromkeys(places)))


def _with_scopes(found: OpWithoutKernel) -> OpWithoutKernel:
    return replace(found, places=tuple(dict.fromkeys(map(_scope, found.places))))


def _scope(path: str) -> str:
    return path.rpartition("/")[0] or path


def _artifact(directory: Path, card: str, trusted: bool) -> Audit:
    kind = read_manifest(directory).model_format if (directory / MARK).is_file() else SAVED_MODEL
    if kind != SAVED_MODEL:
        raise ConfigError(
            f"An artifact must be a SavedModel. Received: {directory}, in the format {kind}. {OTHER_RUNTIME}"
        )
    function = saved_model_function(directory, "serving_default", trusted)
    inputs = function.structured_input_signature[1]  # by name
    names, specs = list(inputs), [tf.TensorSpec(_filled(each.shape), each.dtype) for each in inputs.values()]

    def serve(*given: Any) -> Any:
        return function(**dict(zip(names, given, strict=True)))

    error = why_not_lowered(tf.function(serve, autograph=False, jit_compile=True), *specs)
    found, figures = placements(function.graph), GPU_CARDS[card]
    of_artifact = "depends on the batch, and is not estimated for artifacts"
    unavailable = {"memory_bytes": of_artifact, "tensor_core_share": "is counted for models"}
    takes_values = error is None or WITHOUT_VARIABLES not in str(error)
    if error is not None:
        words = _first_line(error) if takes_values else "it has variables, which XLA does not take without a device"
        unavailable["lowers"] = words
    code = machine_code(figures.compute_capability)
    return Audit(
        name=str(directory),
        subject="serving function",
        batch_size=None,
        card=card,
        precision=_precision(directory),
        jit_compile=False,
        operations=found.operations,
        on_host=tuple(map(_with_scopes, found.on_host)),
        not_in_xla=tuple(map(_with_scopes, found.not_in_xla)),
        lowers=error is None if takes_values else None,
        card_memory_bytes=figures.memory_bytes,
        machine_code=code.kind,
        machine_code_detail=code.detail,
        unavailable=unavailable,
    )


def _precision(directory: Path) -> str:
    """Returns the precision in the manifest of an artifact of tfopt."""
    return read_manifest(directory).precision if (directory / MARK).is_file() else "unknown"


def _filled(shape: Any) -> list[int]:
    """Returns a shape with a batch of one example, and a size for what else is open."""
    if shape.rank is None:
        return []
    return [1 if place == 0 and size is None else OPEN if size is None else size for place, size in enumerate(shape)]


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
