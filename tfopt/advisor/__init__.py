"""Estimates before a machine is bought or rented: the memory and the step time of a recipe on known GPUs, and on many.

Start in advise.py, which compares the GPUs of the table; scaling.py estimates a step on up to a thousand of them.
"""

from tfopt.advisor.advise import Advice, CardEstimate, advise
from tfopt.advisor.links import LINKS, Link
from tfopt.advisor.scaling import Cluster, ScaledStep, ScalingTable, scale
from tfopt.advisor.this_machine import ThisMachine

__all__ = [
    "LINKS",
    "Advice",
    "CardEstimate",
    "Cluster",
    "Link",
    "ScaledStep",
    "ScalingTable",
    "ThisMachine",
    "advise",
    "scale",
]
