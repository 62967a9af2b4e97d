"""Asking a run that trains for a checkpoint, and waiting for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from helpers.checkpoints import ATTEMPT, end_run, make_run, write_rank_event
from helpers.saved_runs import fill_the_disk

from slurmtrain.errors import NotAvailable, PathError, RunBusy
from slurmtrain.model.run.journal_lines import payload_classes
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops import request_checkpoint as checkpoint_verb
from slurmtrain.ops.request_checkpoint import SaveRequest, request_checkpoint, wait_for_checkpoint
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import read_json

Act = Callable[[], object]


class Clock:
    """Stands for the module ``time`` while a command waits: at each look one thing happens to the run."""

    def __init__(self, acts: list[Act]) -> None:
        self.now = 1000.0
        self.acts = acts

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.acts:
            self.acts.pop(0)()


@pytest.fixture
def trains(workspace: Workspace) -> RunDir:
    """A run that is at its steps."""
    run = make_run(workspace.config.runs, every={"steps": 1000})
    write_rank_event(run, "session", step=0, world_size=1, device="cpu")
    write_rank_event(run, "registered", objects=["model"])
    write_rank_event(run, "total", total_steps=100_000)
    return run


def saved(run: RunDir, step: int, **more: Any) -> None:
    described = {"step": step, "path": f"checkpoints/step-{step}", "bytes": 7, "saved_at": 5.0 + step, "stall_s": 0.25}
    write_rank_event(run, "saved", **{**described, "why": "asked", "metrics": {}, "request": None, **more})


def answered(
    workspace: Workspace, request: SaveRequest, monkeypatch: pytest.MonkeyPatch, *acts: Act, timeout_s: float = 60.0
) -> tuple[str, int | None, str]:
    monkeypatch.setattr(checkpoint_verb, "time", Clock(list(acts)))
    outcome = wait_for_checkpoint(workspace, request, timeout_s)
    return outcome.outcome, outcome.checkpoint.step if outcome.checkpoint else None, outcome.reason


def test_a_run_is_asked_by_a_line_in_a_journal_and_a_file(workspace: Workspace, trains: RunDir) -> None:
    request = request_checkpoint(workspace, trains.id)
    [event] = events_of(workspace, trains, "asked")
    assert event["request"] == request.id
    assert "@" in event["by"]
    assert (read_json(trains.request) or {})["request"] == request.id
    assert request.id != request_checkpoint(workspace, trains.id).id


def events_of(workspace: Workspace, run: RunDir, kind: str) -> list[dict[str, Any]]:
    observe_run(workspace, run.id, ask_slurm=False)
    return [event.payload.to_json() for event in workspace.store.events(run.id, payload_classes()[kind])]


FULL = "no space left on the device"


def failed(run: RunDir, step: int, reason: str, **more: Any) -> None:
    write_rank_event(run, "save_failed", step=step, reason=reason, **{"why": "asked", **more})


@pytest.mark.parametrize(
    ("before", "acts", "expected"),
    [
        pytest.param(
            lambda run: saved(run, 3, request="another"),
            [lambda run, _: saved(run, 4, why="interval"), lambda run, request: saved(run, 5, request=request)],
            ("saved", 5, ""),
            id="the save that names the request fulfils it",
        ),
        pytest.param(
            lambda run: failed(run, 2, "an older one"),
            [
                lambda run, _: failed(run, 4, "of no concern", why="interval", request=None),
                lambda run, request: failed(run, 5, FULL, why="steps", request=request),
            ],
            ("failed", None, FULL),
            id="a save that fails is reported with its reason",
        ),
        pytest.param(
            lambda _: None,
            [lambda run, _: (saved(run, 9, why="stop"), end_run(run, "cancelled"))],
            ("ended", 9, "run {id} is cancelled"),
            id="a run that ends first may have saved before",
        ),
        pytest.param(
            lambda run: (write_rank_event(run, "restored", step=8, path="checkpoints/step-8", bytes=7, saved_at=1.0),
                         saved(run, 9)),
            [lambda run, _: (saved(run, 4), end_run(run, "crash", reason="it broke"))],
            ("ended", None, "run {id} is failed: it broke"),
            id="a run that ends without saving is reported so",
        ),
        pytest.param(
            lambda _: None,
            [lambda run, _: (start_again(run), saved(run, 5, attempt="1.1"))],
            ("ended", None, "the attempt of run {id} that was asked to save has ended, and the run is running"),
            id="the next attempt does not fulfil a request",
        ),
    ],
)  # fmt: skip
def test_what_happens_to_a_run_that_was_asked_is_the_answer(
    workspace: Workspace,
    trains: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[RunDir], object],
    acts: list[Callable[[RunDir, str], object]],
    expected: tuple[str, int | None, str],
) -> None:
    before(trains)
    request = request_checkpoint(workspace, trains.id)
    answer = answered(workspace, request, monkeypatch, *(partial(act, trains, request.id) for act in acts))
    assert answer == (*expected[:2], expected[2].format(id=trains.id))


def test_who_asked_later_stands_for_those_before_and_not_the_other_way_round(
    workspace: Workspace, trains: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = request_checkpoint(workspace, trains.id), request_checkpoint(workspace, trains.id)
    late = answered(workspace, second, monkeypatch, lambda: saved(trains, 5, request=first.id), timeout_s=3)
    assert late == ("late", None, "")
    first, later = request_checkpoint(workspace, trains.id), []
    ask = lambda: later.append(request_checkpoint(workspace, trains.id))  # noqa: E731
    answer = answered(workspace, first, monkeypatch, ask, lambda: saved(trains, 6, request=later[0].id))
    assert answer == ("saved", 6, "")


def start_again(run: RunDir) -> None:
    """Begin the next attempt of a run, whose script has come as far as opening its session."""
    shutil.copytree(run.attempts / ATTEMPT, run.attempts / "1.1", ignore=shutil.ignore_patterns("rank-*"))
    write_rank_event(run, "session", attempt="1.1", step=0)


def test_waiting_ends_at_the_timeout(workspace: Workspace, trains: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_checkpoint(workspace, trains.id)
    clock = Clock([])
    monkeypatch.setattr(checkpoint_verb, "time", clock)
    assert wait_for_checkpoint(workspace, request, 7.2).outcome == "late"
    assert clock.now == 1007.2


def test_only_a_run_that_trains_is_asked(workspace: Workspace, ended: RunDir) -> None:
    with pytest.raises(RunBusy, match=r"is failed, and only a run that is training can save; its newest .* step 40$"):
        request_checkpoint(workspace, ended.id)
    assert not ended.request.exists()
    assert not list(ended.journals.glob("checkpoint-*"))


def test_a_run_that_is_not_at_its_steps_yet_is_not_asked(workspace: Workspace) -> None:
    run = make_run(workspace.config.runs, every={"steps": 5})
    with pytest.raises(RunBusy, match="still starting, or its script does not use"):
        request_checkpoint(workspace, run.id)
    write_rank_event(run, "session", step=0)
    write_rank_event(run, "registered", objects=["model"])
    with pytest.raises(RunBusy, match="not begun its first step"):
        request_checkpoint(workspace, run.id)
    assert not run.request.exists()
    write_rank_event(run, "total", total_steps=5)
    request_checkpoint(workspace, run.id)


def test_events_of_an_earlier_attempt_do_not_count(workspace: Workspace, trains: RunDir) -> None:
    start_again(trains)
    with pytest.raises(RunBusy, match="not begun its first step"):
        request_checkpoint(workspace, trains.id)


def test_a_script_that_names_nothing_to_save_is_not_asked(workspace: Workspace) -> None:
    run = make_run(workspace.config.runs)
    write_rank_event(run, "session", step=0)
    write_rank_event(run, "total", total_steps=5)
    with pytest.raises(NotAvailable, match=r"has not registered anything to save yet; .* run.checkpoint\(\)$"):
        request_checkpoint(workspace, run.id)
    write_rank_event(run, "registered", objects=["model"])
    request_checkpoint(workspace, run.id)


def test_a_directory_that_cannot_be_written_is_an_error(
    workspace: Workspace, trains: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe_run(workspace, trains.id, ask_slurm=False)
    fill_the_disk(monkeypatch)
    with pytest.raises(PathError, match=f"cannot write to {trains.path}: no space left"):
        request_checkpoint(workspace, trains.id)
    assert not trains.request.exists()
