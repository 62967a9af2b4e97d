"""SIGKILL at any effect of a command that changes runs: the next commands put it right.

By default one effect of some commands is tried; TEST_RARE=all TEST_KILLS=all tries more than 500. What
happens inside Slurm's and submitit's processes is not here: see tests/cluster/test_slurm_kills.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.command_judge import snapshot
from helpers.disturbed_commands import DisturbedHome, disturbed_copy, memory_folder
from helpers.forked_commands import import_everything
from helpers.rare import drawn
from helpers.sample_home import SAVED, SampleHome, id_of, make_home
from helpers.simulated_run import SimulatedRun

from slurmtrain.model.run.layout import RunDir, RunsRoot
from slurmtrain.registry.cells import Sent, write_sent

COMMANDS = (
    ("submit", "spec.yaml"),
    ("submit", "spec.yaml", "--executor", "slurm"),
    ("submit", "spec.yaml", "--from", f"{id_of('completed')}:{SAVED[0]}"),
    ("resume", id_of("crashed"), "--step", str(SAVED[0])),
    ("resume", id_of("crashed"), "requeue.max_failures=1"),
    ("resume", id_of("crashed"), "--from-start"),
    ("rerun", id_of("completed"), "--executor", "slurm"),
    ("cancel", id_of("gone")),
    ("cancel", id_of("pending")),
    ("sync",),
    ("watch", "--once"),
    ("prune", id_of("crashed")),
    ("registry", "rebuild"),
    ("delete", id_of("crashed"), "-y"),
    ("delete", id_of("completed"), "--forget", "-y"),
    ("clean", "--older-than", "0", "-y"),
    ("tag", id_of("crashed"), "good"),
    ("export", id_of("completed"), "--to", "model.pt"),
    ("checkpoint", id_of("elsewhere"), "--no-wait"),
    ("nodes", "forgive", "n1"),
    ("status", "--all"),
)


@pytest.fixture(scope="module")
def sample() -> Iterator[SampleHome]:
    import_everything()
    with memory_folder() as folder:
        yield make_home(folder / "sample")


@pytest.mark.parametrize("command", drawn(COMMANDS, 5), ids=" ".join)
def test_the_commands_after_a_killed_one_put_it_right(sample: SampleHome, command: tuple[str, ...]) -> None:
    place = sample.path.with_name("home")
    with disturbed_copy(sample, place) as whole:
        effects = whole.effects(command)
    for point in points(len(effects), COMMANDS.index(command)):
        with disturbed_copy(sample, place) as disturbed:
            assert disturbed.kill(command, point).code == -9, effects[point - 1]
            disturbed.settle()
            disturbed.check(command)
            # Whoever was interrupted calls the same command again.
            if command[0] not in ("submit", "resume", "rerun"):
                disturbed.call(*command)
                disturbed.check(command)


def test_the_command_after_one_that_was_killed_while_it_replaced_a_registry_completes_it(sample: SampleHome) -> None:
    place = sample.path.with_name("home")
    with damaged_copy(sample, place) as whole:
        effects = whole.effects(("status", "--all"))
        check_replaced(whole)
    for point in points(len(effects)):
        with damaged_copy(sample, place) as disturbed:
            assert disturbed.kill(("status", "--all"), point).code == -9, effects[point - 1]
            check_replaced(disturbed)


@contextlib.contextmanager
def damaged_copy(sample: SampleHome, place: Path) -> Iterator[DisturbedHome]:
    """A copy whose registry knows what a tracker has of a run, and has lost its last pages."""
    with disturbed_copy(sample, place) as copy:
        copy.call("sync")
        write_sent(RunsRoot(copy.home.runs).run(id_of("completed")), {"csv": Sent("csv", "uri")})
        registry = copy.home.runs / "registry.db"
        with sqlite3.connect(registry) as connection:
            connection.execute("CREATE TABLE last AS SELECT randomblob(8192)")
        os.truncate(registry, registry.stat().st_size - 4096)
        yield copy


def check_replaced(home: DisturbedHome) -> None:
    """One file lies aside, what trackers have is known, and the registry is as the run directories have it."""
    home.call("status", "--all")
    status = home.call("status", "--all", "--json")
    assert status.errors == b""
    assert len(list(home.home.runs.glob("registry.db.damaged*"))) == 1
    with sqlite3.connect(home.home.runs / "registry.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("SELECT run_id FROM sent").fetchall() == [(id_of("completed"),)]
    assert home.call("registry", "rebuild").code == 0
    assert facts_of(home.call("status", "--all", "--json").output) == facts_of(status.output)


def facts_of(output: bytes) -> list[list[Any]]:
    """What ``status --json`` has printed about each run, without what the time of day changes."""
    return [
        [run[key] for key in ("id", "state", "step", "attempt", "job_id", "reason", "metrics")]
        for run in json.loads(output)["runs"]
    ]


def points(count: int, number: int = 0) -> list[int]:
    """Which of ``count`` effects: all, or one, elsewhere for each ``number``."""
    if os.environ.get("TEST_KILLS") == "all":
        return list(range(1, count + 1))
    return [1 + (number * 5 + 3) % 8 * (count - 1) // 8]


# --- searches ---------------------------------------------------------------------------------------------------------

TRIALS = 3
SEARCH = f"""\
name: searched
command: python train.py --lr ${{params.lr}}
params: {{lr: 0.1}}
code: none
tracking: {{mlflow: {{enabled: false}}}}
sweep:
  params.lr: loguniform(1e-5, 1e-1)
  search: {{metric: loss, mode: min, trials: {TRIALS}, parallel: 2}}
