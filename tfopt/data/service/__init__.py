"""tf.data service: other processes and hosts prepare the batches, with TensorFlow's own distributed engine.

Start in client.py, which sends a pipeline to a service; serve.py runs one.
"""
