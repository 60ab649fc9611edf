"""Products in bfloat16 or float16: which nodes compute in half precision, and whether that pays off.

Start in rewrite.py, which converts a frozen graph; sides.py chooses its nodes.
"""
