"""Steps around a model, inside the artifact: from pixels to its input, and from its output to the best classes.

Start in config.py, which has the settings. images.py computes the input, and answers.py what follows the output.
"""
