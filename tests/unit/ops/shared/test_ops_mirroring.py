"""Sending runs to trackers: each point once and for good, whatever is rolled back, fails or is killed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.site import until
from helpers.workspaces import build_run

from slurmtrain.errors import TrackingError
from slurmtrain.model.metrics.settled import Fate
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.ops.shared.mirroring import MirrorOutcome, mirror_runs
from slurmtrain.ops.shared.next_attempts import run_settings
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry import queries
from slurmtrain.registry.cells import Sent
from slurmtrain.system.locks import locked
from slurmtrain.tracking.tracker import Begun, Start, TrackedPoint, TrackedRun, Tracker


class Recorder(Tracker):
    """Keeps points in memory, in one list for each remote run. ``fails``: the next so many calls of ``log`` do."""

    remote: ClassVar[dict[str, list[tuple[Fate, str, int, float]]]] = {}
    fails: ClassVar[int] = 0
    finished: ClassVar[list[str]] = []

    def __init__(self, settings: Mapping[str, Any], root: RunsRoot) -> None:
        super().__init__(settings, root)
        self.uri = "memory:"
        self.current = ""

    def begin(self, tracked: TrackedRun, start: Start) -> Begun:
        if start.remote_id is None or start.anew:
            self.current = f"remote-{len(self.remote) + 1}"
            self.remote[self.current] = []
        else:
            self.current = start.remote_id
        return Begun(self.current)

    def log(self, points: Sequence[TrackedPoint]) -> Mapping[str, str]:
        if Recorder.fails:
            Recorder.fails -= 1
            raise ConnectionError("nobody answers\nmore about it")
        points = [point for point in points if "bad" not in point.metrics or len(point.metrics) > 1]
        self.remote[self.current] += [
            (point.fate, name, point.step, value)
            for point in points
            for name, value in point.metrics.items()
            if name != "bad"
        ]
        return {"bad": "not this name"} if any("bad" in point.metrics for point in points) else {}

    def finish(self, tracked: TrackedRun) -> None:
        self.finished.append(tracked.run.state)


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Recorder]]:
    """Stands in for MLflow."""
    monkeypatch.setattr(Recorder, "remote", {})
    monkeypatch.setattr(Recorder, "finished", [])
    monkeypatch.setattr("importlib.metadata.EntryPoint.load", lambda self: Recorder)
    yield Recorder
    Recorder.fails = 0


def trained(workspace: Workspace, **tracking: Any) -> SimulatedRun:
    """A run that has trained 4 steps and saved after the third."""
    run = build_run(workspace, tracking={"mlflow": {"enabled": True}, **tracking})
    assert run._plan is not None
    run.created(**run_settings(run._plan)).submitted().started()
    for step in (1, 2, 3):
        run.reached(step, loss=step / 10)
    return run.saved(3).reached(4, loss=0.4)


def send(workspace: Workspace) -> MirrorOutcome:
    return mirror_runs(workspace, observe(workspace, ask_slurm=False).runs.fetch([RUN_ID]))


def sent(workspace: Workspace) -> Sent:
    return workspace.store.sent()[RUN_ID]["mlflow"]


def line(remote: str, fate: Fate = Fate.FINAL) -> list[tuple[int, float]]:
    """What a tracker shows of the metric ``loss``."""
    return [(step, value) for each, name, step, value in Recorder.remote[remote] if each is fate and name == "loss"]


def test_points_that_a_rollback_may_still_reach_are_held_back(workspace: Workspace) -> None:
    run = trained(workspace)
    assert send(workspace) == MirrorOutcome(mirrored=[RUN_ID])
    # Ranks that resume from step 3 may log something for it again.
    assert line("remote-1") == [(1, 0.1), (2, 0.2)]
    run.ended("completed")
    assert send(workspace).problems == []
    assert line("remote-1") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert send(workspace) == MirrorOutcome()
    assert Recorder.finished == ["running", "completed"]


def test_points_that_a_rollback_may_still_reach_are_shown_apart_if_the_spec_wishes(workspace: Workspace) -> None:
    trained(workspace, live=True)
    send(workspace)
    assert line("remote-1") == [(1, 0.1), (2, 0.2)]
    assert line("remote-1", Fate.OPEN) == [(3, 0.3), (4, 0.4)]


def test_steps_that_were_trained_again_are_marked_as_replayed(workspace: Workspace) -> None:
    run = trained(workspace)
    run.ended("preempted").started(1).node("workers", 0, 1, first_step=3)
    run.reached(4, 1, loss=4.4).reached(5, 1, loss=5.5).saved(5, 1).reached(6, 1, loss=6.6)
    send(workspace)
    assert line("remote-1") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 4.4)]
    assert line("remote-1", Fate.REPLAYED) == [(4, 0.4)]


def test_a_run_that_is_resumed_from_before_what_was_final_begins_anew(workspace: Workspace) -> None:
    run = trained(workspace).ended("completed")
    send(workspace)
    run.submitted(2).started(1).reached(3, 1, loss=3.3).ended("completed", 0, 1)
    assert send(workspace).problems == []
    assert list(Recorder.remote) == ["remote-1", "remote-2"]
    assert line("remote-2") == [(1, 0.1), (2, 0.2), (3, 3.3)]
    assert sent(workspace).remote_id == "remote-2"


def test_a_tracker_that_fails_is_a_problem_until_it_has_everything(workspace: Workspace) -> None:
    trained(workspace)
    Recorder.fails = 2
    problem = "the tracker Recorder did not take run 0123456789: ConnectionError: nobody answers"
    assert send(workspace) == MirrorOutcome(problems=[problem])
    first = sent(workspace)
    assert first.problem == problem
    assert send(workspace).problems == [problem]
    assert sent(workspace).since == first.since is not None
    assert send(workspace) == MirrorOutcome(mirrored=[RUN_ID])
    assert line("remote-1") == [(1, 0.1), (2, 0.2)]
    assert (sent(workspace).problem, sent(workspace).since) == ("", None)


def test_a_name_that_is_refused_costs_nothing_but_itself(workspace: Workspace) -> None:
    run = trained(workspace).reached(5, loss=0.5, bad=1.0).ended("completed")
    assert send(workspace).notes == [
        f"the tracker Recorder does not take the metric 'bad' of run {RUN_ID}: not this name"
    ]
    assert line("remote-1")[-1] == (5, 0.5)
    run.command("note", text="good")
    assert send(workspace).notes == []
    assert sent(workspace).refused == ["bad"]


def test_what_an_earlier_version_has_sent_is_replaced_only_if_the_run_goes_on(workspace: Workspace) -> None:
    run = trained(workspace).ended("completed")
    listed = observe(workspace, ask_slurm=False).runs[RUN_ID]
    offsets = workspace.store.ask(lambda db: queries.offsets(db, [RUN_ID]))[RUN_ID]
    Recorder.remote["old"] = []
    before = Sent("mlflow", "memory:", "old", offsets, revision=listed.revision)
    workspace.store.write(lambda transaction: transaction.set_sent(RUN_ID, before))
    assert send(workspace) == MirrorOutcome()
    run.submitted(2).started(1).reached(4, 1, loss=4.4)
    send(workspace)
    assert list(Recorder.remote) == ["old", "remote-2"]


def test_a_tracker_that_cannot_be_opened_keeps_only_itself_back(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(workspace)

    def fail(self: Recorder, settings: Mapping[str, Any], root: RunsRoot) -> None:
        raise TrackingError("it is closed")

    monkeypatch.setattr(Recorder, "__init__", fail)
    assert send(workspace) == MirrorOutcome(problems=["it is closed"])


def test_two_commands_that_send_take_turns_and_send_each_run_once_the_newest_first(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [f"{RUN_ID[:-1]}{number}" for number in range(4)]
    for run_id in ids:
        spec = {"tracking": {"mlflow": {"enabled": True}}}
        SimulatedRun(workspace.root.run(run_id), spec=spec, job=run_id).submitted().started().reached(1, loss=0.1)
    begun: list[str] = []
    begin = Recorder.begin
    monkeypatch.setattr(
        Recorder, "begin", lambda self, tracked, start: begun.append(tracked.run.id) or begin(self, tracked, start)
    )
    other = Thread(target=lambda: mirror(Workspace(workspace.config), first=ids[:1]))

    def is_waited_for(lock: Path) -> bool:
        with locked(lock, wait=False) as handle:
            return handle is None

    def report(left: Sequence[str], total: int, _outcome: MirrorOutcome) -> None:
        assert total == 4
        if len(left) == 3:
            with locked(workspace.root.tracking_lock):
                other.start()
                until(lambda: is_waited_for(workspace.root.tracking_queue), "the other command")

    assert mirror(workspace, report=report).problems == []
    other.join()
    assert sorted(begun) == ids
    assert begun[:2] == [ids[3], ids[0]]


def mirror(workspace: Workspace, **options: Any) -> MirrorOutcome:
    runs = observe(workspace, ask_slurm=False).runs
    return mirror_runs(workspace, runs.fetch(runs.index), **options)
