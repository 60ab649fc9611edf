"""Signals at drawn moments of each command: it ends with all that it has started, and the same command mends the rest.

After a signal no process may be left, no file may be half-written, and nothing may be printed but words. Then the
command runs again, undisturbed. It must give what it gives without the signal, bit for bit, or say what differs; and
the place must hold the same names as without the signal.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    over_an_earlier_one,
    recipe,
    records,
    training_script,
    two_artifacts,
    weights,
)
from campaign.fault import EQUAL_OR_WORD, HANG, LOST, TRACEBACK, Bad, Fault, Said, digest, in_fork, make_template
from campaign.processes import Ended, Strike, run
from campaign.serving import Client, free_port, read

KIND = "signals"
DRAWS = 200
IMPORT_S = 5.0  # about how long an interpreter imports
LEAST_LIMIT_S = 120.0  # and eight times what the command takes
SIGNALS = ((signal.SIGKILL, "it"), (signal.SIGTERM, "it"), (signal.SIGINT, "its group"), (signal.SIGSTOP, "it"))
OF_CHILDREN = ((signal.SIGKILL, "a child"), (signal.SIGTERM, "a child"), (signal.SIGSTOP, "a child"))
OF_WORKERS = tuple((number, f"worker {k}") for k in (0, 1) for number in (signal.SIGKILL, signal.SIGTERM))
OF_WORKERS += ((signal.SIGSTOP, "worker 1"),)
NAMES_THE_END = re.compile(r"SIG(KILL|TERM|INT)|was killed|was ended|interrupted|exit code -?\d+")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A program and what it leaves.

    Attributes:
        part: Its name in the table.
        words: What follows `python`, in the directory that `make` has filled.
        make: Writes what it reads.
        results: What came out that is the same each time, from the directory and the output.
        strikes: The signals and whom they meet.
        writes: Whether it writes under temporary names.
        draws: The number of signals in full.
        real: Whether some signals meet the import of a real interpreter.
        serves: Whether it serves until a client has read all; PORT in its words is a free port.
    """

    part: str
    words: tuple[str, ...]
    make: Callable[[Path], None]
    results: Callable[[Path, str], Any]
    strikes: tuple[tuple[signal.Signals, str], ...] = SIGNALS
    writes: bool = True
    draws: int = DRAWS
    real: bool = True
    serves: bool = False


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """What a command gives without a signal: its results, its names, its exit code and its seconds."""

    digest: str
    names: tuple[str, ...]
    code: int
    seconds: float

    @property
    def limit_s(self) -> float:
        return max(LEAST_LIMIT_S, 8 * self.seconds)


def _json(*names: str) -> Callable[[Path, str], Any]:
    def results(place: Path, output: str) -> Any:
        found = json.loads(output)
        return {name: found[name] for name in names}

    return results


def _largest_batch(place: Path, output: str) -> Any:
    return json.loads(output)["memory"]["per_replica_batch_size"]


def _measured(place: Path, output: str) -> Any:
    found = json.loads(output)
    return [[each["name"], each["format"], each["failure"]] for each in found["models"]]


