"""Names and values that MLflow does not take: what it takes arrives, on a real server."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from helpers.mlflow_server import mlflow_server
from helpers.simulated_run import JOB, RUN_ID, SimulatedRun

from slurmtrain.config import Config
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import sync
from slurmtrain.tracking.to_mlflow.names import flat_name, legal_name

pytestmark = pytest.mark.slow

OTHER_ID = "0123456788"
METRICS = ["loss", "train//loss", "c/../d", "x" * 251, "x" * 252, "y\x00\x1b", "", "/", "a", "a/b", "précision"]
PARAMS = {"lr": 0.1, "a": {"b": 2}, "long": "v" * 7000, "odd//name": 3, "y" * 251: 4}


def make_run(workspace: Workspace, run_id: str, metrics: list[str], params: dict[str, Any]) -> None:
    tracking = {"mlflow": {"experiment": f"of {run_id}"}}
    run = SimulatedRun(workspace.root.run(run_id), spec={"params": params, "tracking": tracking}, executor="local")
    run.submitted().started().ended("completed")
    lines = [{"t": 2e9 + step, "step": step, "metrics": dict.fromkeys(metrics, step / 2)} for step in range(1, 4)]
    file = workspace.root.run(run_id).attempt(JOB, 0).metrics
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def ask(server: str, path: str, data: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        f"{server}/api/2.0/mlflow/{path}",
        None if data is None else json.dumps(data).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def stored(server: str, run_id: str) -> tuple[dict[str, float], dict[str, str]]:
    """The last values of all metrics that a run has logged, and its params."""
    experiment = ask(server, f"experiments/get-by-name?experiment_name=of%20{run_id}")["experiment"]["experiment_id"]
    [run] = ask(server, "runs/search", {"experiment_ids": [experiment]})["runs"]
    data = run["data"]
    return (
        {each["key"]: each["value"] for each in data.get("metrics", []) if each["key"] != "slurmtrain/queue_s"},
        {each["key"]: each["value"] for each in data.get("params", [])},
    )


@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_what_mlflow_does_not_take_costs_nothing_else(tmp_path: Path, kind: str) -> None:
    place = {"sqlite": f"sqlite:///{tmp_path / 'server.db'}", "files": (tmp_path / "store").as_uri()}[kind]
    with mlflow_server(tmp_path, place) as server:
        runs = tmp_path / "runs"
        workspace = Workspace(Config(runs=runs, executor=None, registry=runs / "registry.db", mlflow_uri=server))
        make_run(workspace, RUN_ID, METRICS, PARAMS)
        make_run(workspace, OTHER_ID, ["loss"], {})
        synced = sync(workspace)
        assert (synced.problems, sorted(synced.mirrored)) == ([], [OTHER_ID, RUN_ID])
        metrics, params = stored(server, RUN_ID)
        in_the_way = {"a/b"} if kind == "files" else set()
        assert metrics == {flat_name(name) if name in in_the_way else legal_name(name): 1.5 for name in METRICS}
        assert params == {
            "lr": "0.1", "a.b": "2", "long": "v" * 6000, legal_name("odd//name"): "3", legal_name("y" * 251): "4",
        }  # fmt: skip
        assert stored(server, OTHER_ID) == ({"loss": 1.5}, {})
