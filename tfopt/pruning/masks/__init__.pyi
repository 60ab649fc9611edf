from .allocation import erk_sparsities
from .choice import choose_masks, holds, keep_highest
from .constraint import Mask, attach_counter, attach_mask, attach_movement
from .patterns import Pattern, parse_pattern

__all__ = [
    "Mask",
    "Pattern",
    "attach_counter",
    "attach_mask",
    "attach_movement",
    "choose_masks",
    "erk_sparsities",
    "holds",
    "keep_highest",
    "parse_pattern",
]