COMMANDS = (
    Command(part="export", words=(*TFOPT, "export", "model.keras", "model"), make=keras_file, results=artifacts),
    Command(
        part="export over an earlier one",
        words=(*TFOPT, "export", "model.keras", "model"),
        make=over_an_earlier_one,
        results=artifacts,
        real=False,
        draws=100,
    ),
    Command(
        part="run",
        words=(*TFOPT, "run", "mine.toml"),
        make=recipe,
        results=artifacts,
        strikes=SIGNALS + OF_CHILDREN,
        draws=30,
    ),
    Command(part="fit with checkpoints", words=("train.py",), make=training_script("'none'", "True"), results=weights),
    Command(
        part="launch",
        words=(*TFOPT, "launch", "--workers", "2", "train.py"),
        make=training_script("'multi_worker'", "plan.is_chief"),
        results=weights,
        strikes=SIGNALS + OF_WORKERS,
        draws=30,
    ),
    Command(
        part="data convert",
        words=(*TFOPT, "data", "convert", "digits", "records", "--shards", "4"),
        make=lambda place: None,
        results=records,
        draws=100,
    ),
    Command(
        part="data serve",
        words=(*TFOPT, "data", "serve", "--workers", "2", "--port", "PORT"),
        make=lambda place: None,
        results=read,
        strikes=SIGNALS + OF_CHILDREN,
        writes=False,
        serves=True,
        draws=100,
    ),
    Command(
        part="verify",
        words=(*TFOPT, "verify", "model", "--json"),
        make=artifact,
        results=_json("parity_max_abs_error", "kernels", "weight_count"),
        strikes=SIGNALS + OF_CHILDREN,
        writes=False,
        draws=60,
    ),
    Command(
        part="bench",
        words=(*TFOPT, "bench", "model", "smaller", "--json"),
        make=two_artifacts,
        results=_measured,
        strikes=SIGNALS + OF_CHILDREN,
        writes=False,
        draws=30,
    ),
    Command(
        part="tune",
        words=(
            *(*TFOPT, "tune", "--json", "--only", "batch-size", "--no-throughput"),
            *("--max-batch-size", "1", "--max-trials", "2", "mine.toml"),
        ),
        make=recipe,
        results=_largest_batch,
        strikes=SIGNALS + OF_CHILDREN,
        writes=False,
        draws=20,
    ),
    Command(
        part="compress",
        words=(*TFOPT, "compress", "mine.toml", "front", "--max-trials", "1", "--max-bytes", "1000000", "--json"),
        make=recipe,
        results=artifacts,
        strikes=SIGNALS + OF_CHILDREN,
        draws=3,  # each takes minutes
    ),
)


def faults(work: Path, *, share: float = 1.0, only: str = "") -> Iterator[Fault]:
    """Yields the signals that each command gets, at moments drawn over the time that it takes undisturbed."""
    for number, command in enumerate(COMMANDS):
        if only and only not in f"{KIND}: {command.part}":
            continue
        template = work / f"command-{number}"
        template.mkdir(parents=True)
        make_template(command.part, partial(command.make, template), work / f"command-{number}.log")
        turns = 2 if share >= 0.5 else 1
        undisturbed = _undisturbed(command, template, work / "undisturbed", turns)
        for how, strike, real in _strikes(command, undisturbed, max(round(command.draws * share), 1), number):
            yield Fault(
                kind=KIND,
                part=command.part,
                how=how,
                act=lambda place, each=(template, command, undisturbed, strike, real): _act(place, *each),  # type: ignore[misc]
                template=template,
                expected=undisturbed.digest,
                must=EQUAL_OR_WORD,
                keeps=False,
                limit_s=2 * undisturbed.limit_s + 60,
            )


def _strikes(command: Command, undisturbed: Undisturbed, count: int, seed: int) -> Iterator[tuple[str, Strike, bool]]:
    draw = random.Random(seed)
    strikes = list(command.strikes)
    draw.shuffle(strikes)
    for place in range(count):
        number, whom = strikes[place % len(strikes)]
        writing, real = command.writes and draw.random() < 0.3, command.real and draw.random() < 0.2
        share = draw.uniform(0.02, 0.98)
        when, moment = f"at {share:.2f} of its time", share * undisturbed.seconds
        if whom not in ("it", "its group"):
            real = writing = False
        if real:
            when, moment, writing = f"at {share:.2f} of its import", share * IMPORT_S, False
        elif writing:
            when = "in writing"
        strike = Strike(number=number, whom=whom, moment=None if writing else moment, seed=draw.randrange(2**31))
        yield f"{place + 1}: {number.name} to {whom}, {when}", strike, real


