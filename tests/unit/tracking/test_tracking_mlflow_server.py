"""The server that shows a store: who may connect, its port, and addresses of its pages."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import unquote

import pytest

from slurmtrain.tracking.to_mlflow import server
from slurmtrain.tracking.to_mlflow.server import gate, is_own, page_address, run_page, runs_page

PEER, OWN = ("127.0.0.1", 40000), ("127.0.0.1", 5000)
V4 = "0: 0100007F:9C40 0100007F:1388 {state} 0:0 00:00 00 {uid} 0 {inode} 1 0"
_REST = "{state} 0:0 00:00 00 {uid} 0 {inode} 1"
MAPPED = f"0: {'0' * 16}FFFF00000100007F:9C40 {'0' * 16}FFFF00000100007F:1388 {_REST}"
V6 = f"0: {'0' * 24}01000000:9C40 {'0' * 24}01000000:1388 {_REST}"


def line(text: str = V4, state: str = "01", uid: int | None = None, inode: int = 99) -> str:
    return text.format(state=state, uid=os.geteuid() if uid is None else uid, inode=inode)


def test_a_connection_of_this_account_is_its_own() -> None:
    # The second line is this process's own end of the same connection.
    other_end = "1: 0100007F:1388 0100007F:9C40 01 0:0 00:00 00 4711 0 98 1"
    assert is_own(PEER, OWN, [other_end, line()])
    assert is_own(PEER, OWN, [line(MAPPED)])
    assert is_own(("::1", 40000), ("::1", 5000), [line(V6)])
    assert is_own(("::ffff:127.0.0.1", 40000), ("::ffff:127.0.0.1", 5000), [line()])


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [line(uid=4711)],
        # Closed by its process at once: the kernel may call it root's, whoever it was.
        [line(state="04"), line(inode=0)],
        [line(inode=0)],
        [line().replace("9C40", "9C41")],
        [line().replace("0100007F:9C40", "0200007F:9C40")],
        ["", "nonsense", "0: x y z"],
    ],
)
def test_any_other_connection_is_not(lines: list[str]) -> None:
    assert not is_own(PEER, OWN, lines)


@contextmanager
def echoing(place: Path) -> Iterator[None]:
    """A server that returns in capitals what it has got."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(connection.recv(100).upper())

    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(place))
        listener.listen()
        threading.Thread(target=serve, daemon=True).start()
        yield


def ask(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(b"hello")
        try:
            return b"".join(iter(lambda: connection.recv(100), b""))
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("only_own", [True, False])
def test_what_this_account_sends_is_answered(tmp_path: Path, only_own: bool) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with gate(listener, tmp_path / "server", only_own=only_own):
        assert ask(address) == b""  # there is no server yet
        with echoing(tmp_path / "server"):
            assert ask(address) == b"HELLO"
    with pytest.raises(ConnectionError):
        ask(address)


def test_what_another_account_sends_reaches_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.os, "geteuid", lambda: 4711)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with gate(listener, tmp_path / "server", only_own=True), echoing(tmp_path / "server"):
        assert ask(address).startswith(b"HTTP/1.1 403 Forbidden\r\n")


def test_an_experiment_is_shown_by_the_curves_of_its_runs() -> None:
    assert runs_page("7").startswith("#/experiments/7/runs?")
    assert "compareRunsMode=CHART" in runs_page("7")
    assert run_page("7", "abc").startswith("#/experiments/7/runs/abc/model-metrics?")


def test_some_runs_of_an_experiment_are_a_filter() -> None:
    page = runs_page("7", "tags.`slurmtrain.sweep` = '0sweep'")
    assert unquote(page) == f"{runs_page('7')}&searchFilter=tags.`slurmtrain.sweep` = '0sweep'"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000/#/experiments/1"),
        ("https://me:secret@mlflow.example/prefix/", "https://mlflow.example/prefix/#/experiments/1"),
        ("http://[::1]:5001/?a=b", "http://[::1]:5001/#/experiments/1"),
    ],
)
def test_an_address_has_no_password_of_the_server(uri: str, expected: str) -> None:
    assert page_address(uri, "#/experiments/1") == expected
