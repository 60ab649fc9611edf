"""Keras 2 (`tf_keras`) models become Keras 3 models with the same weights and outputs.

Start in from_tf_keras.py, which walks through the calls of a model. layer_configs.py makes each layer anew, and
operations.py each operation of TensorFlow; masks.py keeps masks as they are in Keras 2, weights.py copies the weights,
and outputs.py compares the outputs.
"""
