"""OpenVINO, quantized by NNCF with the default settings for each family of models."""

from __future__ import annotations

import nncf
import numpy as np
import openvino

from .worker import Worker, serve


class OpenVino(Worker):
    packages = ("openvino", "nncf")

    def convert(self, source: str, calibration: np.ndarray, target: str, family: str) -> None:
        model = openvino.convert_model(source, input=list(calibration.shape[1:]))
        quantized = nncf.quantize(
            model,
            nncf.Dataset(list(calibration)),
            target_device=nncf.TargetDevice.CPU,
            subset_size=len(calibration),
            model_type=nncf.ModelType.TRANSFORMER if family == "transformer" else None,
        )
        openvino.save_model(quantized, f"{target}/model.xml", compress_to_fp16=False)

    def open(self, path: str, threads: int) -> None:
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",  # for ops outside int8; the same as in the other runtimes
        }
        self.model = openvino.Core().compile_model(f"{path}/model.xml", "CPU", settings)

    def call(self, batch: np.ndarray) -> np.ndarray:
        return self.model([batch], share_inputs=True, share_outputs=True)[0]


if __name__ == "__main__":
    serve(OpenVino())
