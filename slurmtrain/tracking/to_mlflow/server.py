"""An MLflow server of our own, which shows a store in a browser.

Its process is ``python -m slurmtrain.tracking.to_mlflow.server STORE_EXISTS SOCKET``. ``mlflow server`` imports MLflow
to check its options and its store, and then starts another process, which imports it again: each time seconds of
processor time. Here the same command goes on with the server itself. Where a version of MLflow starts it in another
way, that is what happens.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shlex
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit, urlunsplit

from slurmtrain.errors import NotAvailable
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.system.child_process import ProcessGroup
from slurmtrain.system.local_pages import is_loopback, listen_on, place_of_page
from slurmtrain.system.locks import has_record_locks
from slurmtrain.tracking.to_mlflow.database import store_address

_MENU = "workflowType=machine_learning"
_CHART = "compareRunsMode=CHART"


def run_page(experiment: str, run: str) -> str:
    """The page of a run with its curves.

    Args:
        experiment: The id of its experiment.
        run: Its id in MLflow.
    """
    return f"#/experiments/{quote(experiment)}/runs/{quote(run)}/model-metrics?{_MENU}"


def runs_page(experiment: str, condition: str = "") -> str:
    """The list of an experiment's runs, with their curves.

    Args:
        experiment: The id of the experiment.
        condition: What holds for the runs to show, in MLflow's words; empty: all runs.
    """
    page = f"#/experiments/{quote(experiment)}/runs?{_MENU}&{_CHART}"
    return f"{page}&searchFilter={quote(condition)}" if condition else page


def page_address(server: str, page: str) -> str:
    """The address of a page, for a browser.

    Args:
        server: The URI of the MLflow server. A name and password in it are left out: addresses are printed.
        page: The page on it.
    """
    parts = urlsplit(server)
    place = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=parts.path.rstrip("/"), query="", fragment="")
    return f"{urlunsplit(place)}/{page}"


_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_ESTABLISHED = "01"
# What a socket has that no process has any more: the kernel may give such a one to root.
_NO_INODE = "0"
_CHUNK = 1 << 16
_LAST_WORDS_S = 1.0
_REFUSAL = b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\n\r\nthis page is for another account of this machine\n"
Endpoint = tuple[str, int]


@contextlib.contextmanager
def gate(listener: socket.socket, target: Path, *, only_own: bool) -> Iterator[None]:
    """Pass connections on to the socket at ``target``, as long as this context lasts.

    Args:
        listener: The socket where they arrive; it is closed at the end.
        target: A socket in a directory that only this account can enter; it need not exist yet.
        only_own: Refuse connections that this account has not opened on this machine.
    """

    def pass_on(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, socket.socket(socket.AF_UNIX) as server:
            # There is no table of IPv6 where that is switched off.
            tables = [Path(table).read_text(encoding="utf-8") for table in _TABLES if Path(table).exists()]
            lines = [line for table in tables for line in table.splitlines()[1:]]
            if only_own and not is_own(connection.getpeername()[:2], connection.getsockname()[:2], lines):
                connection.sendall(_REFUSAL)
                connection.shutdown(socket.SHUT_WR)
                # What is closed before it was read is reset, and the refusal may be lost.
                connection.settimeout(_LAST_WORDS_S)
                connection.recv(_CHUNK)
                return
            server.connect(str(target))
            answers = threading.Thread(target=_copy_bytes, args=(server, connection), daemon=True)
            answers.start()
            _copy_bytes(connection, server)
            answers.join()

    def accept_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=pass_on, args=(listener.accept()[0],), daemon=True).start()

    with listener:
        threading.Thread(target=accept_all, daemon=True).start()
        try:
            yield
        finally:
            # This ends the accept() of the thread, which closing alone does not.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def _copy_bytes(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(_CHUNK):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def is_own(peer: Endpoint, own: Endpoint, lines: Iterable[str]) -> bool:
    """Whether a process of this account has the other end of a connection.

    Args:
        peer: The other end, an address and a port.
        own: This end.
        lines: Lines of the kernel's tables of connections.
    """
    for line in lines:
        # sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode ...
        fields = line.split()
        if len(fields) < 10 or not (_has_port(fields[1], peer) and _has_port(fields[2], own)):
            continue
        ends = _kernel_address(fields[1]), _kernel_address(fields[2])
        if ends == (_plain_address(peer[0]), _plain_address(own[0])):
            return fields[3] == _ESTABLISHED and int(fields[7]) == os.geteuid() and fields[9] != _NO_INODE
    return False


def _has_port(field: str, endpoint: Endpoint) -> bool:
    return field.endswith(f":{endpoint[1]:04X}")


def _kernel_address(field: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address in a field such as ``0100007F:1388``: words of four bytes, in the order of this machine."""
    words = bytes.fromhex(field.partition(":")[0])
    if sys.byteorder == "little":
        words = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return _plain_address(words)


