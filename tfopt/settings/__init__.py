"""The rules that settings keep, and the command-line flags made of them.

Start in validation.py; flags.py makes the flags of a configuration's fields.
"""
