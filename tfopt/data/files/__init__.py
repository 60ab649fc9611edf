"""Your own files as examples: images, arrays in .npy files, tables, text and TFRecord files.

Start in image_folder.py; folders.py finds the files and the parts of a folder.
"""
