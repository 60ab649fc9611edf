"""Your own files as examples: images, arrays in .npy files, tables, text and TFRecord files.

Start in image_folder.py; splits.py divides the examples of all sources into parts.
"""
