"""Where the augmentation of a recipe runs: in the pipeline on the host, or in the training step on the device."""

from __future__ import annotations

from dataclasses import dataclass

from tfopt.data import Examples
from tfopt.data.augment.augmentation import Augmentation
from tfopt.errors import ConfigError
from tfopt.recipe import Recipe
from tfopt.report import Decision
from tfopt.training import Plan


@dataclass(frozen=True, kw_only=True)
class PlacedAugmentation:
    """The augmentation of a recipe and its place.

    Attributes:
        host: The augmentation for the pipeline, or None.
        device: The augmentation for the training step, or None.
        decisions: The place with the reason; empty without an augmentation.
    """

    host: Augmentation | None = None
    device: Augmentation | None = None
    decisions: tuple[Decision, ...] = ()

    @property
    def needs_one_hot(self) -> bool:
        """Whether targets become shares of each class."""
        found = self.host or self.device
        return found is not None and found.needs_one_hot


def place_augmentation(recipe: Recipe, examples: Examples, plan: Plan) -> PlacedAugmentation:
    """Decides where the augmentation of a recipe runs.

    Raises:
        ConfigError: The augmentation does not fit the examples or the task.
    """
    has_gpu = bool(plan.hardware.gpus)
    asked = recipe.data.augment.where
    if asked != "auto":
        on_device, reason = asked == "device", "as asked"
    elif not has_gpu:
        on_device, reason = False, "no GPU; the pipeline augments while the step computes"
    elif plan.stage_devices:
        on_device, reason = False, "only the first stage of a pipeline has the images"
    else:
        on_device, reason = True, "leaves the processor free for decoding"
    augmentation = recipe.data.augmentation(examples, on_gpu=on_device and has_gpu)
    if augmentation is None:
        return PlacedAugmentation()
    augmentation.check(examples.decoded("train").batch(1).element_spec)
    if augmentation.needs_one_hot and recipe.find_task().soft_loss is None:
        raise ConfigError(
            f"mixup and cutmix need a task whose targets can be mixed. Received: task={recipe.find_task().name!r}. "
            "Set augment.mixup and augment.cutmix to 0."
        )
    place = Decision(setting="augment.where", value="device" if on_device else "host", reason=reason)
    if on_device:
        return PlacedAugmentation(device=augmentation, decisions=(place,))
    return PlacedAugmentation(host=augmentation, decisions=(place,))
