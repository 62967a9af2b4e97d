"""What trackers have written of a run goes with it, wherever that is, and nothing else does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.checkpoints import gone
from helpers.simulated_run import RUN_ID, SimulatedRun, make_test_plan
from helpers.workspaces import build_run

from slurmtrain.ops import delete as verb
from slurmtrain.ops.delete import delete, find_deletable
from slurmtrain.ops.shared.mirroring import MirrorOutcome, mirror_runs
from slurmtrain.ops.shared.next_attempts import run_settings
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.tree_removal import Removal, remove_tree
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


KIB = 1024


def nothing(_: str) -> bool:
    return False


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "deep" / "er").mkdir(parents=True)
    (tree / "deep" / "er" / "big").write_bytes(b"x" * 64 * KIB)
    (tree / "note").write_text("kept")
    return tree


def test_everything_goes_but_the_directory_itself_and_the_space_is_told(tree: Path) -> None:
    would = remove_tree(tree, nothing, dry=True)
    assert (tree / "deep" / "er" / "big").exists()
    removal = remove_tree(tree, nothing)
    assert list(tree.iterdir()) == []
    assert removal == would
    assert removal.bytes >= 64 * KIB
    assert remove_tree(tree, nothing).bytes == 0


def test_what_is_to_be_kept_stays_with_the_directories_above_it(tree: Path) -> None:
    remove_tree(tree, lambda path: path == "deep/er/big")
    assert sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*")) == ["deep", "deep/er", "deep/er/big"]


def test_a_link_goes_and_what_it_points_to_stays(tree: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (tree / "link").symlink_to(outside)
    (tree / "dangling").symlink_to("nowhere")
    removal = remove_tree(tree, nothing)
    assert sorted(removal.links) == [str(tree / "dangling"), str(tree / "link")]
    assert (outside / "precious").read_text() == "x"
    assert list(tree.iterdir()) == []


def test_a_file_that_has_another_name_elsewhere_is_unchanged_there_and_frees_nothing(
    tree: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    big = tree / "deep" / "er" / "big"
    big.chmod(0o400)
    shared.hardlink_to(big)
    before = remove_tree(tree / "deep", nothing, dry=True)
    assert (before.bytes, remove_tree(tree / "deep", nothing).bytes) == (0, 0)
    assert (shared.read_bytes(), shared.stat().st_mode & 0o777) == (b"x" * 64 * KIB, 0o400)


def test_a_file_with_two_names_in_the_tree_is_counted_once(tree: Path) -> None:
    (tree / "again").hardlink_to(tree / "deep" / "er" / "big")
    planned, freed = remove_tree(tree, nothing, dry=True).bytes, remove_tree(tree, nothing).bytes
    assert planned == freed
    assert 64 * KIB <= freed < 128 * KIB


def test_directories_and_files_that_cannot_be_written_to_go_too(tree: Path) -> None:
    (tree / "note").chmod(0o400)
    (tree / "deep" / "er").chmod(0o500)
    (tree / "deep").chmod(0o500)
    os.mkfifo(tree / "fifo")
    assert remove_tree(tree, nothing).problems == []
    assert list(tree.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other accounts")
def test_what_is_somebody_elses_stays(tree: Path) -> None:
    os.chown(tree / "note", 12345, 12345)
    os.chown(tree / "deep", 12345, 12345)
    removal = remove_tree(tree, nothing)
    assert (tree / "note").exists()
    assert (tree / "deep" / "er" / "big").exists()
    assert len(removal.problems) == 2
    assert all("belongs to" in problem for problem in removal.problems)


def test_a_directory_that_is_not_there_has_nothing_to_remove(tmp_path: Path) -> None:
    assert remove_tree(tmp_path / "nowhere", nothing).problems == []


def test_directories_too_deep_in_each_other_are_a_problem_in_a_sentence(tree: Path) -> None:
    handle = os.open(tree, os.O_RDONLY)
    for _ in range(700):
        os.mkdir("d", dir_fd=handle)
        inner = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = inner
    os.close(handle)
    problems = remove_tree(tree, nothing).problems
    assert f"the directories in {tree} are nested too deeply: remove it with 'rm -r'" in problems
    assert not (tree / "note").exists()
