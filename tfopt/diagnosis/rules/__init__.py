"""The rules of the diagnosis: each looks for one cause of a slow training step.

Start in table.py, which lists all rules; each other file has the rules for one part of the step.
"""
