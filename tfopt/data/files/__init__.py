"""Your own files as examples: folders of images, arrays, tables, text and TFRecord files.

Start in tfopt/data/examples.py.
"""
