"""A float model runs on example data, and observers choose the range of each tensor.

Start in calibrate.py; observers.py has the ways to choose a range.
"""
