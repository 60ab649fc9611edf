"""Recipes for models of text.

Start in gpt.py.
"""
