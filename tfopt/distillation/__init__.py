"""Distillation: a student learns from the outputs of a teacher beside its labels, in Keras' own `fit`.

Start in distill.py; losses.py has the mathematics, and teacher.py what a teacher may be.
"""

import lazy_loader

# The public names are listed, with their types, in `__init__.pyi`. Each is imported when it is first used, so that
# settings can be read without TensorFlow.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
