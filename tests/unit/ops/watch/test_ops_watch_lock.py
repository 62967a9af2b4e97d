"""One watch for a runs root: who holds it, and when a holder is taken to be gone."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.ops.watch import lock as module
from slurmtrain.ops.watch.lock import WatchLock, watch_lock
from slurmtrain.system.process import this_process


@pytest.fixture
def lock_file(tmp_path: Path) -> Path:
    return tmp_path / ".watch.lock"


def holder_elsewhere(lock_file: Path, *, silent_s: float, host: str = "other-login", **more: Any) -> None:
    """What one on another machine has left in the file."""
    WatchLock(None, os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o600)).record_holder(60)
    text = lock_file.read_text().replace(f'"{socket.gethostname()}"', f'"{host}"')
    for name, value in more.items():
        text = text.replace(f'"{name}": {getattr(this_process(), name)}', f'"{name}": {value}')
    lock_file.write_text(text)
    os.utime(lock_file, (time.time() - silent_s,) * 2)


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_second_watch_learns_who_holds_the_lock_and_another_may_take_it_afterwards(lock_file: Path) -> None:
    with watch_lock(lock_file, 60) as first:
        assert first.other is None
        assert lock_file.stat().st_mode & 0o777 == 0o600
        with watch_lock(lock_file, 60) as second:
            assert second.other.process == this_process()
            assert str(second.other).startswith(f"process {os.getpid()} on {socket.gethostname()}, since 2")
        # It may not have written its name yet.
        lock_file.write_bytes(b"")
        with watch_lock(lock_file, 60) as second:
            assert str(second.other) == "another process"
    with watch_lock(lock_file, 60) as third:
        assert third.other is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}', '{"host": "a", "boot": "b", "pid": "x", "start": 1}'])
def test_a_lock_file_with_nothing_of_use_keeps_no_watch_away(lock_file: Path, text: str) -> None:
    lock_file.write_text(text)
    with watch_lock(lock_file, 60) as lock:
        assert lock.other is None


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize(("silent_s", "lives"), [(100, True), (-100, True), (200, False), (-1e6, False)])
def test_one_on_another_machine_lives_as_long_as_it_touches_the_file(
    lock_file: Path, monkeypatch: pytest.MonkeyPatch, silent_s: float, lives: bool, locks: bool
) -> None:
    holder_elsewhere(lock_file, silent_s=silent_s)
    if not locks:
        without_locks(monkeypatch)
    with watch_lock(lock_file, 60) as lock:
        assert (lock.other is not None) == lives


def test_a_watch_killed_on_this_machine_keeps_no_other_away(lock_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder_elsewhere(lock_file, silent_s=0, host=socket.gethostname(), start=1)
    with watch_lock(lock_file, 60) as lock:
        assert lock.other is None
    holder_elsewhere(lock_file, silent_s=0, host=socket.gethostname(), start=1)
    without_locks(monkeypatch)
    with watch_lock(lock_file, 60) as lock:
        assert lock.other is None


def test_without_locks_one_that_runs_on_this_machine_keeps_others_away(
    lock_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch)
    holder_elsewhere(lock_file, silent_s=1e6, host=socket.gethostname())
    monkeypatch.setattr(module, "this_process", lambda: replace(this_process(), pid=os.getppid()))
    with watch_lock(lock_file, 60) as lock:
        assert lock.other is not None
