"""Batches that the pipeline copies to a GPU in advance."""

import numpy as np
import pytest
import tensorflow as tf

from tfopt.data import EpochCounter, pipeline

pytestmark = pytest.mark.gpu

NUMBERS = (np.arange(53, dtype="float32"), np.arange(53))


def test_batches_lie_on_the_gpu_in_the_same_order():
    counter = EpochCounter()
    counter.assign(1, at_once=True)
    here = list(pipeline(NUMBERS, batch_size=8, epoch=counter))
    assert tf.config.list_logical_devices("GPU")  # a rehearsal without one ends here
    there = list(pipeline(NUMBERS, batch_size=8, epoch=counter, device="GPU:0"))
    assert all("GPU:0" in x.device for x, _ in there)
    for (x, y), (other_x, other_y) in zip(here, there, strict=True):
        np.testing.assert_array_equal(x, other_x)
        np.testing.assert_array_equal(y, other_y)
