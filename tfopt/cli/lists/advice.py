"""`tfopt devices --advise NAME`: the GPUs of the table for a recipe, and its step on many of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tfopt.cli.options import DevicesOptions
from tfopt.cli.own_code import look_beside, read_recipe
from tfopt.cli.printing import print_json, say
from tfopt.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from tfopt.advisor import Advice, ScalingTable
    from tfopt.data import Examples
    from tfopt.recipe import Recipe


def print_advice(options: DevicesOptions) -> None:
    """Prints the advice for the recipe that the options name."""
    from tfopt.advisor import LINKS, advise
    from tfopt.hardware.gpus import card_name

    if options.card is not None:
        options = replace(options, card=card_name(options.card))
    if options.network not in LINKS:
        raise unknown_name("network", options.network, LINKS)
    assert options.advise is not None
    recipe = read_recipe(options.advise)
    if options.form is not None:
        recipe = recipe.quick() if options.form == "quick" else recipe.form(options.form)
    look_beside()
    advice = advise(recipe, examples=_examples(options, recipe), measure=options.measure)
    scaling = _scaling(options, advice) if options.gpus else None
    if options.json:
        print_json({**advice.to_dict(), "scaling": None if scaling is None else scaling.to_dict()})
        return
    say(advice)
    if scaling is not None:
        say(f"\n{options.card or advice.cards[0].name}\n{scaling}")


def _scaling(options: DevicesOptions, advice: Advice) -> ScalingTable:
    """Returns the steps on several numbers of one GPU: the one that the options name, or the best."""
    from tfopt.advisor import LINKS, Cluster, scale
    from tfopt.advisor.links import link_inside
    from tfopt.hardware import GPU_CARDS

    name = options.card or advice.cards[0].name
    step_ms = next(card.step_ms for card in advice.cards if card.name == name)
    if step_ms is None:
        raise ConfigError(
            f"--gpus needs a GPU whose step time is known. Received: --card {name!r}, whose rate in the precision of "
            "the recipe is unknown. Name another card."
        )
    cluster = Cluster(
        inside=link_inside(GPU_CARDS[name]), between=LINKS[options.network], gpus_per_host=options.gpus_per_host
    )
    return scale(step_ms / 1e3, advice.examples, advice.gradient_bytes, cluster, options.gpus)


def _examples(options: DevicesOptions, recipe: Recipe) -> Examples | None:
    """Returns examples of zeros in the shape that the options give; None without a shape."""
    if options.input_shape is None and options.outputs is None:
        return None
    if options.input_shape is None or options.outputs is None or recipe.find_task().name != "classification":
        raise ConfigError(
            "--input-shape and --outputs must be given together, for a recipe of classification. Received: "
            f"--input-shape {options.input_shape}, --outputs {options.outputs}, task {recipe.find_task().name!r}. "
            "Give both, or leave both out if the examples are on this machine."
        )
    import tensorflow as tf

    from tfopt.data import Examples

    zeros = tf.data.Dataset.from_tensors((tf.zeros(options.input_shape), tf.constant(0))).repeat(8)
    return Examples(name="zeros", train=zeros, test=zeros, outputs=options.outputs)
