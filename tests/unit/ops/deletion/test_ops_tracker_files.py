"""What trackers have written of a run goes with it, wherever that is, and nothing else does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.checkpoints import gone
from helpers.simulated_run import RUN_ID, SimulatedRun, make_test_plan
from helpers.workspaces import build_run

from slurmtrain.ops.deletion import delete as verb
from slurmtrain.ops.deletion.delete import delete, find_deletable
from slurmtrain.ops.deletion.tree_removal import Removal
from slurmtrain.ops.shared.current_plan import run_settings
from slurmtrain.ops.shared.mirroring import MirrorOutcome, mirror_runs
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import write_json

OTHER = "0000000099"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A directory for CSV files, in which there are others."""
    elsewhere = tmp_path / "curves"
    elsewhere.mkdir()
    (elsewhere / f"{OTHER}.csv").write_text("step,time,attempt,loss\n")
    return elsewhere


@pytest.fixture
def run(workspace: Workspace, elsewhere: Path) -> SimulatedRun:
    """A run that has ended, of which there are CSV files in two places, event files, and directories for W&B."""
    tracking = {"mlflow": {"enabled": False}, "csv": {"enabled": True}, "tensorboard": {"enabled": True}}
    run = build_run(workspace, executor="local", tracking=tracking)
    assert run._plan is not None
    run.created(**run_settings(run._plan)).submitted(process=gone()).started().reached(1, loss=1.0).ended("completed")
    assert sent(workspace) == MirrorOutcome(mirrored=[RUN_ID])
    resume_with(run, csv={"enabled": True, "dir": str(elsewhere)}, wandb={"enabled": True})
    (elsewhere / f"{RUN_ID}.csv").write_text("step,time,attempt,loss\n1,5.0,1,1.0\n")
    (elsewhere / f".{RUN_ID}.csv.0123abcd.tmp").write_text("step")
    in_wandb = workspace.root.path / "wandb"
    for name in (f"offline-run-20260101_000000-{RUN_ID}", f"offline-run-20260102_000000-{RUN_ID}", f".{RUN_ID}.tmp"):
        (in_wandb / name).mkdir(parents=True)
        (in_wandb / name / f"run-{RUN_ID}.wandb").write_text("x")
    state = {"directory": None, "directories": [f"offline-run-20260101_000000-{RUN_ID}", "../csv"]}
    (in_wandb / f"{RUN_ID}.json").write_text(json.dumps(state))
    return run


def resume_with(run: SimulatedRun, **tracking: object) -> None:
    """Note a later submission with other trackers."""
    folder = run.directory.submissions / "2"
    folder.mkdir(parents=True)
    write_json(folder / "plan.json", make_test_plan(tracking=tracking).to_json())


def sent(workspace: Workspace) -> MirrorOutcome:
    return mirror_runs(workspace, observe(workspace, ask_slurm=False).runs.fetch([RUN_ID]))


def deleted(workspace: Workspace, *, forget: bool = False) -> Removal:
    runs = find_deletable(workspace, [RUN_ID], forget=forget)
    outcome = delete(workspace, runs, forget=forget)
    assert outcome.problems == []
    assert outcome.removed[RUN_ID].trackers == runs[RUN_ID].removal.trackers
    return outcome.removed[RUN_ID]


def left(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("forget", [False, True])
def test_files_of_all_trackers_that_a_run_ever_had_go(workspace: Workspace, elsewhere: Path, forget: bool) -> None:
    root = workspace.root.path
    removal = deleted(workspace, forget=forget)
    assert sorted(removal.trackers) == ["csv", "tensorboard", "wandb"]
    assert str(elsewhere / f"{RUN_ID}.csv") in removal.trackers["csv"]
    assert left(elsewhere) == {f"{OTHER}.csv"}
    assert left(root / "csv") == left(root / "tensorboard") == set()
    # Nothing says that this tracker has written it.
    assert left(root / "wandb") == {f"offline-run-20260102_000000-{RUN_ID}/run-{RUN_ID}.wandb"}


@pytest.mark.usefixtures("run")
def test_a_sync_does_not_write_again_what_was_deleted(workspace: Workspace) -> None:
    deleted(workspace)
    assert sent(workspace) == MirrorOutcome()
    assert left(workspace.root.path / "csv") == set()
    assert observe(workspace, ask_slurm=False).runs[RUN_ID].mirrored


@pytest.mark.usefixtures("run")
def test_links_and_what_a_tracker_has_not_written_stay(workspace: Workspace, elsewhere: Path) -> None:
    root = workspace.root.path
    (root / "tensorboard" / RUN_ID / "events.out.tfevents.17.host.of-the-script").write_text("x")
    (root / "csv" / f"{RUN_ID}.csv").write_text("epoch,loss\n1,2\n")
    precious = elsewhere / "precious.csv"
    (elsewhere / f"{RUN_ID}.csv").rename(precious)
    (elsewhere / f"{RUN_ID}.csv").symlink_to(precious)
    deleted(workspace)
    assert left(elsewhere) == {f"{OTHER}.csv", f"{RUN_ID}.csv", "precious.csv"}
    assert left(root / "csv") == {f"{RUN_ID}.csv"}
    assert left(root / "tensorboard") == {f"{RUN_ID}/events.out.tfevents.17.host.of-the-script"}


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to other accounts")
@pytest.mark.usefixtures("run")
def test_files_of_other_accounts_stay_and_that_is_a_problem(workspace: Workspace) -> None:
    events = next((workspace.root.path / "tensorboard" / RUN_ID).glob("events*"))
    events.chmod(0o600)
    os.chown(events, 4321, -1)
    outcome = delete(workspace, find_deletable(workspace, [RUN_ID], forget=False), forget=False)
    assert [problem.partition(" belongs")[0] for problem in outcome.problems] == [str(events)]
    assert observe(workspace, ask_slurm=False).runs[RUN_ID].row["freed"] is None
    events.unlink()
    deleted(workspace)


@pytest.mark.usefixtures("run")
def test_what_a_killed_delete_has_left_of_trackers_the_next_one_deletes(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    def killed(*_: object) -> Removal:
        raise KeyboardInterrupt

    runs = find_deletable(workspace, [RUN_ID], forget=False)
    with monkeypatch.context() as patch:
        patch.setattr(verb, "remove_tracker_files", killed)
        with pytest.raises(KeyboardInterrupt):
            delete(workspace, runs, forget=False)
    assert f"{RUN_ID}.csv" in left(elsewhere)
    assert sent(workspace) == MirrorOutcome()
    deleted(workspace)
    assert left(elsewhere) == {f"{OTHER}.csv"}
