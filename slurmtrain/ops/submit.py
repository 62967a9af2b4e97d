"""Submitting: run directories first, whole or not at all, then the jobs."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from slurmtrain.errors import LaunchError, PathError, RequestRefused, RunCancelled, SubmissionUncertain
from slurmtrain.model.preflight.obsolete_variables import describe_obsolete
from slurmtrain.model.run.events.command import RunCreated
from slurmtrain.model.run.ids import run_id
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.spec.plan import Plan
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.start import NewAttempt, check_executor, secret_values, start
from slurmtrain.ops.shared.workspace import Workspace, person
from slurmtrain.specfile import PlannedRun, SpecFile, load_spec
from slurmtrain.system.files import (
    DIRECTORY_MODE,
    describe_os_error,
    fsync_directory,
    make_directory,
    write_atomically,
    write_json,
)
from slurmtrain.system.journal import Journal
from slurmtrain.system.locks import locked
from slurmtrain.system.process import Process

_TEMPORARY = "/tmp"  # noqa: S108 (nothing is written there)
# The revision is useful but not required: git on a slow file system is not worth a longer wait.
_GIT_TIMEOUT_S = 10.0
# File systems in memory: local to one machine.
_OWN_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


def load(path: Path, overrides: Sequence[str], sweep: Sequence[str]) -> SpecFile:
    """Read a spec, using this working directory and the ``python`` on this PATH.

    Args:
        path: the spec's file.
        overrides: ``KEY=VALUE`` for all runs.
        sweep: ``KEY=VALUE,VALUE``: a run for each value.

    Raises:
        SpecError: the spec is invalid.
        PathError: it cannot be read.
    """
    return load_spec(path, overrides, sweep, cwd=Path.cwd(), python=which_python())


def which_python() -> str:
    """The interpreter that ``python`` refers to: the one on PATH, else the one that runs this."""
    return shutil.which("python") or sys.executable


def submit(
    workspace: Workspace, path: Path, overrides: Sequence[str] = (), sweep: Sequence[str] = (), *, executor: str
) -> tuple[list[str], list[str]]:
    """Read a spec and submit all of its runs. On this machine the runs of a sweep start one after the other.

    Args:
        workspace: where the runs go.
        path: the spec's file.
        overrides: ``KEY=VALUE`` for all runs.
        sweep: ``KEY=VALUE,VALUE``: a run for each value.
        executor: ``slurm`` or ``local``.

    Returns:
        The runs' ids, and notes for the user.

    Raises:
        UserError: something is wrong with the input; nothing was created.
        LaunchError, RequestRefused: a job could not be submitted; runs of a sweep that were submitted before it stay.
    """
    return submit_spec(workspace, load(path, overrides, sweep), executor=executor)


def submit_spec(workspace: Workspace, spec: SpecFile, *, executor: str) -> tuple[list[str], list[str]]:
    """Submit all runs of ``spec``, which has been read, to ``workspace`` with ``executor``, as :func:`submit` does."""
    for planned in spec.runs:
        _check_workdir(planned.plan)
        secret_values(planned.plan, planned.secrets)
    check_executor(workspace, executor, [planned.plan for planned in spec.runs])
    workspace.prepare()
    if executor == "slurm":
        # Updates the node ledger: what the journals of other runs say about nodes by now.
        observe(workspace, ask_slurm=False)
    git = _git_facts(Path(spec.runs[0].plan.workdir))
    submitted: list[str] = []
    notes = _notes(workspace, spec.runs[0].plan, executor)
    after: tuple[str, Process] | None = None
    with ExitStack() as locks:
        # All directories first, so that a sweep is created as a whole or not at all if the disk is full.
        runs = [(*_create(workspace, spec, planned, executor, git, locks), planned) for planned in spec.runs]
        for run, lock, planned in runs:
            adopted = _adopted_checkpoint(run, planned.plan)
            secret_env = secret_values(planned.plan, planned.secrets)
            attempt = NewAttempt(plan=planned.plan, executor=executor, number=1, secrets=secret_env, after=after)
            try:
                started = start(workspace, run, lock, attempt, command="submit")
            except RunCancelled as error:
                # The run is there, as the user wants it; the others of its sweep were not cancelled.
                submitted.append(run.id)
                notes.append(str(error))
                continue
            except (LaunchError, RequestRefused) as error:
                left = [other for other, _, _ in runs[len(submitted) :]]
                # If the run's job may exist, its directory must stay: 'sync' adopts the job.
                _take_back(
                    workspace, [other for other in left if other != run or not isinstance(error, SubmissionUncertain)]
                )
                raise _with_submitted(error, submitted) from error
            after = (run.id, started.process) if started.process else None
            notes += [note for note in (*started.notes, *adopted) if note not in notes]
            submitted.append(run.id)
    return submitted, notes


def _notes(workspace: Workspace, plan: Plan, executor: str) -> list[str]:
    """Notes on what may go wrong with runs of this plan, before any is created."""
    variables = {**os.environ, **plan.spec.env}
    return [
        *plan.launcher_notes(),
        *_other_python(plan),
        *(_not_shared(workspace.root.path) if executor == "slurm" else []),
        *(note.rstrip(".") for note in describe_obsolete(variables)),
    ]


def _take_back(workspace: Workspace, runs: Sequence[RunDir]) -> None:
    """Remove runs that were created but have no job. If this is killed halfway, ``sync`` removes the rest."""
    for run in runs:
        unborn = workspace.root.unborn(run.id)
        run.path.rename(unborn.path)
        shutil.rmtree(unborn.path, ignore_errors=True)


def _with_submitted(error: LaunchError | RequestRefused, submitted: Sequence[str]) -> LaunchError | RequestRefused:
    if not submitted:
        return error
    return type(error)(f"{error}; before that, {len(submitted)} of the runs were submitted: {', '.join(submitted)}")


def _other_python(plan: Plan) -> list[str]:
    """A note if ``python`` in the command, the one on PATH, is not the one that slurmtrain was installed for."""
    if plan.spec.command.split()[0] != "python" or Path(plan.python).parent == Path(sys.executable).parent:
        return []
    return [
        f"'python' in the command is {plan.python}, the first on PATH; slurmtrain itself runs on {sys.executable}: "
        "activate that environment if the script needs what is installed there"
    ]


def _not_shared(root: Path) -> list[str]:
    """A note if compute nodes cannot see the runs root: each machine has its own memory file systems and /tmp."""
    import psutil

    mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    place = next((str(place) for place in (root, *root.parents) if str(place) in mounts), "/")
    if root.is_relative_to(_TEMPORARY):
        place = _TEMPORARY
    elif mounts.get(place) not in _OWN_FILESYSTEMS:
        return []
    return [
        f"the runs root {root} is on this machine's own {place}, which compute nodes usually do not see; choose a "
        "shared directory with --runs or SLURMTRAIN_RUNS"
    ]


def _adopted_checkpoint(run: RunDir, plan: Plan) -> list[str]:
    """A note if a new run's checkpoint pattern already matches a checkpoint, maybe written by another run."""
    if plan.spec.checkpoint.glob is None:
        return []
    from slurmtrain.model.spec.checkpoint_formats import OWN
    from slurmtrain.runtime.checkpoint.external import Search, newest

    checkpoint = newest(Search.from_plan(plan, run))
    if checkpoint is None:
        return []
    handed = "may be found by" if plan.spec.checkpoint.format == OWN else "is handed to"
    return [
        f"{checkpoint.path} matches checkpoint.glob and {handed} this new run; "
        "begin the pattern with {checkpoint_dir} to keep runs apart"
    ]


