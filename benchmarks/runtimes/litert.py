"""LiteRT, quantized with AI Edge Quantizer's static int8 recipe. It runs on XNNPACK, its default on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter

from .worker import Worker, serve


class LiteRt(Worker):
    packages = ("ai-edge-litert", "ai-edge-quantizer")

    def convert(self, source: str, calibration: np.ndarray, target: str, family: str) -> None:
        # Imported here, because a process that only runs a model needs neither.
        import tensorflow as tf
        from ai_edge_quantizer import quantizer, recipe

        floating = Path(target, "float.tflite")
        floating.write_bytes(tf.lite.TFLiteConverter.from_saved_model(source).convert())
        ((key, signature),) = Interpreter(str(floating)).get_signature_list().items()
        (name,) = signature["inputs"]
        made = quantizer.Quantizer(str(floating), recipe.static_wi8_ai8())
        ranges = made.calibrate({key: [{name: batch} for batch in calibration]})
        made.quantize(ranges).export_model(f"{target}/model.tflite")
        floating.unlink()

    def open(self, path: str, threads: int) -> None:
        self.interpreter = Interpreter(f"{path}/model.tflite", num_threads=threads)
        self.interpreter.allocate_tensors()
        (self.input,) = self.interpreter.get_input_details()
        (self.output,) = self.interpreter.get_output_details()

    def call(self, batch: np.ndarray) -> np.ndarray:
        self.interpreter.set_tensor(self.input["index"], quantized(batch, self.input))
        self.interpreter.invoke()
        return dequantized(self.interpreter.get_tensor(self.output["index"]), self.output)


def quantized(values: np.ndarray, details: dict) -> np.ndarray:
    if details["dtype"] == values.dtype:
        return values
    scale, zero_point = details["quantization"]
    limits = np.iinfo(details["dtype"])
    return np.clip(np.round(values / scale) + zero_point, limits.min, limits.max).astype(details["dtype"])


def dequantized(values: np.ndarray, details: dict) -> np.ndarray:
    if values.dtype == np.float32:
        return values
    scale, zero_point = details["quantization"]
    return ((values.astype(np.float32) - zero_point) * scale).astype(np.float32)


if __name__ == "__main__":
    serve(LiteRt())
