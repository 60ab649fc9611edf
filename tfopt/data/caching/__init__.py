"""Where examples are kept between epochs: in memory, on disk or nowhere, and why.

Start in choice.py, which decides; memory.py and disk.py keep the examples.
"""
