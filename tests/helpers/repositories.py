"""Repositories of code, and snapshots of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmtrain.model.experiment.code import CodeSnapshot, CodeSpec
from slurmtrain.model.run.layout import RunDir, RunsRoot
from slurmtrain.runtime.code.code_copy import make_tree, read_code_manifest
from slurmtrain.snapshots.selection import CodeSource
from slurmtrain.snapshots.snapshot_store import take

PYTHON = Path("/nowhere/bin/python")


def git(directory: Path, *arguments: str) -> str:
    """What a git command prints in this directory."""
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    command = ["git", *identity, "-C", str(directory), *arguments]
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout


def write(root: Path, path: str, content: str = "x") -> None:
    """Write a file below a directory."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content)


def source(workdir: Path, **code: Any) -> CodeSource:
    """What a snapshot is taken of if a spec says ``code: snapshot``, with these keys."""
    return CodeSource(workdir=workdir, spec=CodeSpec(mode="snapshot", **code))


def snapshot_of(root: Path, workdir: Path | None = None, **code: Any) -> tuple[CodeSnapshot, RunDir]:
    """A snapshot of a directory, and a run that has none yet, in a runs root of its own."""
    runs = RunsRoot(root.parent.parent / "runs")
    runs.path.mkdir(exist_ok=True)
    run = runs.run(f"run{len(os.listdir(runs.path))}")
    run.path.mkdir()
    snapshot, _ = take(runs, source(workdir or root, **code), PYTHON)
    return snapshot, run


def copied(root: Path, workdir: Path | None = None, **code: Any) -> Path:
    """The copy that a new run makes of a snapshot of this directory."""
    snapshot, run = snapshot_of(root, workdir, **code)
    make_tree(run, snapshot)
    return snapshot.tree(run.code)


def paths(snapshot: CodeSnapshot, run: RunDir) -> set[str]:
    """The paths of the files in a snapshot."""
    return {file.path for file in read_code_manifest(run, snapshot.hash).files}


def environment_with_editable(place: Path, packages: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of a shell whose ``python`` has packages installed as editable, and all that its ``python`` had.

    ``place``: where its environment is made. ``packages``: the directory that they are in. ``environ``: of the shell.
    """
    python = shutil.which("python", path=environ["PATH"])
    assert python is not None
    subprocess.run([python, "-m", "venv", "--without-pip", str(place)], check=True)
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    before = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    [installed] = place.glob("lib/python*/site-packages")
    (installed / "_editable_package.pth").write_text(f"{packages}\n")
    # With the .pth files that are there, since slurmtrain itself may be installed as editable.
    (installed / "all.pth").write_text(f"import site; site.addsitedir({before!r})\n")
    return {"PATH": f"{place / 'bin'}{os.pathsep}{environ['PATH']}"}
