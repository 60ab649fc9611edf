"""Tasks: the loss, the metrics and the score of what a model is trained for.

Start in task.py; scores.py has the scores of an artifact.
"""

import lazy_loader

# The public names are listed, with their types, in `__init__.pyi`. Each is imported when it is first used, so that
# settings can be read without TensorFlow.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
