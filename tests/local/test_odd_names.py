"""Names and values that trackers do not take: what they take arrives, each under a name of its own."""

from __future__ import annotations

import csv
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from helpers.hostile_names import NAMES, draw_names
from helpers.mlflow_server import mlflow_server
from helpers.simulated_run import JOB, RUN_ID, SimulatedRun
from helpers.wandb_files import read_records, synced_history
from helpers.workspaces import make_workspace
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from slurmtrain.config import Config
from slurmtrain.model.experiment.values import check_param_name
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import sync
from slurmtrain.plugins.csv import StepFile
from slurmtrain.plugins.wandb import param_name, project_name
from slurmtrain.tracking.to_mlflow.sending import flat_name, legal_name

pytestmark = pytest.mark.slow

OTHER_ID = "0123456788"
METRICS = ["loss", "train//loss", "c/../d", "x" * 251, "x" * 252, "y\x00\x1b", "", "/", "a", "a/b", "précision"]
METRICS += [name for name in draw_names(NAMES) if name not in METRICS]
PARAMS = {"lr": 0.1, "a": {"b": 2}, "long": "v" * 7000, "odd//name": 3, "y" * 251: 4}


# Of those that W&B takes for one, or keeps to itself.
TWINS = {"lr": 1, "-lr": 2, "lr--": 3, "-": 4, "_wandb": 5}


def make_run(
    workspace: Workspace, run_id: str, metrics: list[str], params: dict[str, Any], **trackers: dict[str, Any]
) -> None:
    tracking = {"mlflow": {"experiment": f"of {run_id}"}, **trackers}
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
        {each["key"]: each["value"] for each in data.get("metrics", []) if each["key"] != "system/queue_s"},
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


def can_be_param(name: str) -> bool:
    try:
        check_param_name(name)
    except ValueError:
        return False
    return True


def test_every_name_is_one_of_its_own_in_files_of_trackers(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "runs")
    params = TWINS | {name: 0 for name in draw_names(NAMES) if can_be_param(name)}
    on = {"enabled": True}
    make_run(
        workspace, RUN_ID, METRICS, params,
        mlflow={"enabled": False}, csv=on, tensorboard=on, wandb={**on, "mode": "offline", "project": "a/b: 100 %"},
    )  # fmt: skip
    synced = sync(workspace)
    assert (synced.problems, synced.mirrored) == ([], [RUN_ID])
    kept = StepFile(workspace.root.path / "csv" / f"{RUN_ID}.csv")
    assert (kept.keep(2), kept.names, [row[0] for row in kept.rows()]) == (2, METRICS, ["1", "2"])
    with kept.path.open(newline="", encoding="utf-8") as file:
        assert next(csv.reader(file))[3:] == METRICS
    assert (kept.keep(0), kept.keep(9), kept.names) == (None, None, METRICS)
    events = [EventFileLoader(str(path)) for path in (workspace.root.path / "tensorboard" / RUN_ID).glob("events*")]
    assert {each.tag for file in events for event in file.Load() for each in event.summary.value} == {*METRICS}
    place = workspace.root.path / "wandb"
    assert {*synced_history(place)} == {name for name in METRICS if name and not name.startswith("_")}
    runs = [record.run for path in place.glob("offline-run-*/*.wandb") for record in read_records(path)]
    [written] = [run for run in runs if run.run_id]
    assert written.project == project_name("a/b: 100 %") != project_name("a-b- 100 -")
    config = {each.key or each.nested_key[0] for each in written.config.update}
    assert config - {"_wandb"} == {param_name(name) for name in params}
    assert len({param_name(name) for name in params}) == len(params)
