"""Patterns of nodes that become one op, which the kernels compute faster.

Start in products.py; tfopt/graph/fold.py applies all of them.
"""
