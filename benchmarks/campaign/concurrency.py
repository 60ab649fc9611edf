"""Two of everything on one target at the same time, eight threads, and forks after use.

Each program succeeds, or says a clear word. What lies there in the end is whole, and what one of the programs leaves
when it runs alone.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from campaign.commands import (
    TFOPT,
    artifact,
    artifacts,
    check_whole,
    keras_file,
    names_in,
    recipe,
    records,
    training_script,
    weights,
)
from campaign.fault import (
    CRASH,
    EQUAL,
    EQUAL_OR_WORD,
    HANG,
    LOST,
    TRACEBACK,
    Bad,
    Fault,
    Said,
    digest,
    in_fork,
    make_template,
)
from campaign.processes import Ended, together

KIND = "concurrency"
DRAWS = 5
LIMIT_S = 180.0
EXPORT = (*TFOPT, "export", "model.keras", "model")
CONVERT = (*TFOPT, "data", "convert", "digits", "records", "--shards", "4")

# Each is a script: it ends without a word, or with the word of an error of tfopt.
HEAD = """
    import os, sys, threading, numpy as np, keras, tfopt
    from pathlib import Path
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")

    def eight(act):
        errors = []
        def one(number):
            try:
                act(number)
            except tfopt.errors.TfoptError as error:
                errors.append(f"tfopt: {error}")
        threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if errors:
            sys.exit(errors[0])

    def in_a_fork(act):
        process = os.fork()
        if process == 0:
            try:
                act()
                os._exit(0)
            except tfopt.errors.TfoptError as error:
                print(f"tfopt: {error}", file=sys.stderr, flush=True)
                os._exit(3)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""
