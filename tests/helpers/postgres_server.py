"""A real PostgreSQL server on a socket of its own: Debian's, installed if need be, started on first use."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurmtrain.model.urls import DatabaseUrl, read_database_url

# The server refuses to run as root; this account comes with its package.
ACCOUNT = "postgres"
# What it stores need not survive a power failure.
SETTINGS = ["fsync=off", "full_page_writes=off", "synchronous_commit=off", "listen_addresses=", "shared_buffers=16MB"]
SUPERUSER = "tests"


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A running server. ``place``: the directory of its socket; ``pid``: its process."""

    place: Path
    pid: int

    def url(self, *, user: str = SUPERUSER, database: str = "postgres", options: str = "") -> str:
        """Its address, as slurmtrain.yaml has it."""
        more = f"&options={options}" if options else ""
        return f"postgresql+psycopg://{user}@/{database}?host={self.place}{more}"

    def registry(self, runs: Path) -> DatabaseUrl:
        """The registry of the runs in ``runs``, in a schema of its own."""
        return read_database_url(self.url()).of_root(runs)

    def execute(self, statement: str, *, user: str = SUPERUSER, database: str = "postgres") -> list[tuple[object, ...]]:
        """The rows of a statement, by default its superuser's; none if it returns none."""
        import psycopg

        with psycopg.connect(host=str(self.place), user=user, dbname=database, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


def programs() -> Path:
    """The directory of the server's programs. Skips the test where there is no server, and none can be installed."""
    if os.geteuid() == 0 and not _installed():
        if shutil.which("apt-get") is None:
            pytest.skip("there is no PostgreSQL server, and no apt-get to install one")
        # Debian would also start a server of its own.
        settings = Path("/etc/postgresql-common/createcluster.d/slurmtrain-tests.conf")
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text("create_main_cluster = false\n")
        command = "apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends postgresql"
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update"], capture_output=True, check=False)
        installation = subprocess.run(command.split(), capture_output=True, check=False, text=True, env=environment)
        if installation.returncode != 0:
            pytest.skip(f"apt-get cannot install PostgreSQL: {installation.stderr.strip()[-300:]}")
    installed = _installed()
    if not installed:
        pytest.skip("there is no PostgreSQL server: install Debian's package postgresql")
    return installed[-1]


def _installed() -> list[Path]:
    on_path = shutil.which("initdb")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    return [path for path in [*([Path(on_path).parent] if on_path else []), *debian] if (path / "postgres").exists()]


@contextlib.contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Start a server, and end it."""
    binaries = programs()
    # A socket's path may have 107 bytes, so that it cannot lie as deep as pytest's directories.
    place = Path(tempfile.mkdtemp(prefix="slurmtrain-pg-", dir="/tmp"))
    account: dict[str, object] = {}
    if os.geteuid() == 0:
        entry = pwd.getpwnam(ACCOUNT)
        os.chown(place, entry.pw_uid, entry.pw_gid)
        # Other accounts connect too, such as that of a test cluster's user.
        place.chmod(0o711)
        account = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    data = place / "data"
    make = [binaries / "initdb", "-D", data, "--no-sync", "--locale=C.UTF-8", "--auth=trust", f"--username={SUPERUSER}"]
    settings = [word for setting in [*SETTINGS, f"unix_socket_directories={place}"] for word in ("-c", setting)]
    try:
        subprocess.run(make, check=True, capture_output=True, cwd=place, **account)  # type: ignore[call-overload]
        with _started([str(binaries / "postgres"), "-D", str(data), *settings], place, account) as process:
            yield PostgresServer(place, process.pid)
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _started(command: list[str], place: Path, account: dict[str, object]) -> Iterator[subprocess.Popen[bytes]]:
    from helpers.site import until

    with (place / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=place, stdout=log, stderr=log, **account)  # type: ignore[call-overload]

    def is_ready() -> bool:
        assert process.poll() is None, (place / "server.log").read_text()
        lines = (place / "data" / "postmaster.pid").read_text().splitlines() if _has_pid_file(place) else []
        return len(lines) > 7 and lines[7].strip() == "ready"

    try:
        until(is_ready, "the PostgreSQL server")
        yield process
    finally:
        # An immediate shutdown: nothing of it is kept.
        process.send_signal(signal.SIGQUIT)
        process.wait(60)


def _has_pid_file(place: Path) -> bool:
    return (place / "data" / "postmaster.pid").exists()
