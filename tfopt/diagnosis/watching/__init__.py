"""Watching a fit: the time of its steps, of the waits for batches and of the callbacks, with the result unchanged.

Start in watch.py; observation.py is what it notes.
"""
