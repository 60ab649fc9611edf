"""The only package that uses private names of Keras and TensorFlow, each one checked.

Start in checks.py, which says how a name is checked; replace.py sets methods in place of Keras'; the other modules have
one function for each private name.
"""
