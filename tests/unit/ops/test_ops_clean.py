"""``clean``: what goes, what stays whatever happens, and that all commands answer the same before and after."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from helpers.checkpoints import gone
from helpers.simulated_run import ELSEWHERE, SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.cli.status_commands import show_command
from slurmtrain.cli.upkeep_commands import clean_command
from slurmtrain.model.experiment.code import CodeSnapshot, CodeSpec
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.clean import KINDS, find_removable, remove
from slurmtrain.ops.shared.observe import rebuild
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.code.code_copy import make_tree
from slurmtrain.snapshots.selection import CodeSource
from slurmtrain.snapshots.snapshot_store import take
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.locks import locked

ENDED, LIVE, FORGOTTEN = "0000000001", "0000000002", "0000000003"
NAMED, UNNAMED = "a" * 64, "b" * 64
LONG_AGO = 1_000_000.0
DAY_S = 86400.0


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A run that has ended, one that trains elsewhere, and what else collects in a runs root, all of it old."""
    workspace = make_workspace(tmp_path / "runs")
    root = workspace.root
    for run_id in (ENDED, LIVE):
        directory = root.run(run_id)
        sim = SimulatedRun(directory, spec={"name": "cnn"}, executor="local")
        sim.created(name="cnn").submitted(process=ELSEWHERE if run_id == LIVE else gone())
        sim.started().reached(5, loss=0.5).saved(5)
        if run_id == ENDED:
            sim.ended("completed")
        fill(directory)
    plan = read_json(root.run(ENDED).plan) or {}
    write_json(root.run(ENDED).plan, {**plan, "note": NAMED})
    for name in (NAMED, UNNAMED, ".new-0011"):
        write(root.snapshots / name / "contents.gz", 5000)
    for array, run_id in {"arr1": ENDED, "arr2": LIVE}.items():
        root.array(array).elements.mkdir(parents=True)
        root.array(array).element(0).symlink_to(root.run(run_id).submission(1).path)
        write(root.array(array).submitit / "1.pkl", 4000)
    for run_id in (ENDED, FORGOTTEN):
        write(root.history(run_id), 4000)
    for key, run_id in {"k1": ENDED, "k2": LIVE}.items():
        root.keys.mkdir(exist_ok=True)
        write_json(root.submission_key(key), {"key": key, "runs": [run_id]})
    make_old(root.path)
    return workspace


def fill(directory: RunDir) -> None:
    """Give a run all kinds of files."""
    [attempt] = directory.attempts.iterdir()
    write(attempt / "logs" / "rank-0.log", 100_000)
    write(attempt / "logs" / "sizes-0.jsonl", 50)
    folder = directory.submission(1)
    write(folder.controller_log, 100)
    for name in ("1_submitted.pkl", "submission.sh", "1_0_log.out"):
        write(folder.submitit / name, 10_000)
    write(directory.checkpoints / "step-5" / "rank-0.bin", 10_000)
    write(directory.path / "checkpoints.before-attempt-2" / "step-3" / "rank-0.bin", 50_000)


def write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


def make_old(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)


def call(workspace: Workspace, *arguments: str, command: Any = clean_command) -> Result:
    words = [*arguments, "--runs", str(workspace.root.path)]
    return CliRunner().invoke(command, words, standalone_mode=False)


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def shown(workspace: Workspace, run_id: str) -> dict[str, Any]:
    answer = json.loads(call(workspace, run_id, "--json", command=show_command).stdout)["run"]
    assert isinstance(answer, dict)
    return answer


def test_without_a_terminal_it_says_what_would_go_and_removes_nothing(workspace: Workspace) -> None:
    before = files(workspace.root.path)
    answer = json.loads(call(workspace, "--json").stdout)
    assert answer["dry_run"]
    assert {each["kind"]: each["count"] for each in answer["kinds"]} == {
        "logs": 1, "jobs": 1, "code": 1, "arrays": 1, "caches": 1, "keys": 1, "litter": 1
    }  # fmt: skip
    assert answer["bytes"] == sum(each["bytes"] for each in answer["kinds"]) > 100_000
    result = call(workspace)
    assert "logs of runs that ended" in result.stdout
    assert "confirm with -y" in result.stderr
    assert before <= files(workspace.root.path)


