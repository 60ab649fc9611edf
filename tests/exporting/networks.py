"""Small networks with the kinds of layers that a file format may have no equivalent for, and examples for them."""

import keras
import numpy as np
from keras import layers


def images():
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    y = layers.ReLU(6.0)(layers.DepthwiseConv2D(3, padding="same")(x))
    x = layers.MaxPooling2D()(layers.Add()([x, layers.Conv2D(8, 1)(y)]))
    x = layers.Conv2D(12, 3, strides=2, padding="same", activation="swish")(x)
    x = layers.Concatenate()([layers.AveragePooling2D(2)(x), layers.MaxPooling2D()(x)])
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 1)(x))
    outputs = layers.Dense(10, activation="softmax")(layers.Dense(16, activation="gelu")(x))
    return keras.Model(inputs, outputs), (16, 16, 3)


def sequences():
    inputs = keras.Input((None, 8))
    x = layers.Bidirectional(layers.LSTM(6, return_sequences=True))(inputs)
    return keras.Model(inputs, layers.Dense(3)(layers.GRU(5)(x))), (7, 8)


def attention():
    inputs = keras.Input((None, 16))
    x = layers.LayerNormalization()(inputs)
    x = layers.MultiHeadAttention(2, 8)(x, x) + inputs
    x = layers.Dense(16)(layers.Dense(32, activation="gelu")(x))
    return keras.Model(inputs, {"steps": x, "mean": layers.GlobalAveragePooling1D()(x)}), (9, 16)


def one_axis():
    inputs = keras.Input((20, 6))
    x = layers.Conv1D(8, 3, padding="causal", dilation_rate=2, activation="relu")(inputs)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(layers.Conv1D(4, 3, strides=2)(x)))), (20, 6)


def upwards():
    inputs = keras.Input((6, 6, 4))
    x = layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(8, 3, groups=4, activation="relu")(x)
    return keras.Model(inputs, layers.UpSampling2D()(layers.Conv2D(3, 3)(x))), (6, 6, 4)


def examples(shape, count=32):
    return np.random.default_rng(0).normal(size=(count, *shape)).astype("float32")


def squeeze_and_excite():
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="silu")(inputs)
    x = layers.DepthwiseConv2D(3, padding="same", activation="silu")(x)
    y = layers.Conv2D(4, 1, activation="silu")(layers.GlobalAveragePooling2D(keepdims=True)(x))
    x = layers.Multiply()([x, layers.Conv2D(8, 1, activation="sigmoid")(y)])
    return keras.Model(inputs, layers.Dense(5)(layers.Flatten()(layers.Conv2D(8, 1)(x)))), (16, 16, 3)
