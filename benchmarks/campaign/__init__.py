"""Faults on purpose, and what tfopt makes of each: the parts of `benchmarks/fault_campaign.py`.

Start in fault.py: a fault, its trial in a forked process, and its outcome. Every other file is one kind of fault.
"""
