"""Weights of few bits, activations in float: the settings, and Keras' own GPTQ and AWQ.

Start in config.py; keras_methods.py calls Keras.
"""
