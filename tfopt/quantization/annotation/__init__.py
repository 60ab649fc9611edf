"""Fusions that one kernel computes, the tensors that need a range, and their annotation.

Start in fusion.py; annotate.py writes the fake-quantization nodes that exporters read.
"""
