"""Other accounts of this machine, for tests of what they can do to each other.

Commands run with the real user and group ids of an account, and so with the kernel's own checks. The accounts need no
entry in /etc/passwd.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import slurmtrain
from helpers.preloaded import Preloaded, preloaded

# Numbers that machines do not give to accounts of people.
ALICE, BOB, CAROL = 61_001, 61_002, 61_003
# The group that all of them are in. The number of an account's own group is that of the account.
TEAM = 61_100

needs_accounts = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other accounts")

# What the interpreter needs may lie in a home directory that others cannot enter, such as root's: in a mount namespace
# of the command's own, it is replaced by an empty directory that has nothing else. $1: that home; $2: what is needed.
_REVEAL = """set -e
umask=$(umask); umask 022
keep=$(mktemp -d); mount --bind "$2" "$keep"; mount -t tmpfs -o mode=755 none "$1"; mkdir -p "$2"
mount --move "$keep" "$2"; rmdir "$keep"; umask "$umask"; shift 2; exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Person:
    """An account with a home directory."""

    uid: int
    home: Path

    def run(
        self, *command: str | Path, cwd: Path, umask: int = 0o022, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as this person, who is in their own group and the team's; ``env``: more variables."""
        become = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", f"--groups={TEAM}", "--"]
        return subprocess.run(
            [*_reveal(Path(sys.base_prefix)), *become, *map(str, command)],
            cwd=cwd,
            umask=umask,
            env={**self._environment(), **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def slurmtrain(
        self, *arguments: str | Path, cwd: Path, umask: int = 0o022, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of slurmtrain as this person."""
        called = _commands().call(
            *map(str, arguments),
            cwd=cwd,
            env={**self._environment(), **(env or {})},
            umask=umask,
            account=(self.uid, self.uid, TEAM),
        )
        return subprocess.CompletedProcess(arguments, called.code, called.stdout, called.stderr)

    def _environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
            "PYTHONPATH": str(Path(slurmtrain.__file__).parents[1]),
            "COLUMNS": "200",
        }

    def take(self, path: Path, mode: int | None = None, *, gid: int | None = None) -> Path:
        """Make this person the owner of a file or of a directory with all that is in it; ``gid``: its group."""
        for place in (path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())):
            os.chown(place, self.uid, self.uid if gid is None else gid, follow_symlinks=False)
        if mode is not None:
            path.chmod(mode)
        return path

    def make_directory(self, path: Path, mode: int = 0o700, *, gid: int | None = None) -> Path:
        """A new directory of this person's."""
        path.mkdir()
        return self.take(path, mode, gid=gid)


@contextmanager
def people(*uids: int) -> Iterator[tuple[Path, list[Person]]]:
    """A directory that everybody can enter, unlike pytest's, and in it a home for each of these accounts."""
    if problem := _why_not():
        pytest.skip(problem)
    ground = Path(tempfile.mkdtemp(prefix="accounts-"))
    try:
        ground.chmod(0o755)
        homes = [Person(uid, ground / f"home-{uid}") for uid in uids]
        for person in homes:
            person.make_directory(person.home)
        yield ground, homes
    finally:
        shutil.rmtree(ground, ignore_errors=True)


def give(path: Path, uid: int, mode: int | None = None) -> Path:
    """Give a file, a link or a directory to an account and its group."""
    os.chown(path, uid, uid, follow_symlinks=False)
    if mode is not None:
        path.chmod(mode)
    return path


@cache
def _commands() -> Preloaded:
    """What forks commands of slurmtrain, each of which takes the identity of an account."""
    return preloaded(prefix=_reveal(Path(sys.base_prefix)))


@cache
def _why_not() -> str:
    """Why commands cannot run as other accounts on this machine; empty if they can."""
    if shutil.which("setpriv") is None:
        return "setpriv is not installed"
    become = ["setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--clear-groups", "--"]
    command = [*_reveal(Path(sys.base_prefix)), *become, sys.executable, "-c", "pass"]
    completed = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    return "" if completed.returncode == 0 else f"other accounts cannot run this interpreter: {completed.stderr}"


def _reveal(needed: Path) -> list[str]:
    """A prefix for commands to which everything in a directory must be visible; empty if it is."""
    closed = [place for place in needed.resolve().parents if not place.stat().st_mode & 0o001]
    return ["unshare", "--mount", "sh", "-c", _REVEAL, "sh", str(closed[-1]), str(needed.resolve())] if closed else []


def status_for_another(address: str) -> str | None:
    """The status of HTTP that another account of this machine gets; None where no test can act as one."""
    if os.geteuid() != 0:
        return None
    code = (
        "import sys, urllib.error, urllib.request\n"
        "try: print(urllib.request.urlopen(sys.argv[1]).status)\n"
        "except urllib.error.HTTPError as error: print(error.code)"
    )
    with people(BOB) as (ground, [bob]):
        return bob.run(sys.executable, "-c", code, address, cwd=ground).stdout.strip()
