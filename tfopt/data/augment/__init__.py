"""Augmentation: random changes of training examples, which depend only on a seed.

Start in augmentation.py.
"""
