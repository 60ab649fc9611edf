"""The minimum cut of a flow network: splits its nodes in two at the least cost.

Boykov and Kolmogorov, "An Experimental Comparison of Min-Cut/Max-Flow Algorithms for Energy Minimization in Vision",
IEEE PAMI 26(9), 2004, describe how a choice between two labels for each node becomes such a cut.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

SOURCE, SINK, FIRST = 0, 1, 2
NEVER = 2**30  # the capacity of an edge that no minimum cut passes


class FlowNetwork:
    """A network between SOURCE and SINK that grows node by node and edge by edge.

    Example:
        >>> network = FlowNetwork()
        >>> near, far = network.node(), network.node()
        >>> network.edge(SOURCE, near, 5)
        >>> network.edge(near, far, 1)
        >>> network.edge(far, SINK, 5)
        >>> network.source_side() == {SOURCE, near}
        True
    """

    def __init__(self) -> None:
        self._nodes = FIRST
        self._edges: list[tuple[int, int, int]] = []

    def node(self) -> int:
        """Adds a node and returns its number."""
        self._nodes += 1
        return self._nodes - 1

    def edge(self, source: int, target: int, capacity: float) -> None:
        """Adds what it costs, rounded, when `source` lies on the source's side of the cut and `target` does not."""
        self._edges.append((source, target, min(round(capacity), NEVER)))

    def source_side(self) -> set[int]:
        """Returns the nodes on the source's side of a minimum cut."""
        sources, targets, capacities = zip(*self._edges, strict=True)
        edges = (np.array(capacities, np.int32), (sources, targets))
        network = coo_array(edges, shape=(self._nodes, self._nodes)).tocsr()  # parallel edges add up
        residual = network - maximum_flow(network, SOURCE, SINK).flow
        residual.data = np.maximum(residual.data, 0)
        residual.eliminate_zeros()
        return {int(node) for node in breadth_first_order(residual, SOURCE, return_predecessors=False)}
