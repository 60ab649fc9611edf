"""Checkpoints, and how a stopped training resumes bit by bit.

Start in resume.py; store.py has the files, and state.py has what they hold.
"""
