"""Checkpoints, and how a stopped training resumes bit by bit.

Start in checkpoints.py, then fit_checkpoints.py; store.py writes the files, and state.py reads the variables.
"""
