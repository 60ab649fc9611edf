"""Graphs that store weights in few bits and decode them.

Start in storage.py; decoding.py writes the nodes that decode.
"""
