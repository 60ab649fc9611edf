"""Data sources, and the tf.data pipeline that feeds a model.

Start in pipeline.py; examples.py says what a source returns, and stored.py how its examples are stored.
"""

import lazy_loader

# The public names are listed, with their types, in `__init__.pyi`. Each is imported when it is first used, so that
# settings can be read without TensorFlow.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
