"""Artifacts for LiteRT, on phones, boards and desktops: a graph as a model.tflite of builtin operators.

Start in write.py. convert.py is the only module that uses TensorFlow's converter; weights.py has the stored numbers.
"""
