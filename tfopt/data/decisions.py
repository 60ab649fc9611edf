"""What the pipeline decides about examples, each with its reason, before the first of them is read."""

from __future__ import annotations

from tfopt.data.caching.kept import keep_examples
from tfopt.data.config import DataConfig
from tfopt.data.examples import Examples, Split
from tfopt.data.pipeline import cache_mode, shuffle_window
from tfopt.report import Decision


def decide(examples: Examples, config: DataConfig | None = None, *, split: Split = "train") -> tuple[Decision, ...]:
    """Returns the settings of the pipeline for a part of examples, with the reasons.

    The pipelines of the same examples follow these decisions. If shapes do not determine the size of the examples, the
    first of them are read and decoded.

    Args:
        examples: Examples of a source.
        config: Settings; None means DataConfig().
        split: The part.
    Example:
        >>> from tfopt.data.sources import SOURCES
        >>> for decision in decide(SOURCES["digits"]()):
        ...     print(decision.setting, decision.value, "because", decision.reason)
        cache off because the examples are in memory already
        shuffle_buffer 1437 because all training examples
    """
    config = config or DataConfig()
    kept = keep_examples(examples, split, mode=cache_mode(config.cache), cache_dir=config.cache_dir)
    decisions = [Decision(setting="cache", value=kept.choice.place, reason=kept.choice.reason)]
    if split == "train":
        decisions.append(_shuffle(examples, config, shuffle_window(examples, split, kept)))
    if not config.deterministic:
        reason = "as asked; the order differs from run to run, so a resumed epoch has other examples"
        decisions.append(Decision(setting="deterministic", value="False", reason=reason))
    if config.bucket_boundaries:
        reason = f"as asked; {len(config.bucket_boundaries) + 1} buckets, each batch from one of them"
        value = ", ".join(map(str, config.bucket_boundaries))
        decisions.append(Decision(setting="bucket_boundaries", value=value, reason=reason))
    if config.service is not None:
        reason = "as asked; its workers prepare the batches, in an order that differs from run to run"
        decisions.append(Decision(setting="service", value=config.service, reason=reason))
    return tuple(decisions)


def _shuffle(examples: Examples, config: DataConfig, window: int) -> Decision:
    size = examples.size("train")
    if config.shuffle_buffer != "auto":
        window, reason = config.shuffle_buffer, "as asked"
    elif size is not None and window >= size:
        reason = "all training examples"
    else:
        total = "an unknown number" if size is None else f"{size:,}"
        reason = f"of {total} of training examples; more would take long to fill, or much memory"
    return Decision(setting="shuffle_buffer", value=str(window), reason=reason)
