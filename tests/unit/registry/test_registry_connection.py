"""The registry while another process keeps it locked, and on a file system without locks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import without_locks
from helpers.rare import drawn

from slurmtrain.errors import RegistryFailed
from slurmtrain.registry import sqlite
from slurmtrain.registry.store import Store
from slurmtrain.system import locks

# Another program that has begun a transaction, and does not end it.
HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute(f"BEGIN {sys.argv[2]}")
print("held", flush=True)
sys.stdin.read()
"""
WRITE = """
import sys
from pathlib import Path
from slurmtrain.registry.cells import Sent
from slurmtrain.registry.store import Store
with Store(Path(sys.argv[1])) as store:
    for number in range(int(sys.argv[3])):
        with store.begin() as transaction:
            transaction.set_sent(f"{sys.argv[2]}-{number}", Sent("mlflow", "uri", revision=number))
"""
# Dies with a transaction half written: its pages are in the file, and the old ones in SQLite's journal beside it.
DIE = """
import os, signal, sys
from pathlib import Path
from slurmtrain.registry.cells import Sent
from slurmtrain.registry.store import Store
store = Store(Path(sys.argv[1]))
with store.begin() as transaction:
    transaction._connection.exec_driver_sql("PRAGMA cache_size = 2")
    for number in range(500):
        transaction.set_sent(f"half-{number}", Sent("mlflow", "uri" * 100, revision=number))
    transaction.flush()
    assert Path(sys.argv[1] + "-journal").exists()
    os.kill(os.getpid(), signal.SIGKILL)
"""
READ = """
import json, sys
from pathlib import Path
from slurmtrain.registry.store import Store
with Store(Path(sys.argv[1])) as store:
    print(json.dumps(sorted(store.sent())))
"""
INTERRUPTIBLE = """
import sys
from pathlib import Path
from slurmtrain.registry.store import Store
try:
    Store(Path(sys.argv[1])).index()
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    path = tmp_path / "registry.db"
    Store(path).close()
    return path


@contextlib.contextmanager
def stopped(registry: Path, transaction: str) -> Iterator[int]:
    """The id of a process that was stopped in such a ``transaction``."""
    command = [sys.executable, "-c", HOLD, str(registry), transaction]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        holder.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield holder.pid
        finally:
            holder.kill()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits says so at once, and gives up soon."""
    monkeypatch.setattr(locks, "NOTICE_S", 0.0)
    monkeypatch.setattr(sqlite, "LIMIT_S", 0.3)


@pytest.mark.usefixtures("impatient")
def test_who_keeps_the_registry_locked_is_named_once_and_the_wait_ends(
    registry: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stopped(registry, "EXCLUSIVE") as pid:
        holder = rf"held by process {pid} \(.*\), which is stopped"
        with pytest.raises(RegistryFailed, match=f"the registry {registry} is still {holder}, after 0 s: wait for"):
            Store(registry)
        notices = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(notices) == 1
    assert re.fullmatch(f"waiting for the registry {registry}, {holder}", notices[0])


@pytest.mark.usefixtures("impatient")
def test_while_another_process_writes_the_registry_can_be_read_and_not_written(registry: Path) -> None:
    with Store(registry) as store, stopped(registry, "IMMEDIATE"):
        assert store.index() == {}
        with pytest.raises(RegistryFailed), store.begin():
            pass
        assert store.index() == {}
    with Store(registry) as store, store.begin():
        pass


@pytest.mark.usefixtures("impatient")
def test_a_commit_waits_for_who_reads(registry: Path) -> None:
    reader = sqlite3.connect(registry)
    with Store(registry) as store:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM run").fetchall()
        with pytest.raises(RegistryFailed), store.begin() as transaction:
            transaction.clear()
        reader.rollback()
        with store.begin() as transaction:
            transaction.clear()


def test_ctrl_c_ends_the_wait_for_the_registry(registry: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTIBLE, str(registry)]
    with stopped(registry, "EXCLUSIVE"), subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiter:
        # It says after two seconds that it waits: from then on at the latest it does.
        assert waiter.stderr.readline().startswith("waiting for the registry")
        waiter.send_signal(signal.SIGINT)
        assert waiter.wait(60) == 130


# --- a file system without locks --------------------------------------------------------------------------------------


@pytest.fixture(params=drawn(["ENOLCK", "ENOSYS", "EOPNOTSUPP"], 1))
def lockless(request: pytest.FixtureRequest) -> list[str]:
    """How to start an interpreter whose locks the kernel refuses."""
    if not without_locks.is_supported():
        pytest.skip("system calls cannot be made to fail on this machine")
    return [sys.executable, str(without_locks.__file__), str(request.param), sys.executable, "-c"]


def test_processes_without_locks_write_one_after_another(tmp_path: Path, lockless: list[str]) -> None:
    registry = tmp_path / "registry.db"
    writers = [subprocess.Popen([*lockless, WRITE, str(registry), f"w{number}", "8"]) for number in range(3)]
    assert [writer.wait(120) for writer in writers] == [0] * 3
    with Store(registry) as store:
        assert len(store.sent()) == 24
    with contextlib.closing(sqlite3.connect(registry)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert not list(tmp_path.glob("*.held*"))


def test_a_process_without_locks_that_dies_writing_leaves_no_lock_and_no_half_transaction(
    tmp_path: Path, lockless: list[str]
) -> None:
    registry = tmp_path / "registry.db"
    subprocess.run([*lockless, WRITE, str(registry), "w", "1"], check=True)
    died = subprocess.run([*lockless, DIE, str(registry)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert (tmp_path / ".registry.db.use.lock.held").exists()
    answer = subprocess.run([*lockless, READ, str(registry)], check=True, capture_output=True, text=True)
    assert json.loads(answer.stdout) == ["w-0"]
    assert not list(tmp_path.glob("*.held*"))