def _plain_address(address: str | bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address; of IPv4 if it is one of IPv4 on a socket for IPv6."""
    parsed = ipaddress.ip_address(address)
    return getattr(parsed, "ipv4_mapped", None) or parsed


_LONGEST_PLACE = 80
# Settings of servers that the user runs elsewhere.
_OTHERS_SETTINGS = (
    "MLFLOW_ARTIFACTS_", "MLFLOW_DEFAULT_ARTIFACT_ROOT", "MLFLOW_EXPOSE_PROMETHEUS", "MLFLOW_GUNICORN_OPTS",
    "MLFLOW_HOST", "MLFLOW_PORT", "MLFLOW_REGISTRY_STORE_URI", "MLFLOW_SERVER_", "MLFLOW_STATIC_PREFIX",
    "MLFLOW_UVICORN_OPTS", "MLFLOW_WORKERS", "GUNICORN_", "UVICORN_",
)  # fmt: skip
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def is_server(uri: str) -> bool:
    """Whether a tracking URI names a server, rather than a store that needs one to be shown."""
    return uri.startswith(("http://", "https://"))


@dataclass(frozen=True, slots=True)
class RunningServer:
    """An MLflow server on this machine: where it listens, its processes, and their output."""

    host: str
    port: int
    _group: ProcessGroup
    _output: IO[bytes]
    _store_exists: Path

    @property
    def place(self) -> str:
        """Where it listens, as in a URI."""
        return place_of_page(self.host, self.port)

    @property
    def uri(self) -> str:
        """Its tracking URI."""
        return f"http://{self.place}"

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._group.ended

    @property
    def last_line(self) -> str:
        """The last line that it has printed."""
        self._output.seek(0)
        lines = _COLOURS.sub("", self._output.read().decode(errors="replace")).strip().splitlines()
        return lines[-1] if lines else "it has printed nothing"

    def open_store(self) -> None:
        """Let it open its store, which must exist: MLflow's server would make it without regard to other processes."""
        self._store_exists.touch()

    def answers(self) -> bool:
        """Whether it answers already."""
        # Whatever proxy the environment names, it is not asked.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(OSError), opener.open(f"{self.uri}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False


@contextlib.contextmanager
def serve(
    uri: str, root: RunsRoot, host: str, port: int, occupied: Callable[[int, int], None]
) -> Iterator[RunningServer]:
    """Start to show a store on this machine, until the context or this process ends; its server answers later.

    Args:
        uri: The store.
        root: The runs root, where the server runs.
        host: The address to listen on.
        port: The port to listen on. If it is in use, or browsers refuse it, the next free one is taken.
        occupied: Called with ``port`` and the one that is taken instead.

    Raises:
        NotAvailable: No such store can be shown.
    """
    if uri.startswith(("databricks", "uc:")):
        raise NotAvailable(f"the runs are in {uri}, and a server on this machine cannot show them: open them there")
    if uri == root.mlflow_uri and not has_record_locks(root.tracking_lock):
        raise NotAvailable(
            f"{root.mlflow_db} is on a file system without locks, so a server cannot read it while runs are sent to "
            "it: copy it to a local disk, or set mlflow_uri in slurmtrain.yaml to a file elsewhere"
        )
    listener = listen_on(host, port)
    number = int(listener.getsockname()[1])
    with contextlib.ExitStack() as stack:
        # MLflow asks nobody who they are. On this machine only the user of this process is served; who names another
        # address wants to serve others.
        # The path of a socket has at most 107 bytes (unix(7)).
        parent = None if len(os.fsencode(tempfile.gettempdir())) < _LONGEST_PLACE else "/tmp"  # noqa: S108
        folder = tempfile.TemporaryDirectory(prefix="slurmtrain-ui-", dir=parent, ignore_cleanup_errors=True)
        place = Path(stack.enter_context(folder), "server")
        stack.enter_context(gate(listener, place, only_own=is_loopback(host)))
        server = stack.enter_context(_start_server(uri, root, place, (host, number)))
        if number != port:
            occupied(port, number)
        yield server


@contextlib.contextmanager
def _start_server(uri: str, root: RunsRoot, place: Path, shown: tuple[str, int]) -> Iterator[RunningServer]:
    """Start a server that listens at the path ``place``, and is ``shown`` at an address and a port."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS_SETTINGS)}
    environ |= {
        # Not an argument, which every user of this machine can read: it may have a password.
        "MLFLOW_BACKEND_STORE_URI": store_address(root.mlflow_db) if uri == root.mlflow_uri else uri,
        "MLFLOW_ARTIFACTS_DESTINATION": str(root.mlflow_artifacts),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Neither processes that work in the background nor a line for each request.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "UVICORN_LOG_LEVEL": "warning",
        # What is in the current directory is no module.
        "PYTHONSAFEPATH": "1",
    }
    store_exists = place.with_name("store-exists")
    command = [sys.executable, "-m", "slurmtrain.tracking.to_mlflow.server", str(store_exists), str(place)]
    # A file without a name: it ends with the server, whoever is killed.
    with (
        tempfile.TemporaryFile() as output,
        ProcessGroup(command, environ=environ, cwd=root.path, output=output) as group,
    ):
        yield RunningServer(*shown, group, output, store_exists)


# --- the server's process ---------------------------------------------------------------------------------------------

_POLL_S = 0.02


def run_server(store_exists: Path, socket: str) -> None:
    """Serve the store that MLflow's variables name, once it exists.

    Args:
        store_exists: The file that appears then.
        socket: The path to listen at.
    """
    # Before MLflow, which takes this as a sign that it serves, and protects itself.
    import uvicorn
    from mlflow import server
    from mlflow.cli import cli

    start_process = getattr(server, "_exec_cmd", None)

    def serve_here(command: Sequence[str], *arguments: Any, extra_env: Mapping[str, str], **options: Any) -> Any:
        if list(command[:3]) != [sys.executable, "-m", "uvicorn"]:
            assert start_process is not None
            return start_process(command, *arguments, extra_env=extra_env, **options)
        os.environ.update(extra_env)
        return uvicorn.main(list(command[3:]))

    if start_process is not None:
        server._exec_cmd = serve_here
    while not store_exists.exists():
        time.sleep(_POLL_S)
    cli(["server", "--workers", "1", "--uvicorn-opts", shlex.join(["--uds", socket])], prog_name="mlflow")


if __name__ == "__main__":
    run_server(Path(sys.argv[1]), sys.argv[2])
