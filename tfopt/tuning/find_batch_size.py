"""`tfopt.find_batch_size`: the batch that fits, the one that is fast enough, and the settings for it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfopt.atomic.directories import exclusive
from tfopt.atomic.files import write_text
from tfopt.atomic.own_files import check_replaceable, write_own
from tfopt.atomic.scratch import scratch_directory
from tfopt.errors import ConfigError
from tfopt.recipe import Recipe
from tfopt.report import Decision
from tfopt.settings.validation import check_type
from tfopt.training import TrainingConfig
from tfopt.training.distributed.cluster import START_TIMEOUT_S, Cluster, keeping_port
from tfopt.trials.process import Outcome, call_apart, raise_own
from tfopt.tuning.advice import advise
from tfopt.tuning.config import BatchSizeConfig
from tfopt.tuning.limit import Limit, find_limit
from tfopt.tuning.memory import OF_MEMORY, MemoryReport, find_largest, trial_folder
from tfopt.tuning.report import BatchSizeReport
from tfopt.tuning.throughput import ThroughputReport, sizes_to_time, throughput_of
from tfopt.tuning.trial import Trial
from tfopt.tuning.workers import agree, cluster_of, joined_strategy, sharing
from tfopt.tuning.workload import RECIPE, Workload, of_script, recipe_or_model, workload_of

REPORT, SETTINGS = "batch_size.json", "batch_size.toml"
STARTS_S = 120.0  # for the start of a process, and the first trace of each batch size
TRAIN = {"recipe": "tfopt.tuning.trial:train", "model": "tfopt.tuning.trial:train"}
TRAIN_SCRIPT = "tfopt.tuning.script:train"
OnStep = Callable[[str], object]


def find_batch_size(
    model_or_recipe: keras.Model | Recipe | str | Path,
    data: Any = None,
    config: BatchSizeConfig | None = None,
    *,
    training: TrainingConfig | None = None,
    directory: str | Path | None = None,
    on_step: OnStep = lambda words: None,
) -> BatchSizeReport:
    """Finds the batch size of a training by measurement on this machine.

    First the largest batch that fits is found: trials train it in processes of their own, on the largest shapes that
    the data has, with a validation pass and a checkpoint. One that runs out of memory, crashes or hangs is recorded and
    counts as too large. Then the speed of the sizes that fit is timed in turns. The smallest size within 5% of the best
    is advised, with micro-batches if another is asked for that does not fit, and the learning rate for it.

    Neither the model nor the global random generators change.

    Each of several workers calls it, as each calls `fit`. They search on their own, then agree: the batch is the least
    that any has found, and all get the same settings. The speeds are those of a worker without the network.

    Args:
        model_or_recipe: A compiled Keras model; or a recipe, its name or its .toml file.
        data: The examples of a model: `tfopt.data.Examples`, a tuple of arrays, or a tf.data.Dataset.
        config: The limit of memory, and how long to measure. None means BatchSizeConfig().
        training: Settings of a model's training, such as strategy="mirrored". None means those of the plan that
            `tfopt.compile` was given or, if Keras compiled the model, Keras' own step.
        directory: Directory for the trials, their logs, batch_size.json and batch_size.toml, which has the settings;
            of several workers, each has a directory in it. None keeps nothing.
        on_step: Is called with a few words when a step begins.
    Returns: A report. `report.to_toml()` has the settings.
    Raises:
        ConfigError: One example does not fit, the data has fewer examples than a batch, or a setting is wrong.
        UnsupportedModelError: The model is not compiled.
        TrainingError: The training fails with one example too, and the message has the cause; or another worker found
            no batch, or did not answer.
    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> find_batch_size(model)
        Traceback (most recent call last):
        ...
        tfopt.errors.UnsupportedModelError: model must be compiled, because the trials train it. ...
    """
    config = BatchSizeConfig() if config is None else config
    check_type("config", config, BatchSizeConfig)
    if training is not None and not isinstance(model_or_recipe, keras.Model):
        raise ConfigError("training must be left out with a recipe, which has its own. Change recipe.training.")
    what = recipe_or_model(model_or_recipe)
    cluster = cluster_of(what, training)
    if cluster is not None and directory is not None:
        directory = Path(directory, f"worker-{cluster.index}")
    with _folder(directory) as folder:
        on_step("writing what the trials train on")
        workload = workload_of(what, data, folder, training, is_alone=cluster is not None)
        search = _Search(workload, config, folder, on_step)
        return search.run() if cluster is None else search.run_with_others(cluster, joined_strategy(what, training))


def find_script_batch_size(
    path: str,
    words: list[str],
    config: BatchSizeConfig,
    *,
    directory: str | Path | None = None,
    on_step: OnStep = lambda words: None,
) -> BatchSizeReport:
    """As `find_batch_size`, for the first fit of a script that knows nothing of tfopt.

    The script runs until its first fit, once in each trial. The data of the fit gets other batches there, and its
    callbacks are left out.
    """
    with _folder(directory) as folder:
        return _Search(of_script(path, words, folder), config, folder, on_step).run()


@contextlib.contextmanager
def _folder(directory: str | Path | None) -> Iterator[Path]:
    with contextlib.ExitStack() as scopes:
        if directory is None:
            yield scopes.enter_context(scratch_directory())
            return
        folder = Path(directory)
        scopes.enter_context(exclusive(folder))
        if any(folder.iterdir()) and not (folder / REPORT).is_file() and not (folder / RECIPE).is_file():
            raise ConfigError(
                f"directory must be new, or of an earlier search. Received: {str(folder)!r}, which holds something "
                "else. Choose another directory."
            )
        check_replaceable(folder / REPORT, BatchSizeReport.is_own)
        yield folder


class _Search:
    """A search in progress."""

    def __init__(self, workload: Workload, config: BatchSizeConfig, folder: Path, on_step: OnStep) -> None:
        self.workload, self.config, self.folder, self.on_step = workload, config, folder, on_step
        self.workers, self.sharing = 1, 1  # those that search at the same time, and those of this host
        self.start = time.monotonic()

    def run(self) -> BatchSizeReport:
        return self._report(*self._measured())

    def run_with_others(self, cluster: Cluster, strategy: tf.distribute.Strategy | None) -> BatchSizeReport:
        """Searches as one of several workers, which this process has joined with a strategy, or has not."""
        folder = (self.folder / "agreement").resolve()
        self.workers, self.sharing = len(cluster.workers), sharing(cluster)
        with keeping_port(cluster) if strategy is None else contextlib.nullcontext():
            memory, throughput, reason = self._measured()
        wait_s = START_TIMEOUT_S + time.monotonic() - self.start  # the others have as much to do
        self.on_step(f"waiting for the other workers, {wait_s:.0f} s at most")
        return self._report(*agree((memory, throughput), cluster, strategy, folder, wait_s), reason)

    def _measured(self) -> tuple[MemoryReport, ThroughputReport | None, str]:
        """Returns the largest batch and the speeds; or None, and the reason."""
        config = self.config
        self._check_examples()
        limit = find_limit(config.memory_limit_bytes, config.margin, hard=config.hard, sharing=self.sharing)

        def run_trial(size: int, estimates: bool) -> Outcome:
            self.on_step(f"training with {size} examples on each replica")
            trial = Trial(sizes=(size,), whole=True, estimates=estimates)
            outcome = self._call(trial, limit, trial_folder(self.folder, size), config.trial_limit_s)
            if estimates and not outcome.failure:  # the first has looked at the data
                found = outcome.result
                self.workload = dataclasses.replace(
                    self.workload,
                    largest=found.get("largest"),
                    examples=found.get("examples", self.workload.examples),
                )
            return outcome

        examples = None if self.workload.examples is None else max(self.workload.examples // self.workers, 1)
        memory = find_largest(run_trial, limit, examples, config.max_batch_size, config.max_trials)
        if not config.throughput:
            return memory, None, "as asked"
        throughput, reason = self._throughput(memory.per_replica_batch_size, memory.replicas, limit)
        return memory, throughput, reason

    def _report(self, memory: MemoryReport, throughput: ThroughputReport | None, reason: str) -> BatchSizeReport:
        settings, decisions = self._advice(memory, throughput)
        report = BatchSizeReport(
            name=self.workload.title,
            memory=memory,
            throughput=throughput,
            settings=settings,
            decisions=decisions,
            unavailable={"noise_scale": "not measured"} | ({} if throughput else {"throughput": reason}),
            seconds=time.monotonic() - self.start,
        )
        write_own(self.folder / REPORT, report.to_json(), BatchSizeReport.is_own)
        write_text(self.folder / SETTINGS, report.to_toml())
        return report

    def _check_examples(self) -> None:
        examples = self.workload.examples
        for name in ("global_batch_size", "max_batch_size"):
            size = getattr(self.config, name)
            if examples is not None and size is not None and size > examples:
                raise ConfigError(
                    f"{name} must be at most the number of training examples, {examples}. Received: {name}={size}. "
                    "Lower it, or use more data."
                )

    def _throughput(self, largest: int, replicas: int, limit: Limit) -> tuple[ThroughputReport | None, str]:
        """Returns the speed of the sizes that fit; or None, and the reason."""
        sizes = sizes_to_time(largest)
        reason = ""
        while sizes:
            self.on_step(f"timing batches of {', '.join(str(size * replicas) for size in sizes)}")
            trial = Trial(
                sizes=sizes,
                window_s=self.config.window_s,
                turns=self.config.turns,
                limit_s=self.config.throughput_limit_s,
            )
            limit_s = STARTS_S + 2 * self.config.throughput_limit_s
            outcome = self._call(trial, limit, self.folder / "throughput", limit_s)
            if not outcome.failure:
                seen = outcome.result["seen"]
                return throughput_of({each["size"] * replicas: each["examples_per_s"] for each in seen}), ""
            reason = outcome.failure
            if not OF_MEMORY.search(reason):
                raise_own(reason)
            sizes = sizes[:-1]  # several sizes in one process need more memory than the largest alone
        return None, reason

    def _call(self, trial: Trial, limit: Limit, folder: Path, limit_s: float) -> Outcome:
        folder = folder.resolve()
        arguments = {
            "workload": dataclasses.replace(self.workload, folder=str(self.folder.resolve())).to_dict(),
            "trial": trial.to_dict(),
            "limit": limit.to_dict(),
            "directory": str(folder),
        }
        return call_apart(TRAIN.get(self.workload.kind, TRAIN_SCRIPT), arguments, folder, limit_s)

    def _advice(
        self, memory: MemoryReport, throughput: ThroughputReport | None
    ) -> tuple[dict[str, int | float], tuple[Decision, ...]]:
        """Returns the settings that are advised, with their reasons."""
        known = self.workload.kind != "script" and not self.workload.keras_step
        training = Recipe.from_toml(self.folder / RECIPE, allow_code=True).training if known else TrainingConfig()
        curve = () if throughput is None else throughput.curve
        found = advise(
            training,
            largest=max(memory.per_replica_batch_size // training.accumulate, 1),
            knee=None if throughput is None else throughput.knee // memory.replicas,
            rates={each.global_batch_size // memory.replicas: each.examples_per_s for each in curve},
            replicas=memory.replicas,
            examples=self.workload.examples,
            global_batch_size=self.config.global_batch_size,
        )
        if known:
            return dict(found.settings), tuple(found.decisions)
        # What follows from the present settings is unknown: only the script, or who compiled the model, knows them.
        settings = {"global_batch_size": found.global_batch_size, **found.settings}
        follow = ("base_batch_size", "learning_rate", "warmup_epochs")
        return (
            {name: value for name, value in settings.items() if name not in follow},
            tuple(each for each in found.decisions if each.setting not in follow),
        )
