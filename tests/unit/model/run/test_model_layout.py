"""Where everything of a run lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.model.run import layout
from slurmtrain.model.run.root import EPOCH_MS, RunsRoot, is_run_id, is_unborn, run_id

ID = run_id(EPOCH_MS + 12345, 7)
ROOT = RunsRoot(Path("/runs"))


def test_the_names_of_a_run_directory_are_the_documented_ones() -> None:
    run = ROOT.run(ID)
    attempt = run.attempt("4711", 2)
    names = {
        run.spec: "spec.yaml",
        run.plan: "plan.json",
        run.journals: "journal",
        run.checkpoints: "checkpoints",
        attempt.path: "attempts/4711.2",
        attempt.node_journal(3): "attempts/4711.2/node-3.jsonl",
        attempt.rank_journal(1): "attempts/4711.2/rank-1.jsonl",
        attempt.metrics: "attempts/4711.2/metrics.jsonl",
        attempt.rank_log(0): "attempts/4711.2/logs/rank-0.log",
        run.submission(2).plan: "submissions/2/plan.json",
        run.submission(2).submitit: "submissions/2/submitit",
    }
    assert {str(path.relative_to(run.path)): name for path, name in names.items()} == {n: n for n in names.values()}
    assert run.id == ID
    assert attempt.run == run


def test_the_registry_and_the_tracking_store_lie_in_the_runs_root() -> None:
    assert ROOT.registry == Path("/runs/registry.db")
    assert ROOT.mlflow_db == Path("/runs/mlflow.db")


def test_a_run_is_told_from_everything_else_in_the_root() -> None:
    assert is_run_id(ID)
    for name in ("registry.db", ".new-" + ID, ID + "x", ID[:-1], ID.upper() + "I", "", "../" + ID):
        assert not is_run_id(name), name


def test_an_unfinished_run_directory_is_told_by_its_name() -> None:
    assert is_unborn(ROOT.unborn(ID).path.name)
    for name in (ID, ".new-", ".new-registry", ".trash-" + ID):
        assert not is_unborn(name), name


@pytest.mark.parametrize(("job", "restart"), [("4711", 0), ("4711_3", 12), ("local.a.b", 1)])
def test_an_attempts_name_splits_into_what_it_was_made_of(job: str, restart: int) -> None:
    assert layout.split_attempt(layout.attempt_key(job, restart)) == (job, restart)


@pytest.mark.parametrize("name", ["", "4711", "4711.", ".5", "4711.x", "4711.-1"])
def test_what_is_no_attempts_name_splits_into_nothing(name: str) -> None:
    assert layout.split_attempt(name) is None


@pytest.mark.parametrize(
    ("source", "attempt", "node"),
    [
        ("attempts/7.0/node-12.jsonl", "7.0", "12"),
        ("attempts/7.0/rank-1.jsonl", "7.0", ""),
        ("journal/node-1.jsonl", "", ""),
        ("attempts/node-1.jsonl", "", ""),
    ],
)
def test_a_journals_path_tells_its_attempt_and_its_node(source: str, attempt: str, node: str) -> None:
    assert (layout.attempt_of(source), layout.node_of(source)) == (attempt, node)


def test_journals_about_nodes_lie_beside_the_runs_and_are_none() -> None:
    assert ROOT.nodes == Path("/runs/nodes")
    assert not is_run_id("nodes")
