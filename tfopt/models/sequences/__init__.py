"""Builders of models of sequences: recurrent and convolutional networks.

Start in recurrent.py.
"""
