"""Recipes for models of images.

Start in digits_cnn.py, the recipe of the demo.
"""
