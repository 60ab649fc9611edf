"""Keras 2 (`tf_keras`) models become Keras 3 models with the same weights and outputs.

Start in from_tf_keras.py, which walks through the calls of a model, copies the weights and compares the outputs.
layer_configs.py makes each layer anew, and operations.py each operation of TensorFlow.
"""
