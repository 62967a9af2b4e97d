"""SIGKILL, or an error, at a chosen effect of a process.

An effect is anything that another process could see or that must not be lost: opening a file for writing, a full or
half write, an fsync, a rename, a new or a removed directory entry.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmtrain.system.files import make_directory

_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


# --- effects ----------------------------------------------------------------------------------------------------------


def watch(effect: Callable[[str], None], root: str) -> None:
    """From now on, call ``effect`` with a name right before each effect; what it raises replaces the effect.

    Opened files count only below ``root``. This cannot be undone: for processes that do nothing else.
    """
    busy = [False]

    def report(name: str) -> None:
        if not busy[0]:
            busy[0] = True
            try:
                effect(name)
            finally:
                busy[0] = False

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            # Resolved: a run's directory is opened once, and what is in it by way of its descriptor.
            if isinstance(path, str | os.PathLike) and flags & _WRITING and os.path.realpath(path).startswith(root):
                report(f"open {path}")
        elif event in _CHANGES:
            report(f"{event} {arguments[0]}")

    write, fsync, fdopen, fallocate = os.write, os.fsync, os.fdopen, os.posix_fallocate

    def telling_write(handle: int, data: Any) -> int:
        report("write")
        half = len(data) // 2
        if half:
            write(handle, data[:half])
            report("half a write")
        return half + write(handle, data[half:])

    def telling_fsync(handle: int) -> None:
        report("fsync")
        fsync(handle)

    def telling_fdopen(*arguments: Any, **more: Any) -> Any:
        report("write through a file")
        return fdopen(*arguments, **more)

    def telling_fallocate(*arguments: Any) -> None:
        report("posix_fallocate")
        fallocate(*arguments)

    os.write, os.fsync, os.fdopen, os.posix_fallocate = telling_write, telling_fsync, telling_fdopen, telling_fallocate
    sys.addaudithook(audit)


def kill_at(number: int) -> Callable[[str], None]:
    """Die by SIGKILL right before the ``number``-th effect, counted from 1."""
    count = [0]

    def effect(_name: str) -> None:
        count[0] += 1
        if count[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return effect


# --- writers of checkpoints that fail ---------------------------------------------------------------------------------


def writers_that_fail(
    directory: Path, root: Path, *, effect: str, number: int = 1, action: str = "writer"
) -> dict[str, str]:
    """The environment in which a process that writes checkpoints fails at its ``number``-th effect named ``effect``.

    ``effect``: the beginning of an effect's name; empty for any. ``action``: who gets a SIGKILL, once (``writer``,
    ``rank`` or ``both``), or the name of an errno that every such effect from then on raises, until :func:`heal`.
    """
    make_directory(directory)
    tests = Path(__file__).parents[1]
    (directory / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'slurmtrain.runtime.checkpoint.writer_process' in sys.orig_argv:\n"
        "    import warnings\n"
        "    warnings.filterwarnings('ignore', category=RuntimeWarning, module='runpy')\n"
        f"    sys.path.append({str(tests)!r})\n"
        "    from helpers.killpoints import fail_as_configured\n"
        "    fail_as_configured()\n"
    )
    fault = {
        "effect": effect,
        "number": number,
        "action": action,
        "root": str(root),
        "healed": str(directory / "healed"),
    }
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "FAIL": json.dumps(fault)}


def heal(directory: Path) -> None:
    """Stop all failures."""
    (directory / "healed").touch()


def until_gone(directory: Path) -> None:
    """Wait until no writer of :func:`writers_that_fail` is left: a writer finishes its work if its rank was killed."""
    with (directory / "running").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def fail_as_configured() -> None:
    """Fail as :func:`writers_that_fail` has configured; called before the program itself runs."""
    fault = json.loads(os.environ["FAIL"])
    healed, action, rank = Path(fault["healed"]), fault["action"], os.getppid()
    # The kernel releases it when this process is gone.
    fcntl.flock(os.open(healed.with_name("running"), os.O_RDONLY | os.O_CREAT, 0o600), fcntl.LOCK_SH)
    count = [0]

    def effect(name: str) -> None:
        if not name.startswith(fault["effect"]) or healed.exists():
            return
        count[0] += 1
        if count[0] < fault["number"]:
            return
        if action in ("writer", "rank", "both"):
            healed.touch()
            for process in {"writer": [os.getpid()], "rank": [rank], "both": [rank, os.getpid()]}[action]:
                os.kill(process, signal.SIGKILL)
            return
        number = getattr(errno, action)
        raise OSError(number, os.strerror(number))

    watch(effect, fault["root"])
