"""How a sparsity of the whole model is divided over its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def erk_sparsities(shapes: Sequence[Sequence[int]], sparsity: float) -> list[float]:
    """Returns a sparsity for each kernel, so that the kernels together have the given sparsity.

    A kernel keeps a share of its weights in proportion to (sum of its sizes) / (product of its sizes): large kernels
    become sparser than small ones. A kernel whose share would exceed 1 stays dense.

    Example:
        >>> [round(each, 3) for each in erk_sparsities([(10, 10), (100, 100)], 0.8)]
        [0.0, 0.808]

    Reference:
        Erdos-Renyi-Kernel in Evci et al., "Rigging the Lottery", ICML 2020, arXiv:1911.11134.
    """
    sizes = [math.prod(shape) for shape in shapes]
    weights = [sum(shape) for shape in shapes]  # the share that is kept, times the size, up to a factor
    dense: set[int] = set()
    while len(dense) < len(sizes):
        left = (1 - sparsity) * sum(sizes) - sum(sizes[number] for number in dense)
        factor = left / sum(each for number, each in enumerate(weights) if number not in dense)
        over = {number for number, each in enumerate(weights) if number not in dense and factor * each > sizes[number]}
        if not over:
            break
        dense |= over
    return [
        0.0 if number in dense else 1 - factor * each / size
        for number, (each, size) in enumerate(zip(weights, sizes, strict=True))
    ]
