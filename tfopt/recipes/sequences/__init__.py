"""Recipes for models of sequences.

Start in lstm.py.
"""
