"""``delete``: what it refuses, what goes, what stays, and what a rebuilt registry then knows."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from helpers.checkpoints import gone
from helpers.simulated_run import ELSEWHERE, SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.cli import output
from slurmtrain.cli.log_commands import logs_command
from slurmtrain.cli.start_commands import resume_command
from slurmtrain.cli.status_commands import status_command
from slurmtrain.cli.upkeep_commands import delete_command
from slurmtrain.errors import RunBusy, RunNotFound, RunUnreadable, UserError
from slurmtrain.ops.shared.observe import observe, rebuild
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import sync

A, B, LIVE = "0000000001", "0000000002", "0000000003"
SWEEP = "0000000000"
MIB = 2**20


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Two runs of a sweep, which have ended and saved, and a run that trains elsewhere."""
    workspace = make_workspace(tmp_path / "runs")
    for run_id, name in {A: "cnn", B: "cnn", LIVE: "mlp"}.items():
        directory = workspace.root.run(run_id)
        sim = SimulatedRun(directory, spec={"name": name}, executor="local")
        sim.created(name=name, sweep=None if run_id == LIVE else SWEEP)
        sim.submitted(process=ELSEWHERE if run_id == LIVE else gone()).started().reached(5, loss=0.5).saved(5)
        directory.spec.write_text("name: cnn\n")
        saved = directory.checkpoints / "step-5"
        saved.mkdir(parents=True, exist_ok=True)
        (saved / "rank-0.bin").write_bytes(b"x" * MIB)
        [attempt] = directory.attempts.iterdir()
        (attempt / "logs").mkdir()
        (attempt / "logs" / "rank-0.log").write_text("step 5\n" * 1000)
        (directory.path / "output.png").write_bytes(b"x" * 5000)
        if run_id != LIVE:
            sim.ended("completed")
    return workspace


def call(workspace: Workspace, command: Any, *arguments: str) -> Result:
    words = [*arguments, "--runs", str(workspace.root.path)]
    return CliRunner().invoke(command, words, standalone_mode=False)


def listed(workspace: Workspace) -> dict[str, dict[str, Any]]:
    return {run["id"]: run for run in json.loads(call(workspace, status_command, "--json", "--all").stdout)["runs"]}


def files(workspace: Workspace, run_id: str) -> set[str]:
    directory = workspace.root.run(run_id).path
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_files_go_and_what_says_what_the_run_was_and_did_stays(workspace: Workspace) -> None:
    before = listed(workspace)[A]
    answer = json.loads(call(workspace, delete_command, A, "-y", "--json").stdout)
    assert [run["id"] for run in answer["runs"]] == [A]
    assert answer["bytes"] >= MIB
    kept = files(workspace, A)
    assert {"spec.yaml", "plan.json", "submissions/1/plan.json"} <= kept
    assert [name for name in kept if "log" in name or "bin" in name or "png" in name] == []
    after = listed(workspace)[A]
    assert (after["checkpoint"], after["deleted_at"] is not None) == (None, True)
    assert after["reason"].startswith("its files were deleted")
    changed = {"checkpoint", "deleted_at", "reason"}
    assert {key: after[key] for key in after.keys() - changed} == {key: before[key] for key in before.keys() - changed}
    rebuild(Workspace(workspace.config))
    assert listed(workspace)[A] == after
    assert files(workspace, B) >= {"checkpoints/step-5/rank-0.bin", "output.png"}


def test_a_forgotten_run_is_nowhere(workspace: Workspace) -> None:
    history = workspace.root.history(A)
    history.parent.mkdir()
    history.touch()
    call(workspace, delete_command, A, "--forget", "-y")
    assert not history.exists()
    assert not workspace.root.run(A).path.exists()
    assert workspace.unborn() == []
    assert set(listed(workspace)) == {B, LIVE}
    assert isinstance(call(workspace, delete_command, A, "-y").exception, RunNotFound)


@pytest.mark.parametrize("names", [(LIVE,), (A, LIVE), ("*",)])
@pytest.mark.parametrize("forget", [(), ("--forget",)])
def test_nothing_is_deleted_where_a_run_has_not_ended(
    workspace: Workspace, names: tuple[str, ...], forget: tuple[str, ...]
) -> None:
    before = {run_id: files(workspace, run_id) for run_id in (A, LIVE)}
    error = call(workspace, delete_command, *names, "-y", *forget).exception
    assert isinstance(error, RunBusy)
    assert f"run {LIVE} (mlp) is running; 'slurmtrain cancel {LIVE}' ends it first" in str(error)
    assert {run_id: files(workspace, run_id) for run_id in (A, LIVE)} == before


def test_a_run_that_one_which_has_not_ended_names_in_its_plan_stays(workspace: Workspace) -> None:
    plan = workspace.root.run(LIVE).plan
    plan.write_text(plan.read_text().replace("x.py", f"x.py --from runs/{A}/checkpoints/step-5"))
    error = call(workspace, delete_command, A, "-y").exception
    assert isinstance(error, RunBusy)
    assert f"run {LIVE} (mlp) has not ended and may need the files of run {A}" in str(error)
    assert "deleted" in call(workspace, delete_command, B, "-y").stderr


def test_where_nobody_can_be_asked_it_needs_a_yes(workspace: Workspace) -> None:
    error = call(workspace, delete_command, A).exception
    assert isinstance(error, UserError)
    assert "the files of 1 run(s)" in str(error)
    assert "nothing was deleted: without a terminal, confirm with -y" in str(error)
    assert "output.png" in files(workspace, A)


