"""Estimates before a machine is bought or rented: the memory and the step time of a recipe on known GPUs, and on many.

Start in advise.py, which compares the GPUs of the table; scaling.py estimates a step on up to a thousand of them, and
audit.py says what is known of a step on a GPU without one.
"""

from tfopt.advisor.advise import Advice, CardEstimate, advise
from tfopt.advisor.audit import audit
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
    "audit",
    "link_inside",
    "scale",
]
