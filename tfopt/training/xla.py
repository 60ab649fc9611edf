"""Finds out whether XLA can compile a model's training step, and explains the error if it could not.

XLA compiles a step only if it has a kernel for each operation in it. Keras marks some layers that XLA cannot compile or
that Keras did not test; other layers fail at the first step. The layers listed here were found by compiling a training
step of nearly every Keras layer (TensorFlow 2.21). If possible, a layer is named before training starts, because
training cannot continue after every failure: a TextVectorization in a compiled step aborts the whole process if XLA
has compiled something else before.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras import layers

from tfopt.compat.layers import direct_layers
from tfopt.compat.tensorflow import has_started, is_op_determinism_enabled
from tfopt.errors import warn
from tfopt.report import Skip

# Keras accepts these layers and XLA refuses them. The tests compile each of them.
NO_KERNEL: dict[type, str] = {
    layers.MixUp: "XLA has no kernel for the gamma distribution it draws from; mix in the input pipeline",
    layers.CutMix: "XLA has no kernel for the gamma distribution it draws from; mix in the input pipeline",
    layers.RandomElasticTransform: "the size of its blur is a tensor, which XLA must know when compiling; "
    "transform in the input pipeline",
}
NO_KERNEL_INTERPOLATIONS = ("bicubic", "lanczos3", "lanczos5")

_TEXT = (layers.StringLookup, layers.IntegerLookup, layers.TextVectorization, layers.Hashing, layers.HashedCrossing)
_CONVERSION_FAILED = "tf2xla conversion failed"
# How the lines of an error begin that do not say what is wrong.
_NOISE = ("Graph execution error", "Detected at node", "<stack traces", "Stack trace", "File ", "[[")
# TensorFlow's messages for a step that is wrong with or without XLA. A shape with "<=" exists only under XLA.
_ORDINARY = re.compile(r"(Incompatible shapes|Matrix size-incompatible): (?!.*<=)")

# The pass of XLA that fuses a convolution with its bias and its activation into one call of cuDNN, and how to leave
# passes out.
FUSES_CONVOLUTIONS = "cudnn-fused-convolution-rewriter"
_LEAVES_OUT = "--xla_disable_hlo_passes="

LONG_S = 60.0  # a first step of XLA that takes longer looks like one that hangs


@contextlib.contextmanager
def tells_of_a_long_compilation() -> Iterator[None]:
    """Warns while the first step under XLA takes longer than a minute: nothing else shows that it is compiled.

    Example:
        >>> with tells_of_a_long_compilation():
        ...     pass  # the first step
    """
    told = threading.Timer(
        LONG_S,
        warn,
        [
            f"The first step under XLA has taken {LONG_S:g} s so far. It need not hang: on a GPU, XLA first times all "
            "kernels that cuDNN has for each convolution, and where one is fused with its bias, cuDNN compiles them. "
            f"Wait; or start again with XLA_FLAGS={_LEAVES_OUT}{FUSES_CONVOLUTIONS} in the environment, or without "
            "XLA (jit_compile=False)."
        ],
    )
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()


def leave_convolutions_unfused() -> tuple[bool | None, str]:
    """Keeps XLA on GPUs from fusing convolutions with their bias and activation, by its flags in the environment.

    cuDNN compiles its kernels for such a fused convolution when it is asked for them. For a plain one and for its
    gradients it holds them ready. XLA asks for all of them to find the fastest: on an H200 one fused convolution took
    it 34 s, and the gradients 0.2 to 0.9 s each (docs/gpu.md). Processes that this one starts get the flags too.

    Returns: whether XLA fuses convolutions, or None if there is no GPU; and the reason. With a GPU, TensorFlow reads
        the flags when it starts its devices, and not again.
    """
    if not tf.config.list_physical_devices("GPU"):
        return None, "no GPU"
    given = os.environ.get("XLA_FLAGS", "").strip()
    flags, reason = _with_unfused(given)
    if flags is None:
        return True, reason
    if flags != given:
        if has_started():
            return True, f"TensorFlow has started its devices; set XLA_FLAGS={_LEAVES_OUT}{FUSES_CONVOLUTIONS} before"
        os.environ["XLA_FLAGS"] = flags
    return False, reason


def _with_unfused(flags: str) -> tuple[str | None, str]:
    """Returns flags of XLA that also leave convolutions unfused, and the reason; None if the user's own say otherwise.

    Example:
        >>> _with_unfused("--xla_dump_to=here")[0]
        '--xla_dump_to=here --xla_disable_hlo_passes=cudnn-fused-convolution-rewriter'
        >>> _with_unfused("--xla_disable_hlo_passes=none")
        (None, 'XLA_FLAGS names the passes that are left out; add cudnn-fused-convolution-rewriter to start sooner')
        >>> _with_unfused("flags.txt")
        (None, 'XLA_FLAGS names a file; add --xla_disable_hlo_passes=cudnn-fused-convolution-rewriter there')
    """
    reason = "cuDNN would compile its kernels for them, which takes minutes; in XLA_FLAGS"
    if FUSES_CONVOLUTIONS in flags:
        return flags, reason
    if flags and not flags.startswith("-"):
        return None, f"XLA_FLAGS names a file; add {_LEAVES_OUT}{FUSES_CONVOLUTIONS} there"
    if _LEAVES_OUT in flags:
        return None, f"XLA_FLAGS names the passes that are left out; add {FUSES_CONVOLUTIONS} to start sooner"
    return f"{flags} {_LEAVES_OUT}{FUSES_CONVOLUTIONS}".strip(), reason


def xla_blockers(model: keras.Model) -> list[Skip]:
    """Returns the reasons why XLA cannot, or should not, compile the model's training step; an empty list if none.

    The operations inside a Lambda or inside your own layer are not checked. If XLA refuses one, the first step raises
    an error that `compilation_failed` recognises. XLA can compile operations whose output shape depends on values, such
    as `tf.boolean_mask` and `tf.unique`. The layers of a subclassed model are found after they are created.

    Example:
        >>> model = keras.Sequential([keras.Input((4,), dtype="int32"), layers.Hashing(8, name="hash")])
        >>> print(xla_blockers(model)[0].reason)
        it looks up or hashes text, which XLA cannot; move it into the input pipeline
    """
    blockers = []
    if is_op_determinism_enabled():
        determinism = "op determinism is enabled, and not all operations have a deterministic XLA kernel"
        blockers.append(Skip(name=model.name, kind=type(model).__name__, reason=determinism))
    for path, layer in _walk(model):
        if reason := _why_not(layer):
            blockers.append(Skip(name=path, kind=type(layer).__name__, reason=reason))
    return blockers


def _walk(model: keras.Model) -> Iterator[tuple[str, keras.Layer]]:
    """Yields every layer once with its path: first a layer, then the layers inside it."""
    waiting: list[tuple[str, keras.Layer]] = [("", model)]
    seen: set[int] = set()
    while waiting:
        path, layer = waiting.pop(0)
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        yield path or layer.name, layer
        waiting = [(f"{path}/{inner.name}".lstrip("/"), inner) for inner in direct_layers(layer)] + waiting


def _why_not(layer: keras.Layer) -> str | None:
    for kind, reason in NO_KERNEL.items():
        if isinstance(layer, kind):
            return reason
    interpolation = getattr(layer, "interpolation", None)
    if isinstance(layer, layers.Resizing | layers.UpSampling2D) and interpolation in NO_KERNEL_INTERPOLATIONS:
        return f"XLA has no kernel for {interpolation} interpolation; use 'bilinear'"
    if layer.supports_jit:
        return None
    if isinstance(layer, layers.LSTM | layers.GRU):
        return "on a GPU it runs the cuDNN kernel, which XLA cannot call (keras issue 18456); use_cudnn=False avoids it"
    if isinstance(layer, _TEXT):
        return "it looks up or hashes text, which XLA cannot; move it into the input pipeline"
    if type(layer).__module__.startswith("keras."):
        return "Keras does not compile it (supports_jit is False); augment in the input pipeline"
    return "it says so itself: supports_jit is False"


def compilation_failed(error: BaseException) -> bool:
    """Returns whether an error comes from XLA's compilation, so that the same step may run without XLA.

    It returns False for an error that would also occur without XLA, such as shapes of loss and labels that differ.
    """
    if not isinstance(error, tf.errors.InvalidArgumentError | tf.errors.UnimplementedError | tf.errors.InternalError):
        return False
    message = str(error)
    return _CONVERSION_FAILED in message and not _ORDINARY.search(message)


def compilation_cause(error: BaseException, model: keras.Model) -> str:
    """Returns in one line which operation XLA refused and, if TensorFlow names it, in which layer."""
    message = str(error)
    node = _first(r"Detected at node (\S+) defined at", message) or _first(r"\{\{node ([^}]+)\}\}", message)
    constant = _first(r"Input \d+ to node `[^`]+` with op (\w+) must be a compile-time constant", message)
    unsupported = _first(r"Detected unsupported operations when trying to compile graph .*?: (\w+) \(", message)
    if constant:
        what = f"{constant} needs a size that is known only when it runs"
    elif unsupported == "_Arg":
        what = "an input has a dtype that XLA lacks, such as string"
    elif unsupported:
        what = f"no XLA kernel for {unsupported}"
    else:
        lines = [line.strip() for line in message.splitlines()]
        what = next((line for line in lines if line and not line.startswith(_NOISE)), type(error).__name__)
    layer = layer_of(node, model) if node else None
    place = f", in layer {layer[0]!r} ({type(layer[1]).__name__})" if layer else f", at {node}" if node else ""
    return f"XLA could not compile the step: {what.rstrip('.')}{place}"


def _first(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found[1] if found else None


def layer_of(node: str, model: keras.Model) -> tuple[str, keras.Layer] | None:
    """Returns the innermost layer whose path is in the scopes of a node: `net_1/rotate_1/Op` is in layer `rotate`."""
    # TensorFlow adds _1 to a scope that it has used before.
    scopes = [{scope, re.sub(r"_\d+$", "", scope)} for scope in node.split("/")]
    best: tuple[str, keras.Layer] | None = None
    for path, layer in _walk(model):
        remaining = iter(scopes)
        inside = layer is not model and all(any(name in scope for scope in remaining) for name in path.split("/"))
        if inside and (best is None or path.count("/") >= best[0].count("/")):
            best = path, layer
    return best
