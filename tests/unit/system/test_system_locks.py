"""Locks that die with their holder, say whom they wait for, and also work where the file system has none."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import without_locks

from slurmtrain.errors import LockHeld, PathError
from slurmtrain.system import locks
from slurmtrain.system.locks import Mount, locked, this_holder

HOLD = """
import sys
from pathlib import Path
from slurmtrain.system.locks import locked
with locked(Path(sys.argv[-1])):
    print("held", flush=True)
    sys.stdin.read()
"""
# As a command that submits: a child inherits the lock, and outlives it.
BEQUEATH = """
import os, sys
from pathlib import Path
from slurmtrain.system.locks import locked
with locked(Path(sys.argv[-1])):
    if os.fork():
        print("held", flush=True)
    sys.stdin.read()
"""
INTERRUPTIBLE = """
import sys
from pathlib import Path
from slurmtrain.system.locks import locked
try:
    with locked(Path(sys.argv[-1])):
        pass
except KeyboardInterrupt:
    sys.exit(130)
"""
REFUSALS = ["ENOLCK", "ENOSYS", "EOPNOTSUPP"]


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / ".lock"


@pytest.fixture(params=["locks", "links"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file system with locks, and one without."""
    if request.param == "links":
        refuse(monkeypatch)
    return str(request.param)


def refuse(monkeypatch: pytest.MonkeyPatch, error: int = errno.ENOLCK) -> None:
    def flock(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)


