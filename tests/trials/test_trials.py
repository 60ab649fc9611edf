"""A trial in a process of its own, and the study that proposes it."""

import resource
import shutil
import signal
from pathlib import Path

import pytest

from tfopt.errors import ArtifactError, ExportError
from tfopt.trials import process
from tfopt.trials.process import call_apart, read_outcome
from tfopt.trials.study import STARTUP, Study

optuna = pytest.importorskip("optuna")
SPACE = {
    "share": optuna.distributions.FloatDistribution(0.1, 1.0, log=True),
    "amounts": optuna.distributions.CategoricalDistribution(("sensitive", "even")),
}


def study_in(folder, seed=0, name="study.db"):
    return Study(folder / name, "tested", ["loss", "ms"], SPACE, seed)


def test_a_function_returns_its_result_and_leaves_the_outcome(tmp_path):
    outcome = call_apart("tried:add", {"one": 2, "other": 3}, tmp_path, 60.0)
    assert outcome.result == {"sum": 5}
    assert not outcome.failure
    assert read_outcome(tmp_path) == outcome


@pytest.mark.parametrize(
    ("name", "limit", "reason"),
    [("fail", 60.0, "ValueError: no such amount"), ("kill", 60.0, "was killed"), ("hang", 1.0, "it took over 1 s")],
)
def test_a_failure_a_crash_and_a_hang_are_outcomes(tmp_path, monkeypatch, name, limit, reason):
    monkeypatch.setattr(process, "GRACE_S", 0.1)
    call_apart("tried:add", {"one": 2, "other": 3}, tmp_path, 60.0)  # an earlier result does not count
    outcome = call_apart(f"tried:{name}", {}, tmp_path, limit)
    assert outcome.result is None
    assert reason in outcome.failure


def test_a_trial_may_fork_workers(tmp_path):
    assert call_apart("tried:fork_a_worker", {"number": -3}, tmp_path, 30.0).result == [3]


def test_a_directory_that_cannot_be_written_is_told():
    with pytest.raises(ExportError, match=r"must be writable and have room\. Received: /proc/no"):
        call_apart("math:gcd", {}, Path("/proc/no"), 60.0)


def test_a_call_that_is_not_worth_its_time_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 0.1)
    file = tmp_path / "losses.txt"

    def why_give_up():
        losses = file.read_text().split() if file.exists() else []
        return f"its loss is {losses[2]} after 3 epochs" if len(losses) >= 3 else ""

    outcome = call_apart("tried:learn", {"file": str(file), "epochs": 1000}, tmp_path, 60.0, why_give_up)
    assert outcome.failure == "its loss is 0.97 after 3 epochs"
    assert outcome.given_up
    assert outcome.seconds < 30
    assert read_outcome(tmp_path) == outcome
    file.unlink()
    assert call_apart("tried:learn", {"file": str(file), "epochs": 2}, tmp_path, 60.0, why_give_up).result == 2


def test_a_seed_proposes_the_same_trials_whatever_was_measured_and_stopped(tmp_path):
    whole = study_in(tmp_path).propose(4)
    assert len(whole) == 4
    stopped = study_in(tmp_path, name="stopped.db")
    stopped.propose(3)
    stopped.finish(0, [0.1, 2.0])
    stopped.finish(1, None)
    stopped.leave_out(2)
    again = study_in(tmp_path, name="stopped.db")
    assert again.propose(4) == whole
    assert again.open == {3}
    assert study_in(tmp_path, seed=1, name="other.db").propose(2) != again.propose(2)


def test_after_sigterm_a_function_cleans_up_and_its_temporary_files_are_removed(tmp_path):
    outcome = call_apart("tried:terminate", {}, tmp_path, 60.0)
    assert outcome.failure == "its process was ended by SIGTERM"
    assert str(tmp_path / "tmp") in (tmp_path / "log.txt").read_text()
    assert not (tmp_path / "tmp").exists()


@pytest.mark.slow
def test_a_proposal_that_fails_in_the_middle_is_made_again_as_it_would_have_been(tmp_path):
    """The disk is full after so many writes."""
    expected = study_in(tmp_path, name="sound.db").propose(3)
    study_in(tmp_path).propose(1)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    failed = []
    for page in range(8, 33, 4):  # of SQLite, which has 4 KiB
        copy = tmp_path / f"{page}.db"
        shutil.copyfile(tmp_path / "study.db", copy)
        study = study_in(tmp_path, name=copy.name)
        resource.setrlimit(resource.RLIMIT_FSIZE, (page * 4096, before[1]))
        try:
            study.propose(3)
        except ArtifactError:
            failed.append(page)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert study_in(tmp_path, name=copy.name).propose(3) == expected
    signal.signal(signal.SIGXFSZ, handler)
    assert failed


@pytest.mark.slow
def test_a_study_learns_once_the_first_trials_have_ended(tmp_path):
    study = study_in(tmp_path)
    for number, settings in study.propose(STARTUP).items():
        study.finish(number, [abs(settings["share"] - 0.5), 1.0])
    later = [each["share"] for number, each in study.propose(2 * STARTUP).items() if number >= STARTUP]
    assert sorted(abs(share - 0.5) for share in later)[STARTUP // 2] < 0.2