def _check_workdir(plan: Plan) -> None:
    if not Path(plan.workdir).is_dir():
        raise PathError(f"the working directory {plan.workdir} does not exist; create it, or set 'workdir'")


def _create(
    workspace: Workspace,
    spec: SpecFile,
    planned: PlannedRun,
    executor: str,
    git: dict[str, Any] | None,
    locks: ExitStack,
) -> tuple[RunDir, int]:
    """Build a run directory under a temporary name and rename it into place, its lock held before it is visible."""
    # Two submissions in one millisecond may draw the same id: the one whose mkdir() fails draws again.
    while True:
        name = run_id(time.time_ns() // 1_000_000, secrets.randbits(10))
        unborn, run = workspace.root.unborn(name), workspace.root.run(name)
        if run.path.exists():
            continue
        try:
            unborn.path.mkdir(mode=DIRECTORY_MODE)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(workspace, error) from error
        try:
            # The lock belongs to the file, which the rename keeps: no command can see the run unlocked before it has a
            # job.
            lock = locks.enter_context(locked(unborn.lock))
            assert lock is not None
            make_directory(unborn.journals)
            make_directory(unborn.attempts)
            make_directory(unborn.submissions)
            make_directory(unborn.checkpoints)
            write_atomically(unborn.spec, _spec_text(spec, planned).encode())
            write_json(unborn.plan, planned.plan.to_json())
            with Journal(unborn.journals / "created.jsonl") as journal:
                journal.write(
                    RunCreated(
                        name=planned.plan.spec.name,
                        plan_hash=planned.plan.hash,
                        executor=executor,
                        by=person(),
                        git=git,
                        overrides=planned.overrides,
                    )
                )
            unborn.path.rename(run.path)
            fsync_directory(workspace.root.path)
        except OSError as error:
            shutil.rmtree(unborn.path, ignore_errors=True)
            raise _unwritable(workspace, error) from error
        return run, lock


def _unwritable(workspace: Workspace, error: OSError) -> PathError:
    return PathError(f"cannot write to the runs root {workspace.root.path}: {describe_os_error(error)}")


def _spec_text(spec: SpecFile, planned: PlannedRun) -> str:
    comments = "".join(f"# override: {override}\n" for override in planned.overrides)
    return spec.text if not comments else spec.text.rstrip("\n") + "\n" + comments


def _git_facts(directory: Path) -> dict[str, Any] | None:
    """The revision of the code that runs, if it is in git."""

    def ask(*arguments: str) -> str | None:
        try:
            completed = subprocess.run(
                ["git", "-C", str(directory), *arguments],
                capture_output=True,
                text=True,
                timeout=_GIT_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return completed.stdout.strip() if completed.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
