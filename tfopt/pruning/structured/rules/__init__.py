"""How each layer and operation of Keras couples the channels of its inputs, weights and outputs.

A rule is chosen by the exact class: a subclass may compute something else.
"""

from tfopt.pruning.structured.rules.attention import ATTENTION
from tfopt.pruning.structured.rules.elementwise import ELEMENTWISE, OPERATIONS
from tfopt.pruning.structured.rules.normalizations import NORMALIZATIONS
from tfopt.pruning.structured.rules.products import PRODUCTS
from tfopt.pruning.structured.rules.recurrent import RECURRENT
from tfopt.pruning.structured.rules.shapes import SHAPE_OPERATIONS, SHAPES

LAYER_RULES = {**PRODUCTS, **NORMALIZATIONS, **ELEMENTWISE, **SHAPES, **ATTENTION, **RECURRENT}
OPERATION_RULES = {**OPERATIONS, **SHAPE_OPERATIONS}

__all__ = ["LAYER_RULES", "OPERATION_RULES"]
