"""Two runs that have saved four times, one in training and one ended; and damage to their checkpoints."""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import ATTEMPT, end_run, gone, make_checkpoints, make_run
from slurmtrain.model.run.layout import MANIFEST, RunDir
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.system.journal import Journal

Act = Callable[[], object]
STEPS = (10, 20, 30, 40)
FILES = ("__0_0.distcp", ".metadata", MANIFEST)


def make_saved_runs(place: Path) -> None:
    """Runs roots ``training`` and ``ended``, each with a run that has saved and whose policy keeps two."""
    training = make_run(place / "training", keep=2)
    make_checkpoints(training, STEPS)
    ended = make_run(place / "ended", keep=2, process=gone())
    shutil.rmtree(ended.checkpoints)
    shutil.copytree(training.checkpoints, ended.checkpoints)
    journal = f"attempts/{ATTEMPT}/rank-0.jsonl"
    shutil.copy(training.path / journal, ended.path / journal)
    end_run(ended)


def copy_run(root: Path, workspace: Workspace) -> RunDir:
    """Copy a runs root into an empty workspace; return its only run."""
    shutil.copytree(root, workspace.config.runs)
    [run_id] = workspace.run_ids()
    return workspace.root.run(run_id)


def on_disk(run: RunDir) -> list[str]:
    """The checkpoints and everything next to them, by name."""
    return sorted(path.name for path in run.checkpoints.iterdir())


def checkpoint_states(workspace: Workspace, run: RunDir) -> dict[int | None, tuple[bool, bool]]:
    """(complete, verified) of the checkpoints known to be on disk, by step."""
    return {
        checkpoint.step: (checkpoint.complete, checkpoint.verified)
        for checkpoint in observe_run(workspace, run.id, ask_slurm=False).on_disk
    }


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def act_before(monkeypatch: pytest.MonkeyPatch, name: str, act: Act) -> None:
    """Act right before each call of a function of ``files``; several threads may call it."""
    original, lock = getattr(checkpoint_files, name), threading.Lock()

    def acting(*arguments: Any, **more: Any) -> Any:
        with lock:
            act()
        return original(*arguments, **more)

    monkeypatch.setattr(checkpoint_files, name, acting)


def delete_first(run: RunDir, step: int) -> None:
    """Delete a checkpoint, as if the run had been faster."""
    with contextlib.suppress(FileNotFoundError):
        (run.checkpoints / f"step-{step}").rename(run.checkpoints / f".trash-step-{step}")


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail all journal writes for lack of disk space."""

    def write(self: Journal, kind: str, **data: Any) -> float:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "write", write)
