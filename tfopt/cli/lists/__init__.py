"""The commands `tfopt models` and `tfopt recipes`: lists with costs, and the cost of one model or recipe.

Start in model_commands.py; stored.py reads the figures of the lists, so that these need no TensorFlow. advice.py lists
GPUs for a recipe.
"""
