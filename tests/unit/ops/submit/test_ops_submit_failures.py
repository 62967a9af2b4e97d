"""Whatever fails while runs are submitted: what is said to exist exists, and nothing else does."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.fakeslurm import SlurmCommands
from helpers.full_disk import small_disk
from helpers.workspaces import make_workspace, submit

from slurmtrain.config import Config
from slurmtrain.errors import LaunchError, PathError, RequestRefused, SlurmtrainError, SubmitFailed, SubmitInterrupted
from slurmtrain.model.run.events.command_events import Submitted
from slurmtrain.ops.shared import start as start_module
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import creation, submission
from slurmtrain.registry.store import Store
from slurmtrain.runtime.job import lease
from slurmtrain.system.files import DiskSpace
from slurmtrain.system.journal import Journal

pytestmark = pytest.mark.usefixtures("slurm")

# Each run requests something else, and so is a job of its own.
SWEEP = ["resources.cpus_per_proc=1,2,3"]
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def run_folders(workspace: Workspace) -> list[str]:
    """Names of what could be a run, complete or not; snapshots of code are for any later run."""
    root = workspace.root.path
    names = {path.name for path in root.iterdir() if path.is_dir()} if root.exists() else set()
    return sorted(names - {workspace.root.snapshots.name})


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Lets something happen instead of the start of the second run."""

    def install(event: Callable[[], Any]) -> None:
        calls = []

        def start(*arguments: Any, **more: Any) -> Any:
            calls.append(1)
            return event() if len(calls) == 2 else start_module.start(*arguments, **more)

        monkeypatch.setattr(submission, "start", start)

    return install


def fail(error: BaseException) -> Callable[[], Any]:
    def event() -> None:
        raise error

    return event


# --- jobs that cannot be submitted ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "exist"),
    [
        (RequestRefused("too big"), "too big; submitted: {0}; not created: 2 run(s)", 1),
        (LaunchError("no answer"), "no answer; submitted: {0}; not created: 2 run(s)", 1),
        (PathError("no space"), "no space; submitted: {0}; not created: 2 run(s)", 1),
        (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug; submitted: ", 2),
    ],
)
def test_a_sweep_that_fails_in_the_middle_names_the_runs_that_exist_and_leaves_no_other(
    workspace: Workspace,
    slurm: SlurmCommands,
    spec: Path,
    second: Callable[[Callable[[], Any]], None],
    error: Exception,
    message: str,
    exist: int,
) -> None:
    second(fail(error))
    with pytest.raises(SubmitFailed) as raised:
        submit(workspace, spec, sweep=SWEEP, executor="slurm")
    folders = run_folders(workspace)
    assert (raised.value.exit_code, sorted(raised.value.run_ids), len(folders)) == (1, folders, exist)
    assert str(raised.value).startswith(message.format(*folders))
    assert len(slurm.calls("sbatch")) == 1


