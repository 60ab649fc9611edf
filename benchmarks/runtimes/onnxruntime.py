"""ONNX Runtime on a model from tf2onnx, quantized to QDQ: uint8 activations and int8 weights, which VNNI multiplies.

Settings follow https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html: weights per channel,
preprocessing first, all graph optimizations. Transformers quantize only the products, as in the
examples of ONNX Runtime.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime

from .worker import Worker, serve


class OnnxRuntime(Worker):
    packages = ("onnxruntime", "onnx", "tf2onnx")

    def convert(self, source: str, calibration: np.ndarray, target: str, family: str) -> None:
        # Imported here, because a process that only runs a model needs none of these.
        import onnx
        import tensorflow as tf
        import tf2onnx
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

        floating, prepared = (Path(target, name) for name in ("float.onnx", "prepared.onnx"))
        loaded = tf.saved_model.load(source)
        serving = loaded.signatures["serving_default"]
        ((name, spec),) = serving.structured_input_signature[1].items()
        function = tf.function(lambda x: serving(**{name: x}), input_signature=[spec])
        model, _ = tf2onnx.convert.from_function(function, input_signature=[spec], opset=18)
        onnx.save(model, floating)
        # The symbolic shape inference ends in an error on attention.
        quant_pre_process(floating, prepared, skip_symbolic_shape=family == "transformer")
        quantize_static(
            prepared,
            Path(target, "model.onnx"),
            Batches(model.graph.input[0].name, calibration),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul", "Gemm", "Conv"] if family == "transformer" else None,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        floating.unlink()
        prepared.unlink()

    def open(self, path: str, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        self.session = onnxruntime.InferenceSession(f"{path}/model.onnx", options, ["CPUExecutionProvider"])
        self.input = self.session.get_inputs()[0].name

    def call(self, batch: np.ndarray) -> np.ndarray:
        return self.session.run(None, {self.input: batch})[0]


class Batches:
    """The calibration data for quantize_static."""

    def __init__(self, name: str, batches: np.ndarray) -> None:
        self.feeds = iter([{name: batch} for batch in batches])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.feeds, None)


if __name__ == "__main__":
    serve(OnnxRuntime())
