"""Whether it is a run's turn, and what it gets from those before it: from their files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.simulated_run import SimulatedRun

from slurmtrain.errors import PathError, SlurmtrainError
from slurmtrain.model.experiment.chain import Reference
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.lineage import Upstream
from slurmtrain.runtime import upstreams
from slurmtrain.runtime.upstreams import find_facts, look_again_s, standing_of, unfinished_jobs, wait_for_upstreams

FIRST, SECOND = "0000000001", "0000000002"
UPSTREAM = Upstream(FIRST, "pretrain")
RULES: dict[str, Any] = {"requeue": {"max_failures": 0}}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that starts after another."""
    directory = RunDir(tmp_path / SECOND)
    directory.path.mkdir()
    upstreams.write_upstreams(directory, [UPSTREAM])
    return directory


@pytest.fixture
def first(tmp_path: Path) -> SimulatedRun:
    """The run before it, whose job runs."""
    return SimulatedRun(RunDir(tmp_path / FIRST), spec=RULES).submitted().started()


def test_a_run_waits_for_one_that_will_be_started_again_and_for_its_newest_job(
    run: RunDir, first: SimulatedRun
) -> None:
    assert standing_of(run, [UPSTREAM]).waits == [UPSTREAM]
    assert unfinished_jobs(run, [UPSTREAM]) == ["7"]
    first.stopped()
    assert standing_of(run, [UPSTREAM]).waits == [UPSTREAM]
    first.job = "9"
    first.submitted(2).started(submission=2)
    assert unfinished_jobs(run, [UPSTREAM]) == ["9"]
    first.ended("completed")
    assert standing_of(run, [UPSTREAM]).is_ready
    assert unfinished_jobs(run, [UPSTREAM]) == []


def test_a_job_of_slurm_looks_for_a_moment_only_and_a_local_run_as_long_as_it_takes(
    run: RunDir, first: SimulatedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstreams, "_LAST_WORDS_S", 0.0)
    monkeypatch.setattr(upstreams, "_UPSTREAM_POLL_S", 0.001)
    noted: list[Upstream] = []
    early = wait_for_upstreams(run, [UPSTREAM], patient=False, note=noted.append, give_up=lambda: False)
    assert (early.is_ready, noted) == (False, [])

    def complete(upstream: Upstream) -> None:
        noted.append(upstream)
        first.ended("completed")

    assert wait_for_upstreams(run, [UPSTREAM], patient=True, note=complete, give_up=lambda: False).is_ready
    assert noted == [UPSTREAM]


def test_a_job_that_waits_for_a_command_looks_again_ever_more_rarely_until_its_upstream_gets_another_job(
    run: RunDir, first: SimulatedRun
) -> None:
    waiting = SimulatedRun(run, spec={}, job="8", now=first.now).submitted()
    pauses = []
    for restart in range(12):
        waiting.started(restart=restart).ended("early", restart=restart)
        pauses.append(look_again_s(run, [UPSTREAM]) / 60)
    assert pauses == [2, 4, 8, 16, 32, 64, 128, 256, 360, 360, 360, 360]
    # A week of waiting: those up to four hours, and then every six.
    assert sum(pauses[:8]) / 60 + 27 * 6 > 7 * 24
    first.job, first.now = "9", waiting.now
    first.submitted(2)
    waiting.later(10).started(restart=12).ended("early", restart=12)
    assert look_again_s(run, [UPSTREAM]) == 120


def test_facts_are_those_of_the_run_when_it_has_ended(run: RunDir, first: SimulatedRun) -> None:
    published = first.directory.checkpoints / "step-40"  # type: ignore[union-attr]
    published.mkdir()
    (published / "MANIFEST.json").write_text("{}")
    first.reached(40, loss=0.25).saved(40).ended("completed")
    names = ("checkpoint", "dir", "id", "step", "metrics.loss")
    facts = find_facts(run, [UPSTREAM], [Reference("pretrain", name) for name in names])
    assert list(facts.values()) == [str(published), str(published.parents[1]), FIRST, 40, 0.25]
    assert next(iter(facts)) == "${run.pretrain.checkpoint}"
    with pytest.raises(SlurmtrainError, match=rf"run {FIRST} \(pretrain\) has no metric 'acc'"):
        find_facts(run, [UPSTREAM], [Reference("pretrain", "metrics.acc")])


def test_a_checkpoint_may_be_one_that_the_script_saved_itself_unless_it_is_gone(
    run: RunDir, first: SimulatedRun, tmp_path: Path
) -> None:
    older, newer = tmp_path / "ck-10.pt", tmp_path / "ck-20.pt"
    older.write_bytes(b"")
    for step, path in ((10, older), (20, newer)):
        first.node(
            "found", path=str(path), step=step, bytes=1, saved_at=float(step), format="torch", fingerprint=f"{step}"
        )
    first.ended("completed")
    reference = Reference("pretrain", "checkpoint")
    assert find_facts(run, [UPSTREAM], [reference]) == {str(reference): str(older)}
    older.unlink()
    with pytest.raises(SlurmtrainError, match="has no checkpoint"):
        find_facts(run, [UPSTREAM], [reference])


def test_what_a_run_began_with_is_kept(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "_SEEN_S", 0.0)
    assert not upstreams.has_begun(run)
    with pytest.raises(PathError, match="is missing"):
        upstreams.read_facts(run)
    upstreams.write_facts(run, {"${run.pretrain.step}": 40})
    assert upstreams.has_begun(run)
    assert upstreams.read_facts(run) == {"${run.pretrain.step}": 40}
    assert upstreams.read_facts(RunDir(tmp_path / "none")) == {}
    run.upstreams.write_text('{"upstreams": 5}')
    with pytest.raises(PathError, match="has changed since slurmtrain wrote it"):
        upstreams.read_upstreams(run)


def test_dependents_are_noted_once_each_and_other_files_are_none(run: RunDir, first: SimulatedRun) -> None:
    assert first.directory is not None
    assert upstreams.dependents_of(first.directory) == []
    for _ in range(2):
        upstreams.note_dependent(first.directory, SECOND)
    (first.directory.dependents / "notes.txt").write_text("")
    assert upstreams.dependents_of(first.directory) == [SECOND]


def test_a_run_that_was_deleted_does_not_come_back_as_a_directory_of_dependents(tmp_path: Path) -> None:
    upstreams.note_dependent(RunDir(tmp_path / FIRST), SECOND)
    assert not (tmp_path / FIRST).exists()
