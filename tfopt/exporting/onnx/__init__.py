"""Artifacts for ONNX Runtime, OpenVINO and TensorRT: a graph as an ONNX file, int8 as pairs of quantize and dequantize.

Start in write.py. convert.py and missing_ops.py alone use tf2onnx; pairs.py has the int8 numbers.
"""
