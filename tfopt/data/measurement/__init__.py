"""The speed of each stage of an input pipeline, and how long a step waits for its batch.

Start in measure.py; stages.py takes a pipeline apart, and report.py says what to change.
"""
