"""What other programs read of runs that were rolled back between syncs, in files of trackers."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.wandb_files import synced_history
from helpers.workspaces import build_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slurmtrain.errors import UserError
from slurmtrain.model.urls import DatabaseUrl
from slurmtrain.ops.shared.mirroring import MirrorOutcome, mirror_runs
from slurmtrain.ops.shared.next_attempts import run_settings
from slurmtrain.ops.shared.observe import observe, rebuild
from slurmtrain.ops.shared.run_details import show_json
from slurmtrain.ops.shared.trackers import check_trackers
from slurmtrain.ops.shared.views import run_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.csv import StepFile
from slurmtrain.plugins.tensorboard import TensorboardTracker
from slurmtrain.tracking.tracker import writes_files

SENT = MirrorOutcome(mirrored=[RUN_ID])


def tracked(workspace: Workspace, *trackers: str, others: Mapping[str, Any] | None = None) -> SimulatedRun:
    """A run that is sent to these trackers, and has trained 4 steps, the last of which may get further metrics."""
    tracking = {"mlflow": {"enabled": False}, **{name: {"enabled": True} for name in trackers}}
    tracking["plugins"] = dict(others or {})
    run = build_run(workspace, tracking=tracking)
    assert run._plan is not None
    run.created(**run_settings(run._plan)).submitted().started()
    for step in (1, 2, 3, 4):
        run.later(1).reached(step, loss=step / 4)
    return run


def send(workspace: Workspace) -> MirrorOutcome:
    return mirror_runs(workspace, observe(workspace, ask_slurm=False).runs.fetch([RUN_ID]))


def rolled_back(run: SimulatedRun, restart: int, to: int, steps: int) -> None:
    """A new attempt resumes from a step, and trains on from there; its losses are 100 larger for each restart."""
    run.started(restart).rank("workers", 0, restart)
    for step in range(to + 1, to + steps + 1):
        run.later(1).reached(step, restart, loss=100 * restart + step, **({"val acc,%": 0.5} if step % 4 == 0 else {}))


def rows(workspace: Workspace) -> list[Mapping[str, str]]:
    with (workspace.root.path / "csv" / f"{RUN_ID}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(workspace: Workspace) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row["loss"])) for row in rows(workspace)]


def in_tensorboard(workspace: Workspace, name: str = "loss") -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(workspace.root.path / "tensorboard" / RUN_ID), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_files_have_the_surviving_line_after_each_sync(workspace: Workspace) -> None:
    run = tracked(workspace, "csv", "tensorboard")
    assert send(workspace) == SENT
    # Further metrics may follow for step 4, such as those of an evaluation.
    assert losses(workspace) == in_tensorboard(workspace) == [(1, 0.25), (2, 0.5), (3, 0.75)]
    running = EventAccumulator(str(workspace.root.path / "tensorboard" / RUN_ID), size_guidance={"scalars": 0})
    running.Reload()
    rolled_back(run, 1, 2, 3)
    assert send(workspace) == SENT
    assert losses(workspace) == in_tensorboard(workspace) == [(1, 0.25), (2, 0.5), (3, 103), (4, 104)]
    # Also for whoever looked all the time.
    running.Reload()
    assert [(event.step, event.value) for event in running.Scalars("loss")] == losses(workspace)
    rolled_back(run, 2, 3, 3)
    run.ended("completed", 0, 2)
    assert send(workspace) == SENT
    surviving = [(1, 0.25), (2, 0.5), (3, 103), (4, 204), (5, 205), (6, 206)]
    assert losses(workspace) == in_tensorboard(workspace) == surviving
    assert in_tensorboard(workspace, "val acc,%") == [(4, 0.5)]
    assert rows(workspace)[3] == {"step": "4", "time": rows(workspace)[3]["time"], "attempt": "3", "loss": "204",
                                  "val acc,%": "0.5"}  # fmt: skip
    assert send(workspace) == MirrorOutcome()


def insert(row: str) -> Callable[[str], str]:
    """A row before those that are there, and a later one after them."""
    return lambda text: text.replace("\n", f"\n{row}\n", 1) + "7,5.0,1,1.0\n"


@pytest.mark.parametrize(
    "changed",
    [lambda text: text[:-1], lambda text: text[:-20], insert("junk,5.0,1,1.0"), insert(f"{'x' * 200_000},5.0,1,1.0"),
     lambda text: f"{text}4,1.5,1,1.0\n"],
    ids=["killed in its last byte", "killed in a row", "junk", "a very long row", "written but not noted"],
)  # fmt: skip
def test_whatever_a_command_or_another_program_left_of_a_file_each_row_is_there_once(
    workspace: Workspace, changed: Callable[[str], str]
) -> None:
    run = tracked(workspace, "csv")
    send(workspace)
    path = workspace.root.path / "csv" / f"{RUN_ID}.csv"
    with path.open(newline="") as file:
        text = file.read()
    with path.open("w", newline="") as file:
        file.write(changed(text))
    run.reached(5, loss=1.25).ended("completed")
    assert send(workspace) == SENT
    assert losses(workspace) == [(step, step / 4) for step in (1, 2, 3, 4, 5)]


def test_files_that_were_deleted_are_written_anew(workspace: Workspace) -> None:
    run = tracked(workspace, "csv", "tensorboard")
    send(workspace)
    (workspace.root.path / "csv" / f"{RUN_ID}.csv").unlink()
    folder = workspace.root.path / "tensorboard" / RUN_ID
    for path in folder.iterdir():
        path.unlink()
    # What a script writes there stays whole.
    theirs = folder / "events.out.tfevents.1700000000.host.7.0"
    theirs.write_bytes(b"theirs")
    run.ended("completed")
    assert send(workspace) == SENT
    assert theirs.read_bytes() == b"theirs"
    theirs.unlink()
    assert losses(workspace) == in_tensorboard(workspace) == [(step, step / 4) for step in (1, 2, 3, 4)]


def test_event_files_of_a_command_that_was_killed_are_written_anew(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracked(workspace, "tensorboard")
    monkeypatch.setattr(TensorboardTracker, "finish", _fail)
    assert send(workspace).problems != []
    monkeypatch.undo()
    run.ended("completed")
    assert send(workspace) == SENT
    assert in_tensorboard(workspace) == [(step, step / 4) for step in (1, 2, 3, 4)]
    sizes = [path.stat().st_size for path in sorted((workspace.root.path / "tensorboard" / RUN_ID).glob("events*"))]
    assert sizes[0] == 0 < sizes[1]


def _fail(*_: object) -> None:
    raise OSError("killed")


def test_a_directory_that_cannot_be_written_to_is_a_problem_of_this_tracker_alone(workspace: Workspace) -> None:
    tracked(workspace, "csv", "tensorboard")
    (workspace.root.path / "csv").write_text("no directory")
    outcome = send(workspace)
    assert "csv" in "".join(outcome.problems)
    assert in_tensorboard(workspace) == [(1, 0.25), (2, 0.5), (3, 0.75)]


def in_wandb(workspace: Workspace) -> dict[int, float]:
    """What W&B's server would show of the metric ``loss``, once everything is synced."""
    return synced_history(workspace.root.path / "wandb").get("loss", {})


