"""Traces of steps: which ranks write them, of which steps, and when none does."""

from __future__ import annotations

import gzip
import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from slurmtrain.model.run.events.rank_events import StepsTraced
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.runtime.training.profiling import StepTracer, choose_ranks


class Group:
    """Ranks that have these times of their own; this one is ``rank``."""

    def __init__(self, own_s: list[float], rank: int) -> None:
        self.rank, self.own_s, self.device, self.gathered = rank, own_s, torch.device("cpu"), 0

    def gather(self, value: tuple[bool, float]) -> list[tuple[bool, float]]:
        self.gathered += 1
        return [(value[0], own) for own in self.own_s]


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return RunDir(tmp_path / "0123456789").attempt("7", 0)


def train(attempt: AttemptDir, own_s: list[float], rank: int, steps: range, until: int = 10) -> list[StepsTraced]:
    """Trace steps 3 to 6 of a run as one of its ranks goes through these steps; it has ``until`` as its last step."""
    group: Any = Group(own_s, rank)
    tracer, events = StepTracer((3, 6), attempt, group), []
    for step in steps:
        if tracer.is_due(step):
            tracer.begin(step, own_s[rank])
        torch.ones(2) @ torch.ones(2)
        tracer.end_step()
        if (tracer.is_over(step + 1) or step + 1 == until) and (event := tracer.write(step + 1)) is not None:
            events.append(event)
    tracer.close()
    assert group.gathered <= 1
    return events


def test_the_first_and_the_slowest_rank_trace_once_in_a_run(attempt: AttemptDir) -> None:
    own_s = [0.1, 0.1, 0.25, 0.1]
    assert train(attempt, own_s, 1, range(10)) == []
    # A stop between: nothing is left, and steps that are trained again are traced then.
    assert train(attempt, own_s, 2, range(5)) == []
    assert not attempt.profiles.exists()
    [event] = train(attempt, own_s, 2, range(4, 10))
    assert (event.rank, event.first, event.last, event.problem) == (2, 4, 6, "")
    assert event.why == "rank 2 is the slowest: 250 ms of its own in a step"
    assert event.path == "attempts/7.0/profiles/rank-2.steps-4-6.json.gz"
    path = attempt.run.path / event.path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == event.bytes
    names = {each.get("name") for each in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {"step 4", "step 5"} <= names
    assert not {"step 3", "step 6"} & names
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    path.rename(path.with_name("rank-2.steps-7-9.json.gz"))
    assert [each.first for each in train(attempt, own_s, 2, range(4, 10))] == [4]
    # After a rollback these steps come again; the run has its trace.
    later = attempt.run.attempt("8", 0)
    # One of other steps, which an earlier spec wanted, is not of these.
    path.with_name("rank-0.steps-100-110.json.gz").write_bytes(b"")
    path.with_name("other.json.gz").write_bytes(b"")
    assert train(later, own_s, 0, range(10)) == train(later, own_s, 2, range(10)) == []


def test_a_run_that_ends_within_the_steps_and_one_with_another_profiler_say_so(attempt: AttemptDir) -> None:
    [event] = train(attempt, [0.0, 0.0], 0, range(5), until=5)
    assert (event.first, event.last) == (3, 5)
    assert event.why.endswith(": only rank 0 is traced")
    assert event.path is not None
    (attempt.run.path / event.path).unlink()
    with profile(activities=[ProfilerActivity.CPU]):
        [event] = train(attempt, [0.1], 0, range(10))
    assert (event.path, event.problem) == (None, "another profiler was active in these steps")
    # A folder that cannot be written costs the trace, and not the run.
    attempt.profiles.rmdir()
    attempt.profiles.write_text("")
    [event] = train(attempt, [0.1], 0, range(10))
    assert event.path is None
    assert event.problem
    assert train(attempt, [0.1], 0, range(6, 10)) == []


def test_only_known_times_make_a_rank_the_slowest() -> None:
    assert choose_ranks([0.2]) == ({0}, "the only rank")
    assert choose_ranks([0.2, 0.1]) == ({0}, "rank 0 is the slowest: 200 ms of its own in a step")
    assert choose_ranks([0.0, 0.1, 0.0])[0] == {0, 1}
    assert choose_ranks([0.0, 0.0])[0] == {0}