def test_what_is_not_needed_goes_and_every_answer_stays_the_same(workspace: Workspace) -> None:
    before, live = shown(workspace, ENDED), files(workspace.root.run(LIVE).path)
    would = json.loads(call(workspace, "--dry-run", "--json").stdout)
    answer = json.loads(call(workspace, "-y", "--json").stdout)
    assert (answer["dry_run"], answer["problems"]) == (False, [])
    assert answer["kinds"] == would["kinds"]
    left = files(workspace.root.run(ENDED).path)
    assert not [path for path in left if path.endswith((".log", ".out", ".pkl", ".sh"))]
    assert {"plan.json", "checkpoints/step-5/rank-0.bin", "checkpoints.before-attempt-2/step-3/rank-0.bin"} <= left
    assert live <= files(workspace.root.run(LIVE).path)
    root = workspace.root
    assert {path.name for path in root.snapshots.iterdir()} == {NAMED, ".lock"}
    assert [path.name for path in root.arrays.iterdir()] == ["arr2"]
    assert [path.name for path in root.histories.iterdir()] == [f"{ENDED}.columns"]
    assert [path.name for path in root.keys.glob("*.json")] == [root.submission_key("k2").name]
    assert shown(workspace, ENDED) == before
    rebuild(Workspace(workspace.config))
    assert shown(workspace, ENDED) == before
    assert json.loads(call(workspace, "-y", "--json").stdout)["kinds"] == []


def test_checkpoints_put_aside_go_only_when_their_kind_is_named(workspace: Workspace) -> None:
    assert json.loads(call(workspace, "--aside", "-y", "--json").stdout)["bytes"] >= 50_000
    left = files(workspace.root.run(ENDED).path)
    assert not [path for path in left if "before-attempt" in path]
    assert "checkpoints/step-5/rank-0.bin" in left
    assert [path for path in left if path.endswith(".log")], "another kind"
    assert [path for path in files(workspace.root.run(LIVE).path) if "before-attempt" in path], "it has not ended"


def test_a_run_that_ended_lately_is_left_alone(workspace: Workspace) -> None:
    assert json.loads(call(workspace, "--logs", "--older-than", "100000w", "--json").stdout)["kinds"] == []
    error = call(workspace, "--older-than", "soon").exception
    assert isinstance(error, click.BadParameter)
    assert "is not a length of time; write 2w, 30d, 12h or 90m" in str(error)


def test_a_space_shared_by_two_names_is_freed_with_the_last(workspace: Workspace) -> None:
    aside = workspace.root.run(ENDED).path / "checkpoints.before-attempt-2" / "step-3" / "rank-0.bin"
    (workspace.root.path / "kept").hardlink_to(aside)
    assert find_removable(workspace, {"aside"}, 0.0).bytes == {}


def test_a_snapshot_that_is_taken_again_meanwhile_stays(workspace: Workspace, tmp_path: Path) -> None:
    code = tmp_path / "code"
    write(code / "train.py", 10)
    source, python = CodeSource(workdir=code, spec=CodeSpec()), Path("/usr/bin/python3")
    snapshot, _ = take(workspace.root, source, python)
    path = workspace.root.snapshot(snapshot.hash).path
    os.utime(path, (LONG_AGO, LONG_AGO))
    removable = find_removable(workspace, {"code"}, DAY_S)
    assert [path.name] in [part.names for part in removable.parts]
    take(workspace.root, source, python)
    remove(workspace, removable)
    assert (path / "contents.gz").exists()
    assert not workspace.root.snapshot(UNNAMED).path.exists()


def with_copy(workspace: Workspace, tmp_path: Path) -> tuple[RunDir, CodeSnapshot]:
    """The run that has ended, with a copy of a snapshot of its code."""
    write(tmp_path / "code" / "train.py", 10)
    source = CodeSource(workdir=tmp_path / "code", spec=CodeSpec())
    snapshot, _ = take(workspace.root, source, Path("/usr/bin/python3"))
    run = workspace.root.run(ENDED)
    make_tree(run, snapshot)
    return run, snapshot


