"""Artifacts: models in one of several file formats, each with a manifest beside it.

Start in export.py, which has `tfopt.export`; lowering.py makes the graphs that are written, and formats.py lists the
file formats.
"""

import lazy_loader

# The public names are listed, with their types, in `__init__.pyi`. Each is imported when it is first used, so that
# settings can be read without TensorFlow.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