def test_a_job_that_slurm_refuses_leaves_nothing_and_says_so(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Invalid account")
    with pytest.raises(RequestRefused, match=r"nothing was created$") as raised:
        submit(workspace, spec, sweep=SWEEP, executor="slurm")
    assert raised.value.exit_code == 2
    assert run_folders(workspace) == []


@pytest.mark.parametrize(
    ("sweep", "count", "more"), [(SWEEP, 1, ""), (["+params.i=range(13)"], 13, " and 3 more")], ids=["job", "array"]
)
def test_what_may_exist_is_named_with_the_next_step_and_stays(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, sweep: list[str], count: int, more: str
) -> None:
    slurm.replies("sbatch", code=-signal.SIGKILL)
    with pytest.raises(SubmitFailed, match="'slurmtrain sync' finds out") as raised:
        submit(workspace, spec, sweep=sweep, executor="slurm")
    assert raised.value.exit_code == 1
    run_ids = raised.value.run_ids
    assert sorted(run_ids) == [name for name in run_folders(workspace) if name != "arrays"]
    assert len(run_ids) == count
    assert f"perhaps submitted: {', '.join(run_ids[:10])}{more} (" in str(raised.value)


# --- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_finishes_the_run_that_it_is_at_and_creates_no_other(
    workspace: Workspace, spec: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    submit_job = start_module._Group.submit

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(number)
        return submit_job(*arguments)

    monkeypatch.setattr(start_module._Group, "submit", interrupted)
    with pytest.raises(SubmitInterrupted) as raised:
        submit(workspace, spec, sweep=SWEEP, executor="slurm")
    [run_id] = run_folders(workspace)
    assert str(raised.value) == f"interrupted; submitted: {run_id}; not created: 2 run(s)"
    assert (raised.value.exit_code, raised.value.run_ids) == (130, (run_id,))
    [journal] = workspace.root.run(run_id).journals.glob("submit-*.jsonl")
    assert '"kind":"submitted"' in journal.read_text()


def test_a_second_interruption_ends_the_command_at_once_and_names_the_run_that_may_have_a_job(
    workspace: Workspace, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(start_module._Group, "submit", interrupted)
    with pytest.raises(SubmitInterrupted, match="perhaps submitted: ") as raised:
        submit(workspace, spec, executor="slurm")
    assert raised.value.run_ids == tuple(run_folders(workspace))
    assert len(run_folders(workspace)) == 1


def test_an_interruption_before_the_first_job_leaves_nothing(
    workspace: Workspace, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = creation.create

    def interrupted(*arguments: Any, **more: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return create(*arguments, **more)

    monkeypatch.setattr(submission, "create", interrupted)
    with pytest.raises(SubmitInterrupted, match=r"^interrupted; nothing was submitted$"):
        submit(workspace, spec, sweep=SWEEP, executor="slurm")
    assert run_folders(workspace) == []


# --- disks ------------------------------------------------------------------------------------------------------------


def test_a_job_that_cannot_be_journaled_is_a_success_with_a_warning(
    workspace: Workspace, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Journal.write

    def fill_up(journal: Journal, event: Any) -> float:
        if isinstance(event, Submitted):
            raise FULL
        return write(journal, event)

    monkeypatch.setattr(Journal, "write", fill_up)
    [run_id], notes, _ = submit(workspace, spec, executor="slurm")
    [note] = [note for note in notes if "no space left" in note]
    assert f"run {run_id} was submitted as job 8" in note
    assert run_folders(workspace) == [run_id]


@pytest.mark.parametrize("place", [(lease, "grant"), (start_module, "write_new"), (creation, "write_new")])
def test_a_disk_that_is_full_before_there_is_a_job_leaves_nothing(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]
) -> None:
    monkeypatch.setattr(*place, lambda *_: (_ for _ in ()).throw(FULL))
    with pytest.raises(PathError, match=r"no space left on the device; nothing was created$") as raised:
        submit(workspace, spec, sweep=SWEEP, executor="slurm")
    assert raised.value.exit_code == 2
    assert run_folders(workspace) == []
    assert slurm.calls("sbatch") == []


@pytest.mark.parametrize("left_kib", [0, 4, 64])
def test_too_little_room_is_noticed_before_anything_is_created(spec: Path, tmp_path: Path, left_kib: int) -> None:
    with small_disk(tmp_path / "disk") as disk:
        workspace = make_workspace(disk.path / "runs")
        workspace.prepare()
        disk.leave(left_kib * 1024)
        with pytest.raises(
            PathError, match=rf"too little room: only {left_kib} KiB are left .*; nothing was created; free"
        ):
            submit(workspace, spec, executor="slurm")
        assert run_folders(workspace) == []
        assert not workspace.config.registry.exists()


def test_too_few_inodes_are_noticed_before_anything_is_created(spec: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", inodes=40) as disk:
        workspace = make_workspace(disk.path / "runs")
        with pytest.raises(PathError, match="inodes are left of the 128 that 1 new run"):
            submit(workspace, spec, executor="slurm")
        assert run_folders(workspace) == []


def test_at_every_fullness_of_the_disk_what_is_said_to_exist_exists(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the disk filled up right after the check of its room."""
    for name in ("_FIRST", "_EACH", "_REGISTRY"):
        monkeypatch.setattr(creation, name, DiskSpace(0, 0))
    outcomes = set()
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    with small_disk(tmp_path / "disk") as disk:
        for left in (0, 12, 24, 48, 64, 96, 112, 136, 200):
            workspace = make_workspace(disk.path / f"runs{left}")
            disk.free()
            workspace.prepare()
            disk.leave(left * 1024)
            try:
                exist, code = submit(workspace, spec, sweep=SWEEP[:1], executor="slurm").run_ids, 0
            except SlurmtrainError as error:
                exist, code = list(getattr(error, "run_ids", ())), error.exit_code
            assert run_folders(workspace) == sorted(exist), left
            assert (code == 2) == (not exist), left
            assert (code == 0) <= (len(exist) == 3), left
            outcomes.add(code)
    assert outcomes == {0, 1, 2}


def test_a_registry_without_room_elsewhere_is_warned_about_and_not_used(spec: Path, tmp_path: Path) -> None:
    warnings: list[str] = []
    with small_disk(tmp_path / "disk") as disk:
        registry = disk.path / "registry.db"
        Store(registry).close()
        disk.leave(4096)
        config = Config(runs=tmp_path / "runs", executor=None, registry=registry, mlflow_uri=None)
        workspace = Workspace(config, warn=warnings.append)
        [run_id], *_ = submit(workspace, spec, executor="slurm")
    [warning] = warnings
    assert f"the registry {registry} has too little room: only 4 KiB are left of the 1024 KiB" in warning
    assert run_folders(workspace) == [run_id]