@pytest.mark.parametrize(
    ("written", "goes"),
    [
        pytest.param("", True, id="only the code"),
        pytest.param("train.py", False, id="a file of the code"),
        pytest.param("__pycache__/train.pyc", True, id="what Python has compiled"),
        pytest.param("results.csv", False, id="a result"),
    ],
)
def test_a_copy_of_code_goes_where_a_script_has_changed_nothing_and_can_be_made_again(
    workspace: Workspace, tmp_path: Path, written: str, goes: bool
) -> None:
    run, snapshot = with_copy(workspace, tmp_path)
    if written:
        write(snapshot.tree(run.code) / written, 10)
    removable = find_removable(workspace, {"copies"}, DAY_S)
    assert [part.run for part in removable.parts] == ([run] if goes else [])
    remove(workspace, removable)
    assert (run.code.exists(), run.code_state.exists()) == (not goes, not goes)
    assert (tmp_path / "code").exists()
    assert make_tree(run, snapshot) is goes
    assert (snapshot.tree(run.code) / "train.py").exists()


def test_a_copy_of_code_whose_snapshot_is_gone_stays(workspace: Workspace, tmp_path: Path) -> None:
    _, snapshot = with_copy(workspace, tmp_path)
    workspace.root.snapshot(snapshot.hash).contents.unlink()
    assert find_removable(workspace, {"copies"}, DAY_S).parts == []


def test_no_snapshot_goes_while_a_plan_cannot_be_read(workspace: Workspace) -> None:
    plan = workspace.root.run(LIVE).plan
    plan.unlink()
    plan.mkdir()
    removable = find_removable(workspace, {"code"}, DAY_S)
    assert removable.parts == []
    assert [problem for problem in removable.problems if "no snapshot of code was removed" in problem]


def test_the_lock_of_a_search_that_is_over_goes_and_that_of_one_under_way_stays(workspace: Workspace) -> None:
    searches = workspace.root.searches
    for name in ("0000000004.lock", "0000000005.lock", "0000000005.json", "0000000006.lock"):
        write(searches / name, 0)
    make_old(searches)
    with locked(searches / "0000000006.lock"):
        os.utime(searches / "0000000006.lock", (LONG_AGO, LONG_AGO))
        assert call(workspace, "--litter", "-y").exit_code == 0
    assert files(searches) == {"0000000005.lock", "0000000005.json", "0000000006.lock"}


def test_a_link_of_the_users_to_a_log_goes_with_the_log(workspace: Workspace, tmp_path: Path) -> None:
    [attempt] = workspace.root.run(ENDED).attempts.iterdir()
    link = tmp_path / "mine.log"
    link.symlink_to(attempt / "logs" / "rank-0.log")
    (attempt / "log-link").write_bytes(os.fsencode(link))
    remove(workspace, find_removable(workspace, {"logs"}, DAY_S))
    assert not link.is_symlink()


def test_a_run_that_a_command_works_on_keeps_its_files(workspace: Workspace) -> None:
    removable = find_removable(workspace, {"logs"}, DAY_S)
    with locked(workspace.root.run(ENDED).lock):
        assert remove(workspace, removable).bytes == {}
    assert remove(workspace, removable).bytes.keys() == {"logs"}


@pytest.mark.parametrize("after", range(1, 9))
def test_what_a_killed_clean_has_left_the_next_one_removes(
    workspace: Workspace, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = shown(workspace, ENDED)
    removable = find_removable(workspace, KINDS, DAY_S)
    calls: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("unlink", "rmdir", "rename"):
            patch.setattr(os, name, die_after(getattr(os, name), calls, after))
        with pytest.raises(KeyboardInterrupt):
            remove(workspace, removable)
    assert len(calls) == after
    assert shown(workspace, ENDED) == before
    for path in workspace.root.snapshots.glob(".old-*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    remove(workspace, find_removable(workspace, KINDS, DAY_S))
    assert find_removable(workspace, KINDS, DAY_S).to_dict()["kinds"] == []
    assert workspace.root.snapshot(NAMED).path.exists()


def die_after(function: Callable[..., Any], calls: list[str], after: int) -> Callable[..., Any]:
    """A function of the system that is called so often at most; then the command is killed before it."""

    def call_or_die(*arguments: Any, **options: Any) -> Any:
        calls.append(str(arguments[0]))
        if len(calls) >= after:
            raise KeyboardInterrupt
        return function(*arguments, **options)

    return call_or_die
