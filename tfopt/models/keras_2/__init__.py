"""Keras 2 (`tf_keras`) models become Keras 3 models with the same weights and outputs.

Start in from_tf_keras.py, which walks through the calls of a model, copies the weights and compares the outputs.
translation.py makes each layer, and each operation of TensorFlow, anew.
"""
