"""Requests to an MLflow server: who sends them, and what becomes of answers."""

from __future__ import annotations

import base64
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slurmtrain.tracking.to_mlflow.rest_client import Metric, RestClient, RestError

LOSS = [Metric("loss", 0.5, 1000, 3)]


class Answers(BaseHTTPRequestHandler):
    """Notes requests, and answers all of them alike."""

    status: ClassVar[int] = 200
    content: ClassVar[bytes] = b"{}"
    headers_of: ClassVar[list[Any]] = []
    bodies: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        self.headers_of.append(self.headers)
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.status)
        self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where a server listens."""
    for name, value in {"status": 200, "content": b"{}", "headers_of": [], "bodies": []}.items():
        monkeypatch.setattr(Answers, name, value)
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


OF_ADA = "[mlflow]\nmlflow_tracking_username = ada\nmlflow_tracking_password = p%w\n"


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize(
    ("written", "environ", "expected"),
    [
        ("", {}, None),
        ("", {"MLFLOW_TRACKING_TOKEN": "t0ken"}, "Bearer t0ken"),
        ("", {"MLFLOW_TRACKING_USERNAME": "ada", "MLFLOW_TRACKING_PASSWORD": "pw"}, basic("ada:pw")),
        (OF_ADA, {}, basic("ada:p%w")),
        (OF_ADA, {"MLFLOW_TRACKING_PASSWORD": "pw", "MLFLOW_TRACKING_TOKEN": "t0ken"}, basic("ada:pw")),
        ("no section", {"MLFLOW_TRACKING_TOKEN": "t0ken"}, "Bearer t0ken"),
    ],
    ids=["nobody", "token", "name and password", "a file", "a file and variables", "a broken file"],
)
def test_who_sends_is_known_from_where_mlflow_itself_looks(
    place: str, tmp_path: Path, written: str, environ: dict[str, str], expected: str | None
) -> None:
    if written:
        (tmp_path / ".mlflow").mkdir()
        (tmp_path / ".mlflow" / "credentials").write_text(written)
    RestClient(f"http://{place}/", {"HOME": str(tmp_path), **environ}).log_batch("m", LOSS)
    assert Answers.headers_of[0]["Authorization"] == expected


def test_values_that_json_does_not_have_are_sent_as_text(place: str) -> None:
    values = [LOSS[0]._replace(value=value) for value in (0.5, math.nan, math.inf, -math.inf)]
    RestClient(f"http://{place}", {}).log_batch("m", values)
    assert [each["value"] for each in Answers.bodies[0]["metrics"]] == [0.5, "NaN", "Infinity", "-Infinity"]


@pytest.mark.parametrize(
    ("status", "content", "code", "message"),
    [
        (400, b'{"error_code": "BAD_REQUEST", "message": "no"}', "BAD_REQUEST", "BAD_REQUEST: no"),
        (502, b"<html>", "", "502: Bad Gateway"),
        (200, b"<html>sign in</html>", "", "Expecting value"),
        (302, b"", "", "302: Found"),
    ],
    ids=["MLflow", "proxy", "page", "redirect"],
)
def test_an_answer_that_is_not_mlflows_consent_is_an_error(
    place: str, status: int, content: bytes, code: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "status", status)
    monkeypatch.setattr(Answers, "content", content)
    with pytest.raises(RestError, match=message) as raised:
        RestClient(f"http://{place}", {"MLFLOW_TRACKING_TOKEN": "t0ken"}).log_batch("m", LOSS)
    assert raised.value.error_code == code
    assert len(Answers.bodies) == 1


def test_an_answer_of_something_else_than_mlflow_is_an_error(place: str) -> None:
    with pytest.raises(RestError, match="not MLflow's: it has no 'run'"):
        RestClient(f"http://{place}", {}).create_run("0", None, {}, "digits")
