"""How MLflow's server starts: in the process of its command where that is possible, else as MLflow starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slurmtrain.tracking.to_mlflow.server import run_server

SERVER = [sys.executable, "-m", "uvicorn", "--uds", "/s", "app"]
Started = list[tuple[str, list[str]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What stands in for MLflow and uvicorn has been called with."""
    calls: Started = []
    uvicorn, mlflow, server, cli = (ModuleType(name) for name in ("uvicorn", "mlflow", "mlflow.server", "mlflow.cli"))
    uvicorn.main = lambda words: calls.append(("uvicorn", words))  # type: ignore[attr-defined]
    mlflow.server = server  # type: ignore[attr-defined]
    cli.cli = lambda words, prog_name: calls.append((prog_name, words))  # type: ignore[attr-defined]
    for module in (uvicorn, mlflow, server, cli):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


@pytest.mark.parametrize(
    ("command", "expected"), [(SERVER, ("uvicorn", SERVER[3:])), (["gunicorn"], ("process", ["gunicorn"]))]
)
def test_the_server_goes_on_in_this_process_if_it_is_the_usual_one(
    tmp_path: Path,
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    expected: tuple[str, list[str]],
) -> None:
    def start_process(words: Sequence[str], *, extra_env: Mapping[str, str]) -> None:
        started.append(("process", list(words)))

    def serve(words: list[str], prog_name: str) -> None:
        started.append((prog_name, words))
        start: Callable[..., Any] = sys.modules["mlflow.server"]._exec_cmd  # type: ignore[attr-defined]
        start(command, extra_env={"OF_THE_SERVER": "1"})

    monkeypatch.setattr(sys.modules["mlflow.server"], "_exec_cmd", start_process, raising=False)
    monkeypatch.setattr(sys.modules["mlflow.cli"], "cli", serve)
    monkeypatch.setenv("OF_THE_SERVER", "")
    (exists := tmp_path / "exists").touch()
    run_server(exists, "/s")
    assert started == [("mlflow", ["server", "--workers", "1", "--uvicorn-opts", "--uds /s"]), expected]
    assert os.environ["OF_THE_SERVER"] == ("1" if expected[0] == "uvicorn" else "")


def test_a_version_of_mlflow_that_starts_it_in_another_way_does_so(tmp_path: Path, started: Started) -> None:
    (exists := tmp_path / "exists").touch()
    run_server(exists, "/a b")
    assert started == [("mlflow", ["server", "--workers", "1", "--uvicorn-opts", "--uds '/a b'"])]
