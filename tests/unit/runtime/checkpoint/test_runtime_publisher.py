"""Room for a checkpoint: what is let go for it, what is warned of, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmtrain.model.experiment.checkpoint import BestSpec, KeepSpec
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.runtime.checkpoint.saver import Publisher, PublishPolicy
from slurmtrain.runtime.checkpoint.writer_client import ShardWriter
from slurmtrain.runtime.checkpoint.writer_process import IGNORED, keep_of
from slurmtrain.system.files import make_directory, write_json
from slurmtrain.system.journal import Journal

SIZE = 1000


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    attempt = RunDir(tmp_path).attempt("1", 0)
    attempt.path.mkdir(parents=True)
    write_json(attempt.run.lease, {"submission": 1, "attempt": "1.0"})
    for step in (1, 2, 3):
        staging = checkpoint_files.Staging(attempt.run.checkpoints, "1.0", step)
        (make_directory(staging.path) / "__0_0.distcp").write_bytes(bytes(SIZE))
        manifest = checkpoint_files.Manifest(
            step=step, world_size=1, saved_at=0.0, seconds=0.0, stall_s=0.0, plan_hash=None, attempt="1.0",
            why="steps", files={"__0_0.distcp": (SIZE, "")}, metrics={"loss": float(step)},
        )  # fmt: skip
        staging.publish(manifest)
    return attempt


@contextlib.contextmanager
def open_publisher(attempt: AttemptDir, **policy: Any) -> Iterator[Publisher]:
    writer = ShardWriter()
    with Journal(attempt.rank_journal(0)) as journal:
        yield Publisher(attempt, PublishPolicy(**policy), 1, writer, journal)
    writer.close()


def events(attempt: AttemptDir) -> list[tuple[str, Any]]:
    lines = [json.loads(line) for line in attempt.rank_journal(0).read_text().splitlines()]
    return [(line["kind"], line.get("step")) for line in lines]


def checkpoint_names(attempt: AttemptDir) -> list[str]:
    return sorted(path.name for path in attempt.run.checkpoints.iterdir())


def free(monkeypatch: pytest.MonkeyPatch, attempt: AttemptDir, room: int) -> None:
    """A disk with room for so many bytes beside the three checkpoints."""

    def statvfs(_: Path) -> SimpleNamespace:
        used = SIZE * len(checkpoint_files.published(attempt.run.checkpoints))
        return SimpleNamespace(f_bavail=room + 3 * SIZE - used, f_frsize=1, f_files=0)

    monkeypatch.setattr(os, "statvfs", statvfs)


def nothing() -> None:
    """Nothing is unanswered."""


def test_where_there_is_room_nothing_is_let_go(attempt: AttemptDir) -> None:
    with open_publisher(attempt, keep=KeepSpec(last=1), quota=4 * SIZE) as rank_0:
        assert rank_0.no_room(SIZE, nothing) == ""
    assert checkpoint_names(attempt) == ["step-1", "step-2", "step-3"]


def test_a_full_disk_is_relieved_of_no_more_than_is_needed(
    attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, attempt, SIZE // 2)
    with open_publisher(attempt, keep=KeepSpec(last=1)) as rank_0:
        assert rank_0.no_room(SIZE, nothing) == ""
    assert checkpoint_names(attempt) == ["step-2", "step-3"]
    assert events(attempt) == [("pruned", 1)]


def test_what_does_not_fit_is_refused_with_figures(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, attempt, SIZE // 2)
    with open_publisher(attempt, keep=KeepSpec(last=2)) as rank_0:
        refused = rank_0.no_room(20_000_000_000, nothing)
    assert refused == f"it needs 20.00 GB, and 0.00 MB are free in {attempt.run.checkpoints}"
    assert checkpoint_names(attempt) == ["step-2", "step-3"]


def test_a_quota_lets_go_of_what_the_policy_allows_and_is_then_warned_of_once(
    attempt: AttemptDir, caplog: pytest.LogCaptureFixture
) -> None:
    with open_publisher(attempt, keep=KeepSpec(last=2), quota=2 * SIZE) as rank_0:
        assert [rank_0.no_room(SIZE, nothing), rank_0.no_room(SIZE, nothing)] == ["", ""]
    assert checkpoint_names(attempt) == ["step-2", "step-3"]
    assert events(attempt) == [("pruned", 1), ("over_quota", None)]
    assert len([record for record in caplog.records if "checkpoint.quota" in record.message]) == 1


def test_a_writer_outlives_what_slurm_sends_before_it_has_begun() -> None:
    writer = ShardWriter()
    writer.order("populate", bytes=SIZE)
    assert writer._process is not None
    for number in IGNORED:
        writer._process.send_signal(number)
    assert "error" not in writer.wait()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()).isdisjoint(IGNORED)
    writer.close()


@pytest.mark.parametrize(
    "keep", [KeepSpec(), KeepSpec(last=1, every_steps=5), KeepSpec(best=BestSpec(metric="a", mode="max", n=2))]
)
def test_the_policy_comes_over_the_socket_as_it_is(keep: KeepSpec) -> None:
    from dataclasses import asdict

    assert keep_of(json.loads(json.dumps(asdict(keep)))) == keep
