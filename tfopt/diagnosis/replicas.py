"""Times each replica of a distributed model alone, and the exchange of gradients alone."""

from __future__ import annotations

import time
from typing import Any

import keras
import tensorflow as tf

from tfopt.diagnosis.experiments import usual_ms

ROUNDS = 5


def replica_ms(model: keras.Model, batch: Any) -> list[float]:
    """Returns the milliseconds that each replica of this process takes for loss and gradients, without an exchange.

    Each replica reads the clock before and after its own work, so a slow replica shows although all run together.

    Args:
        model: A model that was built and compiled under a distribution strategy.
        batch: A batch with a part for each replica.
    """
    strategy = model.distribute_strategy

    def work(data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        begin = tf.timestamp()
        with tf.control_dependencies([begin]), tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=True)
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        with tf.control_dependencies([each for each in gradients if isinstance(each, tf.Tensor)]):
            return tf.timestamp() - begin

    run = tf.function(lambda data: strategy.run(work, args=(data,)))
    run(batch)
    rounds = [strategy.experimental_local_results(run(batch)) for _ in range(ROUNDS)]
    return [1e3 * sorted(float(each) for each in times)[ROUNDS // 2] for times in zip(*rounds, strict=True)]


def exchange_ms(model: keras.Model) -> float:
    """Returns the milliseconds of one sum of tensors like the gradients over all replicas, with nothing else to do."""
    strategy = model.distribute_strategy

    def work() -> Any:
        like = [tf.ones_like(variable.value) for variable in model.trainable_variables]
        replica = tf.distribute.get_replica_context()
        return tf.add_n([tf.reduce_sum(each) for each in replica.all_reduce(tf.distribute.ReduceOp.SUM, like)])

    run = tf.function(lambda: strategy.run(work))

    def call() -> None:
        for each in strategy.experimental_local_results(run()):
            each.numpy()

    begin = time.perf_counter()
    call()
    return usual_ms(call, seconds=min(0.5, 10 * (time.perf_counter() - begin)))
