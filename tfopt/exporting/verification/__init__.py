"""Checks of an artifact in a fresh process: outputs, accuracy, size, speed.

Start in verify.py, which has `tfopt.verify`; process.py runs the fresh process.
"""
