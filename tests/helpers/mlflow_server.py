"""A real MLflow server on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from helpers.site import until


@contextlib.contextmanager
def mlflow_server(place: Path, store: str) -> Iterator[str]:
    """Run a server in the directory ``place`` that keeps its runs in ``store``, a URI; yields its own URI."""
    words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"]
    words += ["--backend-store-uri", store, "--artifacts-destination", str(place / "a")]
    # MLflow has replaced its store in files by SQLite, and starts one only with this.
    environment = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    # Seven more processes, for what nobody uses here.
    environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    for _ in range(5):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        with (place / "server.log").open("wb") as log:
            process = subprocess.Popen(
                [*words, "--port", str(port)],
                cwd=place,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        try:
            # It ends where somebody else has taken the port meanwhile.
            until(lambda port=port, process=process: process.poll() is not None or _answers(port), "the MLflow server")
            if process.poll() is None:
                yield f"http://127.0.0.1:{port}"
                return
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    raise AssertionError((place / "server.log").read_text())


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