SCRIPTS = {
    "teacher": """
        from tfopt.data import arrays
        model = keras.models.load_model("model.keras")
        try:
            tfopt.cache_teacher(model, arrays(x, np.arange(64) % 3, seed=0), "teacher", batch_size=16)
        except tfopt.errors.TfoptError as error:
            sys.exit(f"tfopt: {error}")
    """,
    "study": """
        import optuna
        from tfopt.trials.study import Study
        try:
            space = {"share": optuna.distributions.FloatDistribution(0.1, 1.0)}
            study = Study(Path("study.db"), "mine", ["loss"], space, seed=0)
            study.propose(4)
            for number in sorted(study.open):
                study.finish(number, [1.0])
        except tfopt.errors.TfoptError as error:
            sys.exit(f"tfopt: {error}")
    """,
    "eight exports to one directory": """
        model = keras.models.load_model("model.keras")
        eight(lambda number: tfopt.export(model, "model"))
    """,
    "eight exports to eight directories": """
        model = keras.models.load_model("model.keras")
        eight(lambda number: tfopt.export(model, f"model{number}"))
    """,
    "eight readers": """
        from tfopt.graph import freeze
        eight(lambda number: freeze("model").predict({"x": x[:1]}))
        eight(lambda number: tfopt.inspect("model"))
    """,
    "eight verify": """
        eight(lambda number: tfopt.verify("model", seconds=0.05))
    """,
    "eight plans and fits": """
        def fit(number):
            plan = tfopt.plan(tfopt.TrainingConfig(precision="float32", global_batch_size=16, jit_compile=False))
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            tfopt.compile(model, plan, optimizer="sgd", loss=loss)
            model.fit(plan.pipeline((x, np.arange(64) % 3)), epochs=1, verbose=0)
        eight(fit)
    """,
    "export in a fork after import": """
        in_a_fork(lambda: tfopt.export(keras.models.load_model("model.keras"), "model"))
    """,
    "export in a fork after an export": """
        model = keras.models.load_model("model.keras")
        tfopt.export(model, "model")
        in_a_fork(lambda: tfopt.export(model, "model"))
    """,
    "fit in a fork after a fit": """
        def fit():
            plan = tfopt.plan(tfopt.TrainingConfig(precision="float32", global_batch_size=16, jit_compile=False))
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            tfopt.compile(model, plan, optimizer="sgd", loss=loss)
            model.fit(plan.pipeline((x, np.arange(64) % 3)), epochs=1, verbose=0)
        fit()
        in_a_fork(fit)
    """,
    "verify in a fork after a fit": """
        model = keras.models.load_model("model.keras")
        model.compile("sgd", "mse")
        model.fit(x, np.zeros((64, 3)), verbose=0)
        in_a_fork(lambda: tfopt.verify("model", seconds=0.05))
    """,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Programs that run at the same time.

    Attributes:
        part: Its name in the table.
        programs: What follows `python`, of each.
        make: Writes what they read.
        results: What they leave.
        draws: The number of delays between them, in full.
        must: What must hold. Exports to one directory do not disturb each other; most others let one work at a time.
    """

    part: str
    programs: tuple[tuple[str, ...], ...]
    make: Callable[[Path], None]
    results: Callable[[Path, str], Any] = lambda place, output: []
    draws: int = DRAWS
    must: str = EQUAL_OR_WORD


def _script(name: str, make: Callable[[Path], None] = keras_file) -> Callable[[Path], None]:
    def made(place: Path) -> None:
        make(place)
        (place / "program.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(SCRIPTS[name]))

    return made


def _once(name: str, make: Callable[[Path], None] = keras_file, results: Any = artifacts) -> Case:
    return Case(part=name, programs=(("program.py",),), make=_script(name, make), results=results, draws=1)


def _teacher(place: Path, output: str) -> Any:
    return {each.name: each.read_bytes() for each in sorted((place / "teacher").glob("*.tfrecord"))}


CASES = (
    Case(
        part="two exports to one directory",
        programs=(EXPORT, EXPORT),
        make=keras_file,
        results=artifacts,
        must=EQUAL,
    ),
    Case(
        part="two exports that differ, to one directory",
        programs=(EXPORT, (*EXPORT, "--precision", "float16")),
        make=keras_file,
        results=artifacts,
        must=EQUAL,
    ),
    Case(
        part="an export over an artifact that is inspected",
        programs=((*EXPORT, "--precision", "float16"), (*TFOPT, "inspect", "model")),
        make=artifact,
        results=artifacts,
        must=EQUAL,
    ),
    Case(
        part="an export over an artifact that is verified",
        programs=((*EXPORT, "--precision", "float16"), (*TFOPT, "verify", "model")),
        make=artifact,
        results=artifacts,
        must=EQUAL,
        draws=3,
    ),
    Case(part="two conversions", programs=(CONVERT, CONVERT), make=lambda place: None, results=records),
    Case(
        part="two fits with one checkpoint directory",
        programs=(("train.py",), ("train.py",)),
        make=training_script("'none'", "True"),
        results=weights,
    ),
    Case(part="two caches of a teacher", programs=(("program.py",),) * 2, make=_script("teacher"), results=_teacher),
    Case(part="two searches with one study", programs=(("program.py",),) * 2, make=_script("study")),
    Case(
        part="two runs to one directory",
        programs=((*TFOPT, "run", "mine.toml"),) * 2,
        make=recipe,
        results=artifacts,
        draws=3,
    ),
    Case(
        part="two verify one artifact",
        programs=((*TFOPT, "verify", "model"), (*TFOPT, "bench", "model")),
        make=artifact,
        results=artifacts,
        draws=2,
    ),
    _once("eight exports to one directory"),
    _once("eight exports to eight directories"),
    _once("eight readers", artifact),
    _once("eight verify", artifact),
    _once("eight plans and fits"),
    _once("export in a fork after import"),
    _once("export in a fork after an export"),
    _once("fit in a fork after a fit"),
    _once("verify in a fork after a fit", artifact),
)


def faults(work: Path, *, share: float = 1.0, only: str = "") -> Iterator[Fault]:
    """Yields the programs of each case, with drawn delays between them."""
    for number, case in enumerate(CASES):
        if only and only not in f"{KIND}: {case.part}":
            continue
        template = work / f"case-{number}"
        template.mkdir(parents=True)
        make_template(case.part, partial(case.make, template), work / f"case-{number}.log")
        alone = [_alone(case, program, template, work / "alone") for program in dict.fromkeys(case.programs)]
        if len(case.programs) == 1:
            alone = []
        draw = random.Random(number)
        for place in range(max(round(case.draws * share), 1)):
            share_between = draw.uniform(0, 0.9) if alone and place else 0.0
            between = share_between * alone[0][2] if alone else 0.0
            yield Fault(
                kind=KIND,
                part=case.part,
                how=f"{place + 1}: begun {share_between:.2f} of their time apart" if alone else "once",
                act=lambda where, each=(case, between, alone): _act(where, *each),  # type: ignore[misc]
                template=template,
                expected=digest("as one of them leaves it alone"),
                must=case.must,
                keeps=False,
                limit_s=LIMIT_S + 60,
            )


def _alone(case: Case, program: tuple[str, ...], template: Path, place: Path) -> tuple[str, list[str], float]:
    """Returns what a program leaves that runs alone: its results, its names; and its seconds."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(template, place)
    answer, log = place.with_name(f"{place.name}.json"), place.with_name(f"{place.name}.log")

    def act() -> None:
        [ended] = together([program], [0.0], place, LIMIT_S)
        answer.write_text(json.dumps([digest(case.results(place, "")), names_in(place), ended.seconds, ended.errors]))

    if len(case.programs) == 1:
        return "", [], 0.0
    if in_fork(act, log, LIMIT_S + 60) != 0:
        raise SystemExit(f"{case.part} fails with one alone: {log.read_text()[-3000:]}")
    found, names, seconds, _ = json.loads(answer.read_text())
    return found, names, seconds


def _act(place: Path, case: Case, between: float, alone: list[tuple[str, list[str], float]]) -> Any:
    delays = [number * between for number in range(len(case.programs))]
    ended = together(case.programs, delays, place, LIMIT_S)
    refused = [word for each in ended if (word := _word(each))]
    check_whole(place)
    if len(refused) == len(ended) and len(ended) > 1:
        raise Bad(LOST, f"none has succeeded: {refused}")
    if alone:
        left = set(names_in(place)).difference(*(names for _, names, _ in alone))
        if left:
            raise Bad(LOST, f"left: {sorted(left)[:5]}")
        if digest(case.results(place, "")) not in [found for found, _, _ in alone]:
            raise Bad(LOST, "what is left is what none of them leaves alone")
    if refused:
        raise Said(refused[0])
    return "as one of them leaves it alone"


def _word(ended: Ended) -> str:
    """Returns the clear word of a program that was refused, or nothing if it has succeeded."""
    if ended.code is None:
        raise Bad(HANG, f"it has not ended: {ended.errors[-400:]}")
    if ended.left:
        raise Bad(HANG, f"left running: {ended.left}")
    word = re.search(r"^tfopt(\.errors\.\w+)?: .*", ended.errors, re.MULTILINE)  # the second from a user's script
    raw = re.search(r"^Traceback|^Exception|^Fatal Python", ended.errors, re.MULTILINE)
    if raw and (word is None or word[0].startswith("tfopt:")):
        raise Bad(TRACEBACK, ended.errors[raw.start() :][-600:])
    if ended.code == 0:
        return ""
    if ended.code < 0 or word is None:
        raise Bad(CRASH, f"exit code {ended.code}: {ended.errors[-400:]}")
    return word[0]
