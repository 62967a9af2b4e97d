"""What is asked of a registry has the same answer in a SQLite file and on a PostgreSQL server."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.postgres_server import PostgresServer
from helpers.queried_runs import SWEEP, write_run, write_sweep
from helpers.workspaces import make_workspace

from slurmtrain.model.query.conditions import parse
from slurmtrain.model.query.measures import Measure
from slurmtrain.model.run.events.checkpoint_events import CheckpointSaved
from slurmtrain.model.run.events.command_events import RunCreated
from slurmtrain.ops.shared.observe import observe
from slurmtrain.registry import queries
from slurmtrain.registry.cells import Sent
from slurmtrain.registry.narrowing import best_candidates, candidates
from slurmtrain.registry.store import Store

CONDITIONS = (
    "state = failed",
    "step > 10 and state in (completed, running)",
    "submitted_at > 3d",
    "name = mlp or step < 5",
)
PARSED = [[parse(text, 2e9)] for text in CONDITIONS]
QUESTIONS: dict[str, Callable[[Store], Any]] = {
    "index": lambda store: store.index(),
    "index of some": lambda store: store.index(["0000000002", "none"]),
    "ids": lambda store: store.ids(),
    "unsettled": lambda store: store.ask(queries.unsettled),
    "ended_last": lambda store: store.ask(lambda db: queries.ended_last(db, 3)),
    "named": lambda store: store.ask(
        lambda db: queries.named(db, ["mlp", SWEEP, "000000000", "0000000003", "a-b", "\udcff"])
    ),
    "worth_listing": lambda store: store.ask(lambda db: queries.worth_listing(db, 2)),
    "worth_listing in sweeps": lambda store: store.ask(lambda db: queries.worth_listing(db, 4, folds=True)),
    "state_counts": lambda store: store.ask(queries.state_counts),
    "candidates": lambda store: [store.ask(lambda db, of=each: candidates(db, of, put_away=False)) for each in PARSED],
    "archived candidates": lambda store: store.ask(lambda db: candidates(db, [], put_away=True)),
    "best": lambda store: store.ask(lambda db: best_candidates(db, Measure("last", "acc"), larger=True, limit=3)),
    "smallest": lambda store: store.ask(lambda db: best_candidates(db, Measure("min", "loss"), larger=False, limit=3)),
    "listed": lambda store: store.listed(),
    "runs": lambda store: store.load_all(store.ids()),
    "charged attempts": lambda store: store.charged_attempts(store.ids()),
    "completed namesakes": lambda store: store.completed_namesakes(["cnn", "mlp", "none"]),
    "events": lambda store: store.events("0000000001", RunCreated),
    "events of many": lambda store: {run: sorted(map(repr, of_run)) for run, of_run in saves(store).items()},
    "metrics": lambda store: store.surviving_metrics(),
    "metrics by name": lambda store: store.surviving_metrics(["0000000001"], ["acc"]),
    "ledger": lambda store: store.ledger(),
    "garbage": lambda store: store.garbage("0000000007"),
    "offsets": lambda store: store.ask(lambda db: queries.offsets(db, store.ids())),
    "sent": lambda store: store.sent(),
    "unsent": lambda store: store.unsent(sorted(store.ids())),
    "history": lambda store: store.ask(lambda db: queries.partition_history(db, "0000000001", "cnn", "local", "", 0.0)),
    "history of a partition": lambda store: store.ask(
        lambda db: queries.partition_history(db, "0000000008", "cnn", "slurm", "gpu", 0.0)
    ),
}


def saves(store: Store) -> dict[str, Any]:
    return store.events_of(store.ids(), CheckpointSaved)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer) -> tuple[Store, Store]:
    """The same registry in a file and on a server."""
    place: Path = tmp_path_factory.mktemp("questions")
    workspace = make_workspace(place / "runs")
    write_sweep(workspace)
    broken = write_run(workspace, 7, "mlp", state="failed", archived=True, tags=["a", "ü"], metrics={"acc": math.inf})
    (broken.directory.journals / "broken.jsonl").write_bytes(b"{half\xff\x00\n")
    write_run(workspace, 8, "a-b", state="created", days_ago=400)
    on_server = make_workspace(place / "runs", registry=postgres.registry(place / "runs"))
    for each in (workspace, on_server):
        observe(each, ask_slurm=False)
        with each.store.begin() as transaction:
            transaction.set_sent("0000000001", Sent("mlflow", "uri", offsets={"m": 3}, revision=7))
    return workspace.store, on_server.store


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_has_the_same_answer_in_both(stores: tuple[Store, Store], question: str) -> None:
    in_file, on_server = (QUESTIONS[question](store) for store in stores)
    assert in_file == on_server
