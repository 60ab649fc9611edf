"""Which channels of a model depend on each other, noted call by call with a rule for each layer.

Start in tracing.py, which walks through a model. call.py joins what leaves together. The other files hold the rules.
"""
