"""The files of a directory without git that are code, by rules about names."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurmtrain.errors import NoSnapshot, PathError
from slurmtrain.system.inherited import expand_home

# In the syntax of .gitignore: what tools, environments and training leave next to code.
RULES = """
.git/
.hg/
.svn/
.*cache*/
.cache/
.eggs/
.ipynb_checkpoints/
.nox/
.tox/
.venv/
__pycache__/
lightning_logs/
mlruns/
node_modules/
venv/
wandb/
*.ckpt
*.egg-info/
*.log
*.pt
*.pth
*.pyc
*.safetensors
""".split()  # noqa: SIM905 (a list of names to read, not of strings)
# Each is in the root of an environment: of venv, and of conda.
MARKS = ("pyvenv.cfg", "conda-meta/history")
_SHARED = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 (nothing is written there)
# A listing that takes longer is of far more than a project, or on a dead file server.
_TIMEOUT_S = 30.0


def why_no_project(directory: Path) -> str:
    """Why a directory is certainly no project's, as the end of a sentence; empty if it may be."""
    # HOME may be anything, or there may be no place for temporary files.
    with contextlib.suppress(PathError, OSError):
        home = expand_home("~").resolve()
        if directory == home:
            return "is your home directory"
        if home.is_relative_to(directory):
            return "holds your home directory"
    with contextlib.suppress(OSError):
        if directory in map(Path, (*_SHARED, tempfile.gettempdir())):
            return "is for temporary files of all users"
    return ""


def list_files(root: Path, ignored: Callable[[str], bool]) -> Iterator[str]:
    """The paths of files below a directory, relative to it, as they are found.

    Args:
        root: The directory.
        ignored: Whether a path, which ends in a slash for a directory, is left out.

    Raises:
        NoSnapshot: It takes too long.
    """
    top, deadline = str(root), time.monotonic() + _TIMEOUT_S
    for folder, directories, files in os.walk(top):
        if time.monotonic() > deadline:
            raise NoSnapshot(
                f"the files of {root} have not been listed within {_TIMEOUT_S:.0f} s; set 'workdir' to the directory "
                "of the code, or set 'code: none'"
            )
        if folder != top and not {"pyvenv.cfg", "conda-meta"}.isdisjoint([*directories, *files]):
            directories.clear()
            continue
        prefix = os.path.relpath(folder, top) + "/" if folder != top else ""
        links = [name for name in directories if os.path.islink(f"{folder}/{name}")]  # noqa: PTH114 (fast)
        directories[:] = sorted(name for name in directories if name not in links and not ignored(f"{prefix}{name}/"))
        yield from (f"{prefix}{name}" for name in sorted((*files, *links)) if not ignored(prefix + name))