def pretend_to_sync(workspace: Workspace) -> None:
    """Leave the marks that ``wandb sync`` leaves."""
    for path in (workspace.root.path / "wandb").glob("offline-run-*/*.wandb"):
        path.with_name(f"{path.name}.synced").touch()


@pytest.mark.parametrize("syncs", [False, True])
def test_wandb_gets_the_surviving_line_whether_or_not_it_was_synced_before_a_rollback(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, syncs: bool
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tracked(workspace, "wandb").ended("completed")
    assert send(workspace) == SENT
    assert in_wandb(workspace) == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    in_folder = workspace.root.path / "wandb"
    assert not [*in_folder.rglob("requirements.txt"), *(path for path in in_folder.rglob("*") if path.is_symlink())]
    others = {path.name for path in in_folder.iterdir() if not path.name.startswith("offline-run-")}
    assert others == {f"{RUN_ID}.csv", f"{RUN_ID}.json"}
    if syncs:
        pretend_to_sync(workspace)
    run.submitted(2)
    rolled_back(run, 1, 2, 3)
    run.ended("completed", 0, 1)
    assert send(workspace) == SENT
    assert in_wandb(workspace) == {1: 0.25, 2: 0.5, 3: 103, 4: 104, 5: 105}
    assert len(list((workspace.root.path / "wandb").glob("offline-run-*"))) == (2 if syncs else 1)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("commet", "there is no tracker 'commet'; did you mean 'comet'?"),
        ("nothing", "there is no tracker 'nothing'; "),
        ("tensorboard", "tensorboard is not installed: pip install 'slurmtrain[tensorboard]'"),
    ],
)
def test_an_unknown_tracker_is_an_error_before_anything_is_submitted(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setattr("slurmtrain.tracking.tracker.tracker_names", lambda: ["comet", "csv", "tensorboard"])
    monkeypatch.setattr("slurmtrain.tracking.tracker.find_spec", lambda _: None)
    own = {name: {"enabled": True}} if name == "tensorboard" else {"plugins": {name: {"project": "x"}}}
    plan = build_run(workspace, tracking=own)._plan
    assert plan is not None
    with pytest.raises(UserError, match=re.escape(message)):
        check_trackers([plan])


def test_the_tracker_of_the_page_about_trackers_gets_final_points(
    workspace: Workspace, install_jsonl: Callable[[], None]
) -> None:
    install_jsonl()
    run = tracked(workspace, others={"jsonl": {"dir": "lines"}})
    assert run._plan is not None
    check_trackers([run._plan])
    assert send(workspace) == SENT
    run.ended("completed")
    assert send(workspace) == SENT
    file = workspace.root.path / "lines" / f"{RUN_ID}.jsonl"
    assert file.read_text().splitlines() == [f'{{"step": {step}, "loss": {step / 4}}}' for step in (1, 2, 3, 4)]
    assert Path(f"{file}.state").read_text() == "completed"


def test_a_tracker_of_slurmtrain_is_never_replaced(install: Callable[..., Path]) -> None:
    install("other-tracker", csv="other:Tracker")
    assert writes_files("csv")


def test_a_file_of_steps_that_is_not_ours_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    file = StepFile(tmp_path / "x.csv")
    assert file.keep(1) is None
    assert list(file.rows()) == []


def lose(registry: Path | DatabaseUrl) -> None:
    """Delete a registry with all that it knows; slurmtrain itself would keep what was sent to trackers on a server."""
    if isinstance(registry, Path):
        registry.unlink()
        return
    from slurmtrain.plugins.postgresql import make_engine

    with make_engine(registry).begin() as connection:
        connection.execute(sa.text(f'DROP SCHEMA "{registry.schema}" CASCADE'))


@pytest.mark.parametrize("loss", ["rebuild", "lost registry", "damaged record"])
def test_a_registry_that_is_made_anew_knows_what_was_sent(workspace: Workspace, loss: str) -> None:
    run = tracked(workspace, "csv", "tensorboard")
    assert send(workspace) == SENT
    rolled_back(run, 1, 2, 3)
    assert send(workspace) == SENT

    def whole() -> tuple[dict[str, Any], dict[str, Any]]:
        listed = observe(workspace, ask_slurm=False).runs.fetch([RUN_ID])[RUN_ID]
        loaded = workspace.store.load(RUN_ID)
        assert loaded is not None
        # How long it has run so far is another figure each time.
        return run_json(workspace, listed), {**show_json(workspace, listed, loaded), "usage": []}

    before, directory = whole(), workspace.root.run(RUN_ID)
    assert before[0]["mirrored"] is True
    assert {each["tracker"] for each in before[0]["trackers"]} == {"csv", "tensorboard"}
    if loss != "rebuild":
        lose(workspace.config.registry)
    if loss == "damaged record":
        directory.sent.write_text('{"trackers": [{"tracker": "csv", "uri": 7}, 3]}')
    rebuild(workspace)
    if loss == "damaged record":
        assert whole()[0]["trackers"] == []
        assert send(workspace) == SENT
    assert whole() == before
    assert send(workspace) == MirrorOutcome()
    assert losses(workspace) == in_tensorboard(workspace) == [(1, 0.25), (2, 0.5), (3, 103), (4, 104)]
