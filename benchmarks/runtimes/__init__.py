"""The other runtimes in int8_savedmodel.py. Each one is a worker process in its own environment."""
