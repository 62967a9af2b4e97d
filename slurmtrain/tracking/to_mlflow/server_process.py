"""MLflow's server in one process: ``python -m slurmtrain.tracking.to_mlflow.server_process STORE_EXISTS SOCKET``.

``mlflow server`` imports MLflow to check its options and its store, and then starts another process, which imports it
again: each time seconds of processor time. Here the same command goes on with the server itself. Where a version of
MLflow starts it in another way, that is what happens.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
