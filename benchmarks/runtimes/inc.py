"""Intel Neural Compressor's int8 SavedModel. It needs only TensorFlow, so it runs like tfopt's SavedModels."""

from __future__ import annotations

import numpy as np
from neural_compressor.tensorflow import StaticQuantConfig, quantize_model

from .worker import Worker, serve


class IntelNeuralCompressor(Worker):
    packages = ("neural-compressor-tf", "tensorflow")

    def convert(self, source: str, calibration: np.ndarray, target: str, family: str) -> None:
        batches = Batches(calibration)
        quantized = quantize_model(source, StaticQuantConfig(), batches, calib_iteration=len(calibration))
        quantized.save(target)


class Batches:
    """The calibration data for quantize_model: batches with labels that it ignores."""

    def __init__(self, batches: np.ndarray) -> None:
        self.batches, self.batch_size = batches, batches.shape[1]

    def __iter__(self):
        return ((batch, 0) for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


if __name__ == "__main__":
    serve(IntelNeuralCompressor())
