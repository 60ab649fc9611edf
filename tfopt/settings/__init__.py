"""The rules that settings keep, and the command-line flags made of them.

Start in validation.py; flags.py makes a flag for each field of a configuration.
"""
