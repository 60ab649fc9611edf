"""The training step: micro-batches, replicas, XLA, and several steps in one call.

Start in step.py; runtime.py puts the step on a model.
"""
