"""Keras 2 models: tfmot's quantization-aware training, and its result in our int8 kernels."""

import pytest

# In a process of its own: importing tfmot loads tf_keras, which changes what TensorFlow takes for Keras.
TRAINS_AND_EXPORTS = """
import sys
import numpy as np
import tensorflow as tf
import tf_keras
import tfopt
from tfopt.errors import ConfigError
from tfopt.exporting import SavedModelProcess

L = tf_keras.layers
tf_keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(256, 8, 8, 3)).astype("float32")
y = (x[:, :4].mean(axis=(1, 2, 3)) > x[:, 4:].mean(axis=(1, 2, 3))).astype("int64")
inputs = L.Input((8, 8, 3), name="image")
h = L.ReLU()(L.BatchNormalization()(L.Conv2D(8, 3, use_bias=False, padding="same")(inputs)))
h = L.ReLU()(L.Add()([h, L.BatchNormalization()(L.Conv2D(8, 3, padding="same")(h))]))
h = L.ReLU(6.0)(L.BatchNormalization()(L.DepthwiseConv2D(3)(h)))
model = tf_keras.Model(inputs, L.Dense(2)(L.Dense(16, activation="relu")(L.Flatten()(h))))
loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"])
model.fit(x, y, epochs=4, batch_size=16, verbose=0)
before = model.get_weights()

trained = tfopt.quantize(model)
assert isinstance(trained, tf_keras.Model)
trained.compile("adam", loss, metrics=["accuracy"])
trained.fit(x, y, epochs=6, batch_size=16, verbose=0)
assert all((a == b).all() for a, b in zip(before, model.get_weights()))

artifact = tfopt.export(trained, sys.argv[1] + "/qat", tfopt.ExportConfig(precision="int8", int8_nodes="all"))
assert len(artifact.report.changed) == 5, artifact.report
with SavedModelProcess(artifact.path) as process:
    kernels = process.loaded["kernels"]
    outputs = process.predict({"image": x})["output_0"]
assert kernels["_FusedQuantizedConv2D"] == 2 and kernels["_QuantizedMatMul"] == 2, kernels
expected = trained.predict(x, verbose=0)
print("error", np.linalg.norm(outputs - expected) / np.linalg.norm(expected))
assert np.linalg.norm(outputs - expected) < 0.1 * np.linalg.norm(expected)
assert np.mean(outputs.argmax(1) == expected.argmax(1)) > 0.96

# As it is, in float32, and quantized from data, without training.
for precision in ("float32", "int8"):
    config = tfopt.ExportConfig(precision=precision)
    artifact = tfopt.export(model, sys.argv[1] + "/" + precision, config, calibration_data=x)
    served = tf.saved_model.load(str(artifact.path)).signatures["serving_default"]
    outputs = served(image=tf.constant(x))["output_0"].numpy()
    expected = model.predict(x, verbose=0)
    limit = 1e-5 if precision == "float32" else 0.1
    assert np.linalg.norm(outputs - expected) < limit * np.linalg.norm(expected), precision
try:
    tfopt.quantize(model, tfopt.QuantizationConfig(weight_bits=4))
except ConfigError as error:
    assert "weight_bits=8 only" in str(error)
else:
    raise AssertionError
print("done")
"""


@pytest.mark.slow
def test_tfmot_trains_and_our_kernels_serve(tmp_path, fresh_python):
    done = fresh_python("-c", TRAINS_AND_EXPORTS, tmp_path, imported="nothing")
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]