@contextlib.contextmanager
def holding(lock: Path, *prefix: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock. ``prefix``: what its interpreter is started with."""
    command = [*prefix, sys.executable, "-c", HOLD, "resume", str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


def is_free(lock: Path) -> bool:
    with locked(lock, wait=False) as handle:
        return handle is not None


def refused(lock: Path, words: str, limit_s: float = 0.0) -> str:
    """Wait for a lock in vain. ``words``: of the error. Returns who holds it."""
    with pytest.raises(LockHeld, match=words) as raised, locked(lock, limit_s=limit_s):
        pass
    return raised.value.holder


# --- holding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, *REFUSALS])
def test_a_lock_is_held_against_another_process_and_free_when_that_is_killed(lock: Path, error: str | None) -> None:
    if error is not None and not without_locks.is_supported():
        pytest.skip("system calls cannot be made to fail on this machine")
    # The kernel refuses the holder, this process sees locks that nobody has: in this order also a mixture is safe.
    prefix = () if error is None else (sys.executable, without_locks.__file__, error)
    script = f"""
import sys; from pathlib import Path; from slurmtrain.system.locks import locked
with locked(Path({str(lock)!r}), wait=False) as handle: sys.exit(0 if handle is not None else 3)
"""
    with holding(lock, *prefix) as holder:
        contender = [*prefix, sys.executable, "-c", script]
        assert subprocess.run(contender, check=False).returncode == 3
        holder.kill()
        holder.wait()
        assert subprocess.run(contender, check=False).returncode == 0
    assert {stat.S_IMODE(path.stat().st_mode) for path in lock.parent.iterdir()} == {0o600}
    assert [path.name for path in lock.parent.iterdir()] == [".lock"]


@pytest.mark.usefixtures("either")
def test_a_lock_is_free_again_after_its_block_even_where_that_failed(lock: Path) -> None:
    with pytest.raises(RuntimeError), locked(lock):
        raise RuntimeError
    with locked(lock, wait=False) as handle:
        assert handle is not None
        assert not is_free(lock)
    assert is_free(lock)


@pytest.mark.usefixtures("either")
def test_of_many_at_once_only_one_holds_a_lock(lock: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def take() -> None:
        with locked(lock):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.001)
            inside.pop()

    threads = [threading.Thread(target=take) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 12


@pytest.mark.usefixtures("either")
def test_a_lock_stays_held_and_is_released_although_its_directory_was_renamed(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    with locked(before / ".lock"):
        before.rename(after)
        assert not is_free(after / ".lock")
    assert is_free(after / ".lock")


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(PathError, match=r"cannot open the lock .*\.lock: no such file"), locked(tmp_path / "no/.lock"):
        pass


# --- waiting ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits says so at once."""
    monkeypatch.setattr(locks, "NOTICE_S", 0.0)


@pytest.mark.usefixtures("either", "impatient")
def test_who_waits_says_once_whom_it_waits_for_and_gives_up_after_a_while(
    lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user, host = os.environ.get("USER") or os.getuid(), os.uname().nodename
    with locked(lock):
        holder = refused(lock, r"/\.lock is still held by .* after 0 s: wait for that process, or end it", limit_s=0.2)
    notices = [line for line in capsys.readouterr().err.splitlines() if line.startswith("waiting")]
    expected = rf"held by '.+' of {user}@{host}, process {os.getpid()}, since \d{{4}}-\S+Z"
    assert len(notices) == 1
    assert re.fullmatch(f"waiting for the lock {re.escape(str(lock))}, {expected}", notices[0]), notices
    assert re.fullmatch(expected, holder)


@pytest.mark.usefixtures("impatient")
def test_a_holder_that_is_stopped_is_called_so(lock: Path) -> None:
    with holding(lock) as holder:
        holder.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        with (
            pytest.raises(
                LockHeld, match=rf"held by '-c resume' of .*, process {holder.pid}, which is stopped, since "
            ),
            locked(lock, limit_s=0.0),
        ):
            pass


@pytest.mark.usefixtures("impatient")
def test_a_process_that_has_inherited_the_lock_is_named_once_its_parent_is_dead(lock: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BEQUEATH, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"held\n"
        parent.kill()
        parent.wait()
        left = refused(lock, r"held by process \d+ \(.*python.*\), left by '-c ")
        assert f"process {parent.pid}" not in left
        assert parent.stdin is not None
        parent.stdin.close()
    deadline = time.monotonic() + 60
    while not is_free(lock):
        assert time.monotonic() < deadline


@pytest.mark.usefixtures("impatient")
def test_ctrl_c_ends_the_wait(lock: Path) -> None:
    with holding(lock):
        command = [sys.executable, "-c", INTERRUPTIBLE, str(lock)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiter:
            assert waiter.stderr is not None
            # It says after two seconds that it waits: from then on at the latest it does.
            assert waiter.stderr.readline().startswith("waiting for the lock")
            waiter.send_signal(signal.SIGINT)
            assert waiter.wait(60) == 130


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b'{"host": 1}', b"[" * 4000])
def test_a_lock_file_with_anything_in_it_is_as_good_as_an_empty_one(lock: Path, text: bytes) -> None:
    lock.write_bytes(text)
    with locked(lock):
        lock.write_bytes(text)
        refused(lock, "held by another process, which cannot be seen from here")


def test_the_record_has_the_command_without_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/slurmtrain/__main__.py", "--runs", "there", "submit", "env.TOKEN=secret"])
    assert this_holder().command == "slurmtrain submit"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/slurmtrain", "--version"])
    assert this_holder().command == "slurmtrain"
    # No control characters reach a terminal.
    record = {**this_holder().to_dict(), "command": "\x1b[31mred", "user": "a\nb", "host": "h\x07"}
    holder = locks.read_record(json.dumps(record).encode())
    assert str(holder).startswith("'[31mred' of ab@h, process ")


# --- a file system without locks --------------------------------------------------------------------------------------


def held_by(lock: Path, **more: Any) -> Path:
    """A lock that a process has left, by default one of this machine that is dead."""
    holder = this_holder()
    dead = replace(holder, process=replace(holder.process, start=1))
    left = lock.with_name(".lock.held")
    left.write_text(json.dumps({**dead.to_dict(), **more}))
    return left


def test_a_lock_without_locks_is_announced_once(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    locks._note_links.cache_clear()
    refuse(monkeypatch)
    for _ in range(2):
        assert is_free(lock)
    [line] = capsys.readouterr().err.splitlines()
    assert re.match(r"note: .* has no locks that reach all machines: slurmtrain uses hard links", line)


@pytest.mark.parametrize("boot", [{}, {"start": this_holder().process.start, "boot": "earlier"}], ids=["this", "other"])
def test_the_lock_of_a_dead_process_of_this_machine_is_taken_over(
    lock: Path, monkeypatch: pytest.MonkeyPatch, boot: dict[str, Any]
) -> None:
    refuse(monkeypatch)
    held_by(lock, **boot)
    with locked(lock, wait=False) as handle:
        assert handle is not None
        assert not is_free(lock)
    assert [path.name for path in lock.parent.iterdir()] == [".lock"]


def test_a_lock_of_another_machine_stays_and_the_error_says_what_to_delete(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch)
    left = held_by(lock, host="other-login")
    for _ in range(2):
        refused(lock, rf"@other-login, .*; if that process no longer exists, delete {left}")
    left.unlink()
    assert is_free(lock)


def test_of_two_that_find_the_same_dead_holder_one_takes_over(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    dead = held_by(lock).read_bytes()
    read = locks._read_at
    winners: list[bool] = []

    def slow(folder: int, name: str) -> bytes | None:
        content = read(folder, name)
        if content == dead and not winners:
            # Between reading the record of the dead holder and acting on it, another process takes over.
            winners.append(True)
            stack.enter_context(locked(lock, wait=False))
        return content

    monkeypatch.setattr(locks, "_read_at", slow)
    with contextlib.ExitStack() as stack:
        assert not is_free(lock)
        assert winners == [True]
        assert not is_free(lock)
    assert is_free(lock)


def test_a_takeover_that_was_killed_halfway_is_taken_over_too(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    held_by(lock)

    def die(*_: Any, **__: Any) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", die)
        patch.setattr(os, "unlink", lambda *_, **__: None)
        with pytest.raises(SystemExit), locked(lock):
            pass
    # The guard names this process, which lives: it must be dead for another to go on.
    for guard in lock.parent.glob(".lock.held.????????"):
        record = json.loads(guard.read_bytes())
        guard.write_text(json.dumps({**record, "start": 1}))
    assert is_free(lock)


# Takes a lock without the kernel's help, and is killed right before its nth effect.
KILLED_AT = """
import errno, sys
from pathlib import Path
from helpers.killpoints import kill_at, watch
from helpers.without_locks import refuse_locks
from slurmtrain.system.locks import locked
refuse_locks(errno.ENOLCK)
watch(kill_at(int(sys.argv[2])), "/")
with locked(Path(sys.argv[1])):
    pass
print("released", flush=True)
"""


@pytest.mark.parametrize("left", [False, True])
def test_whenever_a_process_is_killed_the_next_one_gets_the_lock(
    lock: Path, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    """``left``: there is the lock of a dead process at the beginning."""
    if not without_locks.is_supported():
        pytest.skip("system calls cannot be made to fail on this machine")
    refuse(monkeypatch)
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}"}
    kills = 0
    while True:
        if left:
            held_by(lock)
        command = [sys.executable, "-c", KILLED_AT, str(lock), str(kills + 1)]
        if subprocess.run(command, check=False, env=environment, capture_output=True).returncode != -signal.SIGKILL:
            break
        kills += 1
        assert is_free(lock), f"after a kill right before effect {kills}"
        assert not lock.with_name(".lock.held").exists()
    assert kills >= (12 if left else 6)


def test_where_there_are_no_hard_links_either_the_error_says_so(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)

    def link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(PathError, match="has neither locks nor hard links; choose another directory"), locked(lock):
        pass
    assert [path.name for path in lock.parent.iterdir()] == [".lock"]


def test_a_link_whose_answer_was_lost_counts(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    link = os.link

    def repeated(*arguments: Any, **more: Any) -> None:
        link(*arguments, **more)
        raise FileExistsError

    monkeypatch.setattr(os, "link", repeated)
    with locked(lock, wait=False) as handle:
        assert handle is not None


# --- mounts -----------------------------------------------------------------------------------------------------------

MOUNTS = [
    "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
    "40 22 0:53 / /home/my\\040runs rw shared:9 master:2 - nfs4 server:/export rw,vers=4.2,local_lock=none",
    "41 22 0:54 / /lab rw - nfs nas:/lab rw,vers=3,nolock,local_lock=all",
    "42 22 0:55 / /scratch rw - lustre 10.0.0.1@tcp:/fs rw,localflock",
]


@pytest.mark.parametrize(
    ("number", "text", "is_local"),
    [
        ("8:1", "/ (ext4 from /dev/sda1)", False),
        ("0:53", "/home/my runs (nfs4 from server:/export)", False),
        ("0:54", "/lab (nfs from nas:/lab)", True),
        ("0:55", "/scratch (lustre from 10.0.0.1@tcp:/fs)", True),
    ],
)
def test_a_mount_says_whether_its_locks_reach_other_machines(number: str, text: str, is_local: bool) -> None:
    mount = locks.find_mount(MOUNTS, number)
    assert mount is not None
    assert (str(mount), mount.has_local_locks) == (text, is_local)
    assert locks.find_mount([*MOUNTS, "", "x", "1 2 3:4 - "], "9:9") is None
    assert locks.mount_of(Path("/proc").stat().st_dev) is not None


def test_locks_that_only_reach_this_machine_are_not_relied_on(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks._has_local_locks.cache_clear()
    monkeypatch.setattr(locks, "mount_of", lambda _: Mount("/lab", "nfs", "nas:/lab", frozenset({"nolock"})))
    try:
        with locked(lock):
            assert (lock.parent / ".lock.held").exists()
        assert not locks.has_record_locks(lock)
    finally:
        locks._has_local_locks.cache_clear()
