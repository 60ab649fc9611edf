"""Quantization-aware training (QAT): fake-quantization layers, learned ranges (LSQ).

Start in prepare.py, which puts fake quantization into a model; trained_ranges.py reads the ranges afterwards.
"""