"""


@pytest.fixture(scope="module")
def searching(sample: SampleHome) -> Iterator[SampleHome]:
    """A sample with a search of which one run has ended, so that the next ``sync`` asks for the last one."""
    with disturbed_copy(sample, sample.path.with_name("searching")) as copy:
        copy.call("sync")
        (copy.home.project / "search.yaml").write_text(SEARCH)
        copy.call("submit", "search.yaml")
        end_trial(copy, min(trials(copy)))
        yield copy.home


@pytest.mark.parametrize("command", [("submit", "search.yaml"), ("sync",)], ids=" ".join)
def test_a_search_whose_command_was_killed_loses_no_trial_and_has_none_twice(
    searching: SampleHome, sample: SampleHome, command: tuple[str, ...]
) -> None:
    begins = command[0] == "submit"
    place = sample.path.with_name("home")
    with search_copy(sample if begins else searching, place) as whole:
        effects = whole.effects(command)
        finish_search(whole)
    for point in points(len(effects)):
        with search_copy(sample if begins else searching, place) as disturbed:
            assert disturbed.kill(command, point).code == -9, effects[point - 1]
            disturbed.settle()
            disturbed.check(command)
            assert sorted(trials(disturbed).values()) == list(range(len(trials(disturbed))))
            if not trials(disturbed):
                # It was killed before there was a run: nothing was submitted, and nothing is left.
                assert begins, effects[point - 1]
                disturbed.call("submit", "search.yaml")
            finish_search(disturbed)


@contextlib.contextmanager
def search_copy(sample: SampleHome, place: Path) -> Iterator[DisturbedHome]:
    with disturbed_copy(sample, place) as copy:
        (copy.home.project / "search.yaml").write_text(SEARCH)
        copy.before = snapshot(copy.home.path)
        yield copy


def trials(home: DisturbedHome) -> dict[str, int]:
    """The number of the trial of each run of a search."""
    created = {
        path.parent.parent.name: json.loads(path.read_text().splitlines()[0])
        for path in home.home.runs.glob("*/journal/created.jsonl")
    }
    return {run_id: event["trial"] for run_id, event in created.items() if event.get("trial") is not None}


def end_trial(home: DisturbedHome, run_id: str) -> None:
    """Let a run complete."""
    events = [
        json.loads(line) for path in (home.home.runs / run_id / "journal").glob("*.jsonl") for line in path.open()
    ]
    newest = max((event for event in events if event["kind"] == "submitting"), key=lambda event: event["submission"])
    run = SimulatedRun(RunDir(home.home.runs / run_id), job=newest["job_id"], now=time.time())
    run.started(submission=newest["submission"]).reached(5, loss=0.5).ended("completed")


def finish_search(home: DisturbedHome) -> None:
    """All trials complete, each once and with values of its own, and the search is over."""
    ended: set[str] = set()
    while open_runs := trials(home).keys() - ended:
        for run_id in sorted(open_runs):
            end_trial(home, run_id)
        ended |= open_runs
        home.call("sync")
    assert sorted(trials(home).values()) == list(range(TRIALS))
    values = [json.loads((home.home.runs / run_id / "plan.json").read_text()) for run_id in trials(home)]
    assert len({each["spec"]["params"]["lr"] for each in values}) == TRIALS
    # A lock without a search is harmless, and for 'clean'.
    assert list((home.home.runs / "searches").glob("*.json")) == []
