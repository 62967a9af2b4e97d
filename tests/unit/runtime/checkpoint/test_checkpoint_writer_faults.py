"""Writer processes that are killed, or cannot start: one save fails at most, and training continues."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from helpers.killpoints import writers_that_fail
from helpers.ranks import Attempt, Pair, alone, listed
from helpers.rare import drawn, rare
from helpers.small_model import Value, fill, model, restored_step, save_steps, values

from slurmtrain.model.interruption.interval import Publication
from slurmtrain.model.spec.checkpoint import KeepSpec
from slurmtrain.runtime.checkpoint import files
from slurmtrain.runtime.job.process_group import RankGroup


def writer_of(attempt: Attempt) -> int:
    process = attempt.saver._writer._process
    assert process is not None
    return process.pid


def stop_the_writer(attempt: Attempt) -> None:
    """Let a writer that has done all that was ordered do nothing more, until it is killed."""
    while attempt.saver._writer.busy:
        attempt.saver.progress()
    os.kill(writer_of(attempt), signal.SIGSTOP)
    os.waitid(os.P_PID, writer_of(attempt), os.WSTOPPED | os.WNOWAIT)


def test_a_writer_that_is_killed_while_it_has_nothing_to_do_costs_nothing(tmp_path: Path) -> None:
    module = model()
    with Attempt(tmp_path, alone(), {"model": module}) as attempt:
        assert save_steps(attempt, module, 1) == [""]
        first = writer_of(attempt)
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert save_steps(attempt, module, 2) == [""]
        assert writer_of(attempt) != first
        assert attempt.events("save_failed") == []
    assert listed(tmp_path) == ["step-1", "step-2"]


@pytest.mark.parametrize("effect", drawn(["open", "half a write", "fsync", "os.rename", "write through a file"], 3))
def test_a_writer_that_is_killed_at_work_fails_one_save_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name, value in writers_that_fail(tmp_path / "fault", run, effect=effect).items():
        monkeypatch.setenv(name, value)
    module = model()
    with Attempt(run, alone(), {"model": module}) as attempt:
        assert save_steps(attempt, module, 1) == [
            "rank 0: the process that writes checkpoints has ended (killed by signal 9)"
        ]
        [failed] = attempt.events("save_failed")
        assert (failed["step"], failed["why"]) == (1, "steps")
        assert "killed by signal 9" in failed["reason"]
        assert listed(run) == []
        assert save_steps(attempt, module, 2) == [""]
    assert listed(run) == ["step-2"]
    assert restored_step(run) == 2


def test_a_writer_that_is_killed_while_a_save_is_under_way_does_not_hang_training(tmp_path: Path) -> None:
    module = model()
    with Attempt(tmp_path, alone(), {"model": module}) as attempt:
        assert save_steps(attempt, module, 1) == [""]
        stop_the_writer(attempt)
        assert attempt.begin(2) is None
        assert attempt.saver.progress() == (True, Publication.NONE)
        os.kill(writer_of(attempt), signal.SIGKILL)
        outcome = attempt.saver.finish()
        assert outcome is not None
        assert "killed by signal 9" in outcome.problem
        assert save_steps(attempt, module, 3) == [""]
    assert listed(tmp_path) == ["step-1", "step-3"]


def lose_a_writer(ranks: RankGroup, root: Path, victim: int, when: str) -> tuple[list[str], set[float]]:
    """Saves on two ranks; one's writer is killed: while it provides memory, or while it should write."""
    module = model()
    with Attempt(root, ranks, {"model": module, "own": Value(ranks.rank)}, keep=KeepSpec(last=9)) as attempt:
        if when == "preparing":
            attempt.saver.prepare()
            if ranks.rank == victim:
                os.kill(writer_of(attempt), signal.SIGKILL)
            problems = save_steps(attempt, module, 1)
        else:
            save_steps(attempt, module, 1)
            if ranks.rank == victim:
                stop_the_writer(attempt)
            fill(module, 2)
            assert attempt.begin(2) is None
            if ranks.rank == victim:
                os.kill(writer_of(attempt), signal.SIGKILL)
            outcome = attempt.saver.finish()
            assert outcome is not None
            problems = [outcome.problem]
        problems += save_steps(attempt, module, 3, 4)
    again = model(-1)
    with Attempt(root, ranks, {"model": again, "own": Value(None)}, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert (restored.step, restored.lost_steps) == (4, 0)
    return problems, values(again)


@pytest.mark.parametrize(
    ("victim", "when"),
    [
        (0, "writing"),
        (1, "preparing"),
        *(pytest.param(*each, marks=rare) for each in ((0, "preparing"), (1, "writing"))),
    ],
)
def test_one_ranks_writer_that_is_killed_fails_at_most_one_save_on_both(
    tmp_path: Path, pair: Pair, victim: int, when: str
) -> None:
    (problems, first), (same, second) = pair.run(lose_a_writer, tmp_path, victim, when)
    assert problems == same
    assert problems[1:] == ["", ""]
    assert problems[0] in ("", f"rank {victim}: the process that writes checkpoints has ended (killed by signal 9)")
    assert first == second == {4.0}
    expected = ["step-3", "step-4"]
    if not (when == "preparing" and problems[0]):
        expected.insert(0, "step-1")
    assert listed(tmp_path) == expected
    for path in files.published(tmp_path / "checkpoints"):
        manifest = files.read_manifest(path)
        files.verify(path, manifest, manifest.files)


def test_a_writer_works_in_a_process_with_many_open_files(tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("so many files may not be opened here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        module = model()
        with Attempt(tmp_path, alone(), {"model": module}) as attempt:
            assert save_steps(attempt, module, 1) == [""]
    finally:
        for handle in opened:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_python_for_the_writer_a_save_fails_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    module = model()
    with Attempt(tmp_path, alone(), {"model": module}) as attempt:
        [problem] = save_steps(attempt, module, 1)
        assert "no such file" in problem
        monkeypatch.undo()
        assert save_steps(attempt, module, 2) == [""]
