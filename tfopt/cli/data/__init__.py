"""The command `tfopt data`, and the examples that other commands name.

Start in commands.py; example_data.py finds examples by the name of a source, a recipe or a file.
"""
