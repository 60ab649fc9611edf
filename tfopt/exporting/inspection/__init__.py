"""What a model file holds, read from the file alone: tensors, operators, weights, multiply-adds, what it reaches.

Start in inspect.py, which has `tfopt.inspect`. contents.py is what every reader returns, and each format has a reader
in a module of its name.
"""
