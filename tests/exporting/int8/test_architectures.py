"""Whole architectures: the int8 artifact, reloaded in its own process, is as good as the annotated graph.

benchmarks/applications.py takes fifteen of them, at their full size.
"""

from functools import partial

import keras
import numpy as np
import pytest
from keras.src.applications.convnext import ConvNeXt
from keras.src.applications.efficientnet import EfficientNet

from tfopt.exporting import ExportConfig, SavedModelProcess, export
from tfopt.quantization import QuantizationConfig, quantize

pytestmark = pytest.mark.slow

# Without corrections, which chase the noise that a network of random weights makes of rounding.
PLAIN = QuantizationConfig(equalization=False, smooth_quant=0.0, bias_correction=False)

ARCHITECTURES = {
    "EfficientNet": (partial(EfficientNet, 1.0, 0.5, 64), 64),  # ten blocks of the sixteen of B0
    "ConvNeXt": (partial(ConvNeXt, depths=(1, 1, 2, 1), projection_dims=(24, 48, 96, 192)), 64),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_int8_artifact(name, tmp_path):
    builder, size = ARCHITECTURES[name]
    model = builder(weights=None, input_shape=(size, size, 3), classes=50, classifier_activation=None)
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (16, size, size, 3)).astype("float32")
    # Random weights make activations vanish or explode; statistics of real batches keep them at their usual size.
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
    model(x, training=True)
    quantized = quantize(model, PLAIN, calibration_data=x)
    artifact = export(quantized, tmp_path / name, ExportConfig(int8_nodes="all"))
    expected, exact = quantized.predict(x), model.predict(x, verbose=0)
    with SavedModelProcess(artifact.path) as process:
        (outputs,) = process.predict({next(iter(process.loaded["inputs"])): x}).values()
    assert process.loaded["kernels"]["_FusedQuantizedConv2D"] >= 4
    # A value on the edge of a step rounds either way, and a deep network of random weights magnifies that like any
    # other noise. So the two are compared by how far they are from the float model: equally far.
    assert np.linalg.norm(outputs - exact) <= 1.3 * np.linalg.norm(expected - exact)
    assert np.linalg.norm(outputs - expected) <= np.linalg.norm(expected - exact)
