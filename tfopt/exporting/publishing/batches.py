"""The batch axis of a signature."""

from __future__ import annotations

from collections.abc import Sequence

from tfopt.exporting.manifest import SignatureRecord


def is_open(signature: SignatureRecord) -> bool:
    """Whether the first axis of each input and output is open, so that a server may join requests."""
    specs = [*signature.inputs.values(), *signature.outputs.values()]
    return all(bool(spec.shape) and spec.shape[0] is None for spec in specs if spec.shape is not None) and bool(specs)


def batch_of(signature: SignatureRecord, wanted: int) -> int:
    """Returns the wanted number of examples, or that which the signature fixes."""
    sizes = (spec.shape[0] for spec in signature.inputs.values() if spec.shape)
    return next((size for size in sizes if size is not None), wanted)


def words(sizes: Sequence[int]) -> str:
    """Returns numbers of examples as text.

    Example:
        >>> words([1]), words([1, 4, 8])
        ('1 example', '1, 4 and 8 examples')
    """
    joined = " and ".join(filter(None, [", ".join(map(str, sizes[:-1])), str(sizes[-1])]))
    return f"{joined} example{'' if list(sizes) == [1] else 's'}"