def _undisturbed(command: Command, template: Path, place: Path, turns: int) -> Undisturbed:
    """Returns what comes out each time. It must be the same, or no difference could be told."""
    found = []
    for _ in range(turns):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(template, place)
        answer = place.with_name(f"{place.name}.json")

        def act(answer: Path = answer) -> None:
            ended = _run(command, place, 900)
            if ended.left or ended.code is None:
                raise SystemExit(f"{ended}")
            try:
                came_out = digest(command.results(place, ended.output))
            except Exception as error:
                raise SystemExit(f"{ended}") from error
            answer.write_text(json.dumps([came_out, names_in(place), ended.code, ended.seconds]))

        log = place.with_name(f"{place.name}.log")
        if in_fork(act, log, 1000) != 0:
            raise SystemExit(f"{command.part} fails without a signal: {log.read_text()[-3000:]}")
        came_out, names, code, seconds = json.loads(answer.read_text())
        found.append(Undisturbed(digest=came_out, names=tuple(names), code=code, seconds=seconds))
    one, other = found[0], found[-1]
    if (one.digest, one.names, one.code) != (other.digest, other.names, other.code):
        raise SystemExit(f"{command.part} differs from call to call without a signal: {one}, {other}")
    print(f"{command.part}: {one.seconds:.1f} s, {other.seconds:.1f} s", flush=True)
    return other


def _run(command: Command, place: Path, limit_s: float, strike: Strike | None = None, *, real: bool = False) -> Ended:
    if not command.serves:
        return run(command.words, place, limit_s, strike, real=real)
    client = Client(place, free_port())
    words = [word.replace("PORT", str(client.port)) for word in command.words]
    return run(words, place, limit_s, strike, real=real, meanwhile=client, afterwards=client.end)


def _struck(
    place: Path, template: Path, command: Command, undisturbed: Undisturbed, strike: Strike, real: bool
) -> Ended:
    """Returns how a program has ended that got the signal, which is sent earlier where the program has been faster."""
    for _ in range(5):
        ended = _run(command, place, undisturbed.limit_s, strike, real=real)
        if ended.struck or ended.code is None:
            return ended
        strike = replace(strike, moment=(strike.moment or undisturbed.seconds) / 2)
        shutil.rmtree(place)
        shutil.copytree(template, place)
    raise Bad("silent", "the signal has met nobody")


def _act(place: Path, template: Path, command: Command, undisturbed: Undisturbed, strike: Strike, real: bool) -> Any:
    ended = _struck(place, template, command, undisturbed, strike, real)
    _check_ended(ended, strike)
    check_whole(place)
    said = bool(NAMES_THE_END.search(ended.errors + ended.output))
    if ended.code != undisturbed.code:
        ended = _run(command, place, undisturbed.limit_s)
        _check_ended(ended, None)
        check_whole(place)
        if ended.code != undisturbed.code:
            raise Bad(LOST, f"exit code {ended.code} when called again: {ended.errors[-300:]}")
        said = False
    came_out = command.results(place, ended.output)
    left = sorted(set(names_in(place)) - set(undisturbed.names))
    if left:
        raise Bad(LOST, f"left: {left[:5]}")
    if said and digest(came_out) != undisturbed.digest:
        raise Said("it names the process that was ended")
    return came_out


def _check_ended(ended: Ended, strike: Strike | None) -> None:
    shown = f"{ended.errors[-400:]}"
    if ended.code is None:
        raise Bad(HANG, f"it has not ended: {shown}")
    if ended.left:
        raise Bad(HANG, f"left running: {ended.left}")
    at_ctrl_c = strike is not None and strike.number == signal.SIGINT
    for text in (ended.output, ended.errors):
        raw = re.search(r"^Traceback|^Exception ignored|^Fatal Python", text, re.MULTILINE)
        if raw and not (at_ctrl_c and "train.py" in text):  # of the user's own script, as Python has it
            raise Bad(TRACEBACK, f"exit code {ended.code}: {text[raw.start() :][-600:]}")
    if strike is None or not ended.struck:
        return
    usual = {signal.SIGKILL: (-9,), signal.SIGTERM: (-15, 143), signal.SIGINT: (-2, 130), signal.SIGSTOP: ()}
    if strike.whom in ("it", "its group") and ended.code not in (0, *usual[strike.number]):
        raise Bad(TRACEBACK, f"exit code {ended.code}: {shown}")
    if ended.code > 0 and not ended.errors.strip() and not ended.output.strip():
        raise Bad("silent", f"exit code {ended.code} without a word")
