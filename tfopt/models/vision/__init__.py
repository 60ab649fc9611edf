"""Builders of models of images: classifiers and models of masks.

Start in convolutional.py.
"""
