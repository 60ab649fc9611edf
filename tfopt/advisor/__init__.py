"""Estimates before a machine is bought or rented: the memory and the step time of a recipe on known GPUs, and on many.

Start in advise.py, which compares the GPUs of the table; scaling.py estimates a step on up to a thousand of them.
"""

from tfopt.advisor.advise import Advice, CardEstimate, advise
from tfopt.advisor.recipe_step import ThisMachine
from tfopt.advisor.scaling import LINKS, Hosts, Link, ScaledStep, ScalingTable, link_inside, scale

__all__ = [
    "LINKS",
    "Advice",
    "CardEstimate",
    "Hosts",
    "Link",
    "ScaledStep",
    "ScalingTable",
    "ThisMachine",
    "advise",
    "link_inside",
    "scale",
]
