"""Your own files as examples: folders of images, arrays in .npy files, and TFRecord files.

Start in image_folder.py; splits.py divides the examples of all sources into parts.
"""
