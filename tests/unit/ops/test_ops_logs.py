"""Which lines of logs are read."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from helpers.simulated_run import RUN_ID
from helpers.workspaces import build_run
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import RunNotFound
from slurmtrain.ops import logs
from slurmtrain.ops.logs import Choice, log_paths, read_logs
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.workspace import Workspace


def write_logs(workspace: Workspace) -> Path:
    """A run of two ranks that has ended, and its logs."""
    sim = build_run(workspace, executor="local").submitted().started().ended("completed")
    folder = sim.directory.attempt(sim.newest.job_id, 0).logs
    folder.mkdir(parents=True)
    for rank in range(2):
        lines = [f"step {step}: loss {rank}.{step}" for step in range(20)]
        (folder / f"rank-{rank}.log").write_text("\n".join(lines) + ("\n" if rank else "\nno line break at the end"))
    return folder


def texts(workspace: Workspace, **choice: object) -> list[str]:
    return [line.text for line in read_logs(workspace, RUN_ID, Choice(**choice))]  # type: ignore[arg-type]


def test_the_last_lines_of_each_log_are_read(workspace: Workspace) -> None:
    write_logs(workspace)
    assert texts(workspace, newest=2) == [
        "step 19: loss 0.19", "no line break at the end", "step 18: loss 1.18", "step 19: loss 1.19"
    ]  # fmt: skip
    assert texts(workspace, newest=0) == []
    assert len(texts(workspace, newest=1000)) == 41


def test_lines_can_be_looked_for_and_the_last_of_these_read(workspace: Workspace) -> None:
    write_logs(workspace)
    pattern = re.compile(r"step \d: ")
    assert len(texts(workspace, pattern=pattern)) == 20
    assert texts(workspace, pattern=pattern, newest=1, rank=1) == ["step 9: loss 1.9"]


def test_the_paths_of_logs_are_told(workspace: Workspace) -> None:
    folder = write_logs(workspace)
    assert log_paths(workspace, RUN_ID, Choice(rank=1)) == [folder / "rank-1.log"]


def test_a_rank_without_a_log_is_said_to_have_none(workspace: Workspace) -> None:
    write_logs(workspace)
    with pytest.raises(RunNotFound, match="has no log of rank 7 alone"):
        texts(workspace, rank=7)


@pytest.mark.parametrize("rank", [None, 0])
def test_a_run_that_has_printed_nothing_says_what_it_waits_for(workspace: Workspace, rank: int | None) -> None:
    build_run(workspace, executor="local").created()
    heard: list[str] = []
    assert list(read_logs(workspace, RUN_ID, Choice(rank=rank), waits=heard.append)) == []
    attempts = workspace.root.run(RUN_ID).attempts
    assert [text.partition(";")[2] for text in heard] == [f" logs will be in {attempts}"]
    assert heard[0].startswith("it is created")


@given(st.lists(st.text("ab\n", max_size=6), max_size=6).map("".join), st.integers(0, 8), st.integers(1, 5))
def test_the_last_lines_are_those_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, content: str, newest: int, chunk: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "rank-0.log"
    path.write_text(content)
    tail = logs._Tail(path, 1, "rank 0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "_CHUNK_BYTES", chunk)
        tail.skip_to(newest)
        lines = [line.text for line in tail.lines(last=True)]
    expected = content.split("\n")
    assert (
        lines
        == (expected[:-1] if not expected[-1] else expected)[max(0, len(expected) - (not expected[-1]) - newest) :]
    )


def note_sizes(folder: Path, *notes: tuple[float, int]) -> None:
    lines = [json.dumps({"t": at, "sizes": {"rank-0.log": size}}) for at, size in notes]
    (folder / "sizes-0.jsonl").write_text("\n".join([*lines, '{"t": 5', '{"t": 7, "sizes": {}}', "[]", ""]))


@pytest.mark.parametrize(
    ("since", "first"), [(0.0, "step 0"), (15.0, "step 0"), (25.0, "step 5"), (35.0, "step 10"), (50.0, "step 10")]
)
def test_lines_since_a_time_are_those_after_the_last_size_that_was_noted_before(
    workspace: Workspace, since: float, first: str
) -> None:
    folder = write_logs(workspace)
    lines = (folder / "rank-0.log").read_text().splitlines(keepends=True)
    sizes = [len("".join(lines[:count])) for count in (5, 10)]
    # The second was noted while a line was being written.
    note_sizes(folder, (20.0, sizes[0]), (30.0, sizes[1] + 3))
    assert texts(workspace, since=since, rank=0)[0].startswith(f"{first}:")
    assert texts(workspace, since=since, rank=0, newest=1) == ["no line break at the end"]
    # Without notes, a log that was written to since then is read whole.
    assert len(texts(workspace, since=since, rank=1)) == 20


def test_a_log_that_was_not_written_to_since_then_has_no_lines(workspace: Workspace) -> None:
    folder = write_logs(workspace)
    os.utime(folder / "rank-0.log", (40.0, 40.0))
    assert texts(workspace, since=50.0, rank=0) == []
    assert texts(workspace, since=time.time() + 3600) == []


def test_lines_since_a_time_are_of_all_attempts_that_had_not_ended_then(workspace: Workspace) -> None:
    sim = build_run(workspace, executor="local").submitted().started().ended("preempted").started(1)
    for attempt in (0, 1):
        folder = sim.directory.attempt(sim.newest.job_id, attempt).logs
        folder.mkdir(parents=True)
        (folder / "rank-0.log").write_text(f"attempt {attempt}\n")
    ended_at = observe_run(workspace, RUN_ID, ask_slurm=False).attempts[0].ended_at
    assert ended_at is not None
    assert texts(workspace, since=ended_at - 1) == ["attempt 0", "attempt 1"]
    assert texts(workspace, since=ended_at + 1) == ["attempt 1"]
