"""Finds the tensors of a model in its folded graph, where nodes are replaced or removed."""

from __future__ import annotations

from tfopt.graph.edit import GraphEditor, producer
from tfopt.quantization.annotation.fusion import DATA_MOVEMENT_OPS, before_data_movement


def folded_tensor(folded: GraphEditor, tensor: str, before: GraphEditor) -> str | None:
    """Returns the tensor of a folded graph that has the values of a tensor of the graph before folding.

    Folding may replace the node: products become products of matrices, and sequences become images. Folding may also
    remove a node that only moves values: then the tensor that the node reads has the values. BatchToSpaceND is such a
    node too. It ends a dilated convolution, of which folding makes one node.

    Args:
        folded: An editor of the folded graph, with its table of origins.
        tensor: The tensor's name before folding.
        before: An editor of the graph before folding.
    Returns: The tensor's name in the folded graph; None if no tensor there has the values.
    """
    while True:
        found = tensor if producer(tensor) in folded.nodes else folded.replacement(tensor)
        if found is not None:
            return before_data_movement(folded, found)
        node = before.nodes.get(producer(tensor))
        if node is None or ":" in tensor or node.op not in (*DATA_MOVEMENT_OPS, "BatchToSpaceND"):
            return None
        tensor = node.input[0]
