"""Artifacts for ONNX Runtime, OpenVINO and TensorRT: a graph as an ONNX file, int8 as pairs of quantize and dequantize.

Start in write.py. convert.py is the only module that uses tf2onnx, and pairs.py has the int8 numbers.
"""
