"""Writing a run to a directory of W&B's offline mode, and syncing such a directory. The only user of wandb."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.errors import TrackingError

# A server that is down is tried again at the next sync.
_SYNC_S = 300.0
# 'wandb sync' adds the names of this machine and of itself to the run, unless it is told what these are.
_ANONYMOUS = {"WANDB_HOST": "", "WANDB_PROGRAM": ""}


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """A run for W&B.

    ``base``: the last step that the server has of it, which is cut off there; None: it has nothing. ``names``: the
    metrics, by column. ``failed``: whether the run has failed.
    """

    run_id: str
    name: str
    project: str
    entity: str | None
    params: Mapping[str, Any]
    tags: Sequence[str]
    group: str | None
    base: int | None
    names: Sequence[str]
    failed: bool


def write_offline(parent: Path, offline: OfflineRun, rows: Sequence[Sequence[str]]) -> Path:
    """Write a directory for ``wandb sync``, and return it: it is in the folder ``wandb`` of ``parent``.

    Args:
        parent: The directory of that folder.
        offline: The run.
        rows: Its rows after ``base``: step, time and attempt, then the values of metrics.
    """
    _prepare_environment()
    import wandb

    # Nothing of this machine, of its repository or of what commands print.
    settings = wandb.Settings(
        silent=True, console="off", symlink=False, disable_git=True, disable_code=True, save_code=False,
        disable_job_creation=True, x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True,
        x_disable_viewer=True, x_save_requirements=False,
    )  # fmt: skip
    # W&B takes either an id or a step to resume from, which names the run, too.
    resume_from = None if offline.base is None else f"{offline.run_id}?_step={offline.base}"
    run = wandb.init(
        mode="offline", dir=str(parent), project=offline.project, entity=offline.entity, name=offline.name,
        config=dict(offline.params), tags=list(offline.tags), group=offline.group, settings=settings,
        reinit="create_new", id=None if resume_from else offline.run_id, resume_from=resume_from,
    )  # fmt: skip
    try:
        for step, time, _, *values in rows:
            metrics = {name: float(value) for name, value in zip(offline.names, values, strict=False) if value != ""}
            run.log({**metrics, "_timestamp": float(time)}, step=int(step))
    finally:
        run.finish(exit_code=1 if offline.failed else 0)
    directory = Path(run.dir).parent
    # A link to what W&B logs of itself, which goes with this process.
    (directory / "logs" / "debug-core.log").unlink(missing_ok=True)
    return directory


def sync(directory: Path) -> None:
    """Send such a directory to the server. Raises TrackingError."""
    _prepare_environment()
    command = [sys.executable, "-m", "wandb", "sync", "--yes", str(directory)]
    try:
        completed = subprocess.run(
            command, cwd=directory.parent, env=os.environ | _ANONYMOUS, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=_SYNC_S, errors="replace", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise TrackingError(f"'wandb sync {directory}' did not end within {_SYNC_S:g} s") from error
    if completed.returncode != 0:
        lines = (completed.stderr or completed.stdout).strip().splitlines()
        raise TrackingError(
            f"'wandb sync {directory}' failed: {lines[-1] if lines else f'exit {completed.returncode}'}"
        )


def _prepare_environment() -> None:
    """Let W&B report nothing to its makers, and leave nothing but runs: each process of it begins a log of its own."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    if "WANDB_CACHE_DIR" not in os.environ:
        os.environ["WANDB_CACHE_DIR"] = _passing_directory()


@functools.cache
def _passing_directory() -> str:
    """A directory that goes with this process."""
    directory = tempfile.mkdtemp(prefix="slurmtrain-wandb-")
    # Before W&B registers the end of its own process, so that this comes after it.
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory
