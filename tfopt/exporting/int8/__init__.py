"""int8 kernels for x86-64, and the choice of nodes by measured times.

Start in kernels.py, which lowers a graph. selection.py chooses the nodes.
"""