def test_a_deleted_run_is_neither_deleted_again_nor_resumed_and_its_logs_are_said_to_be_gone(
    workspace: Workspace,
) -> None:
    assert "step 5" in call(workspace, logs_command, A).stdout
    call(workspace, delete_command, SWEEP, "-y")
    before = files(workspace, A)
    assert "are gone already" in call(workspace, delete_command, SWEEP, "-y").stderr
    assert files(workspace, A) == before
    assert str(call(workspace, logs_command, A).exception) == f"the logs of run {A} were deleted with its other files"
    for arguments in ((A, "params.steps=9"), (A, "--from-start")):
        error = call(workspace, resume_command, *arguments).exception
        assert isinstance(error, RunBusy)
        assert f"the files of run {A} were deleted" in str(error)


def test_on_a_terminal_it_is_asked_with_the_space_that_is_freed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[str] = []

    def confirm(question: str) -> bool:
        questions.append(question)
        return False

    monkeypatch.setattr(output, "confirm", confirm)
    monkeypatch.setattr(output, "can_ask", lambda: True)
    result = call(workspace, delete_command, SWEEP)
    assert isinstance(result.exception, click.Abort)
    assert questions == ["delete the files of 2 run(s), 2.0 MiB?"]
    assert result.stderr.splitlines()[0] == f"{A}  cnn  completed  1.0 MiB"
    assert "output.png" in files(workspace, A)


def _no_journal(run: Path) -> None:
    [journal, *_] = (run / "journal").glob("*.jsonl")
    journal.unlink()
    journal.mkdir()


def _link_to_itself(run: Path) -> None:
    shutil.rmtree(run)
    run.symlink_to(run.name)


def _file(run: Path) -> None:
    shutil.rmtree(run)
    run.write_text("x")


@pytest.mark.parametrize("damage", [_no_journal, _link_to_itself, _file, lambda run: run.chmod(0o777)])
def test_a_run_that_cannot_be_read_can_only_be_forgotten(workspace: Workspace, damage: Callable[[Path], None]) -> None:
    # It was read before, so that it is known where its processes would be.
    assert A in listed(workspace)
    damage(workspace.root.run(A).path)
    assert isinstance(call(workspace, delete_command, A, "-y").exception, RunUnreadable)
    result = call(workspace, delete_command, A, "-y", "--forget")
    assert result.exception is None, result.output
    assert set(listed(workspace)) == {B, LIVE}
    assert not os.path.lexists(workspace.root.run(A).path)
    assert workspace.unborn() == []


def test_a_run_directory_that_is_a_link_is_emptied_where_it_is(workspace: Workspace, tmp_path: Path) -> None:
    place, elsewhere = workspace.root.run(A).path, tmp_path / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    call(workspace, delete_command, A, "-y", "--forget")
    assert list(elsewhere.iterdir()) == []
    assert not os.path.lexists(place)
    assert workspace.unborn() == []


def test_what_a_killed_delete_has_left_is_listed_and_deleted_by_the_next_one_alone(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slurmtrain.ops import delete as verb

    def killed(*_: object, **more: Any) -> Any:
        if more.get("dry"):
            return verb.Removal(bytes=MIB)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(verb, "remove_tree", killed)
        assert call(workspace, delete_command, A, "-y").exception is not None
    assert "output.png" in files(workspace, A)
    sync(Workspace(workspace.config), track=False)
    assert "output.png" in files(workspace, A)
    [run] = json.loads(call(workspace, status_command, A, "--json").output)["runs"]
    assert run["reason"] == f"its files were deleted in part: 'slurmtrain delete {A}' deletes the rest"
    assert call(workspace, delete_command, A, "-y").exit_code == 0
    assert "output.png" not in files(workspace, A)
    assert observe(workspace, ask_slurm=False).runs[A].row["freed"] == MIB


def test_a_run_directory_that_somebody_has_removed_leaves_the_lists_until_it_comes_back(
    workspace: Workspace, tmp_path: Path
) -> None:
    before = listed(workspace)
    assert set(before) == {A, B, LIVE}
    place = workspace.root.run(A).path
    place.rename(tmp_path / "away")
    assert set(listed(workspace)) == {B, LIVE}
    (tmp_path / "away").rename(place)
    assert listed(workspace) == before
    # Nobody can tell from here whether its processes live.
    shutil.rmtree(workspace.root.run(LIVE).path)
    assert "its directory was deleted" in listed(workspace)[LIVE]["reason"]


def test_a_new_runs_root_is_nothing_to_git_and_an_existing_file_stays(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "new")
    shutil.rmtree(workspace.root.path, ignore_errors=True)
    workspace.prepare()
    ignored = workspace.root.path / ".gitignore"
    assert ignored.read_text() == "*\n"
    ignored.write_text("mine")
    workspace.prepare()
    assert ignored.read_text() == "mine"


def test_a_link_in_the_place_of_a_run_goes_and_what_it_leads_to_stays_as_it_is(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As an archive may bring one: it leads to what is no run.
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious.txt").write_text("precious")
    link = workspace.root.run("0000000009").path
    link.symlink_to(home)
    monkeypatch.setattr("slurmtrain.slurm.slurm_commands.is_installed", lambda _: False)
    answer = json.loads(call(workspace, delete_command, "0000000009", "--forget", "-y", "--json").stdout)
    forgotten = {"id": "0000000009", "forgotten": True, "bytes": 0, "links": [str(link)], "trackers": {}, "forks": []}
    assert answer["runs"] == [forgotten]
    assert not link.is_symlink()
    assert [path.name for path in home.iterdir()] == ["precious.txt"]
    assert "0000000009" not in listed(workspace)
