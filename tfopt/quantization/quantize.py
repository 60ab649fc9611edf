"""`tfopt.quantize`, which selects the method by the kind of model and configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from tfopt.compat.kinds import is_tf_keras
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.graph import FrozenGraph
from tfopt.graph.unfolded import freeze_unfolded
from tfopt.pruning.tfmot import import_tfmot
from tfopt.quantization.annotation.annotate import AnnotatedGraph, has_ranges
from tfopt.quantization.aware_training.prepare import quantize_for_training
from tfopt.quantization.aware_training.trained_ranges import read_ranges
from tfopt.quantization.calibration.calibrate import CalibrationData, read_calibration_data
from tfopt.quantization.config import QuantizationConfig
from tfopt.quantization.keras_methods import KerasQuantized, quantize_with_keras
from tfopt.quantization.post_training.post_training import quantize_after_training
from tfopt.quantization.quantized_model import QuantizedModel, requantize
from tfopt.report import PassReport
from tfopt.settings.validation import check_type
from tfopt.signals import CTRL_C, raised_safely


@raised_safely(CTRL_C)
def quantize(
    model: keras.Model | str | Path,
    config: QuantizationConfig | keras.quantizers.QuantizationConfig | None = None,
    *,
    calibration_data: Any = None,
    evaluation_data: Any = None,
    trusted: bool = False,
) -> QuantizedModel | KerasQuantized | keras.Model:
    """Measures activation ranges on calibration data and returns the model annotated for int8.

    The model itself is not changed. Batch normalisation is folded into the weights. Then channels are rescaled where
    that makes rounding errors smaller, and the biases are corrected by the mean error that is left. Convolutions and
    matrix products become faster on processors with int8 instructions (AVX512-VNNI, AVX-VNNI, AMX). Other ops do not.

    With `training=True` in the config, the result is a Keras model for quantization-aware training: a copy with the
    same weights, whose layers compute with the values that int8 will have. Train it with `fit` like any other model.
    `tfopt.quantization_report` lists the changes. Pass the trained model again, with `training=False`, to annotate it
    with the ranges from training. `tfopt.export` needs no calibration data for it.

    With a configuration of Keras, such as `keras.quantizers.Int4QuantizationConfig()` or `GPTQConfig(...)`, Keras
    quantizes a copy of the model. The result holds the copy as `model`, and a report. A `tf_keras` (Keras 2) model
    without calibration data is passed to tensorflow-model-optimization, which returns a model to train with fake
    quantization. The trained model exports to int8 with its own ranges.

    Args:
        model: A built Keras model (functional, Sequential or subclassed), a .keras file or a SavedModel directory.
        config: The settings; None means QuantizationConfig().
        calibration_data: An array of inputs, or batches of inputs or of (inputs, labels). For a model of several
            inputs, a dict or a tuple of arrays, or batches of these. A model that holds ranges needs none.
        evaluation_data: Batches of (inputs, labels), on which max_accuracy_drop is measured. Best are examples that the
            model was not trained on. None means the labelled examples of the calibration data.
        trusted: Whether the model's source is trusted, as in ExportConfig.
    Returns: The annotated model, with a report; with training=True a functional Keras model.
    Raises:
        UnsupportedModelError: The model is not built, or it touches files, the network or Python when it runs; with
            training=True, it is neither functional nor Sequential.
        ConfigError: The calibration data is missing, empty, of the wrong shape, or not finite. There are no labels for
            max_accuracy_drop, or the metric cannot be computed from them.
    Example:
        >>> import keras, numpy as np
        >>> x = np.random.default_rng(0).random((64, 8), dtype="float32")
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation="relu")])
        >>> quantized = quantize(model, calibration_data=x)
        >>> bool(np.abs(quantized.predict(x) - model.predict(x, verbose=0)).max() < 0.05)
        True

    Reference:
        Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
        CVPR 2018, arXiv:1712.05877.
    """
    if isinstance(config, keras.quantizers.QuantizationConfig):
        return quantize_with_keras(model, config, calibration_data)
    config = QuantizationConfig() if config is None else config
    check_type("config", config, QuantizationConfig)
    of_keras_2 = is_tf_keras(model)
    if config.training and not of_keras_2:
        return quantize_for_training(model, config, calibration_data, trusted=trusted)
    source = freeze_unfolded(model, trusted=trusted)
    ranged = has_ranges(source)
    if of_keras_2 and not ranged and (config.training or calibration_data is None):
        return _quantize_tf_keras(model, config)
    return quantize_frozen(
        source, config, None if ranged else read_calibration_data(source, calibration_data, evaluation_data, config)
    )


def quantize_frozen(source: FrozenGraph, config: QuantizationConfig, data: CalibrationData | None) -> QuantizedModel:
    """Quantizes a frozen model. It holds ranges if there are no data."""
    quantized = _quantize_trained(source, config) if data is None else quantize_after_training(source, config, data)
    quantized.report.warn_if_unchanged()
    return quantized


def _quantize_trained(source: FrozenGraph, config: QuantizationConfig) -> QuantizedModel:
    """Returns a model that was trained with fake quantization, annotated with the ranges from training."""
    trained = read_ranges(source, config.exclude)
    model = QuantizedModel(
        graph=AnnotatedGraph(**vars(trained.graph)),
        float_graph=trained.graph,
        source=source,
        ranges=trained.ranges,
        weight_steps=trained.steps,
        report=PassReport(name="quantize"),
    )
    return requantize(model, trained.kept_float)


def _quantize_tf_keras(model: Any, config: QuantizationConfig) -> Any:
    """Returns the copy of a `tf_keras` model that tensorflow-model-optimization makes, to compile and train.

    The ranges of its fake quantization may be asymmetric; the export makes them symmetric.
    """
    wanted = {"exclude": (), "weight_bits": 8, "learned_ranges": False}
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"A tf_keras model is quantized by tfmot, which takes {name}={value!r} only. "
                f"Received: {name}={getattr(config, name)!r}. Leave it out, or use a Keras 3 model."
            )
    if not model.built:
        raise UnsupportedModelError(
            f"model must be built. Received: {model.name!r} without weights. Give it an Input layer."
        )
    try:
        return import_tfmot().quantization.keras.quantize_model(model)
    except (ValueError, RuntimeError) as error:
        raise UnsupportedModelError(f"tfmot cannot quantize {model.name!r}: {error}") from error
