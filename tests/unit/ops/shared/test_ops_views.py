"""Runs as the JSON contract has them."""

from __future__ import annotations

from typing import Any

from helpers.simulated_run import RUN_ID, SimulatedRun

from slurmtrain.model.diagnosis.hang import Phase, RankState
from slurmtrain.model.run.accounting import KINDS
from slurmtrain.model.run.run import Attempt
from slurmtrain.ops.shared.run_details import attempt_json, show_json
from slurmtrain.ops.shared.views import run_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry.ingest import ingest


def state(rank: int, letter: str = "S") -> dict[str, Any]:
    return RankState(rank=rank, node=rank // 2, step=5, phase=Phase.TRAINING, idle_s=60.0, state=letter).to_dict()


def test_a_run_tells_what_its_time_on_nodes_was_spent_on(workspace: Workspace) -> None:
    directory = workspace.root.run(RUN_ID)
    builder = SimulatedRun(directory, executor="local", job="job", now=0.0).created().submitting().later(9).started()
    builder.node("workers", at=15.0, processes={}).ended("completed", at=24.0, failures=[])
    with workspace.store.begin() as writing:
        ingest(writing, [directory], dead=False)
    listed, run = workspace.store.listed()[RUN_ID], workspace.store.load(RUN_ID)
    assert run is not None
    assert run_json(workspace, listed)["goodput"] == 0.75
    shown = show_json(workspace, listed, run)
    assert shown["goodput"] == 0.75
    spent = {**dict.fromkeys(KINDS, 0.0), "queue": 10.0, "start": 3.0, "train": 9.0}
    assert (shown["seconds"], shown["attempts"][0]["seconds"]) == (spent, spent)
    assert list(shown["seconds"]) == list(KINDS)


def test_an_attempt_tells_what_held_it_up_and_when() -> None:
    shown = attempt_json(
        Attempt(
            number=1,
            job_id="7",
            restart=0,
            restarts=(
                {"at": 0.0, "round": 1, "cause": "crash", "past": {"committed": 5}},
                {"at": 9.0, "round": 2, "cause": "hang"},
            ),
            hangs=(
                {"at": 2.5, "node": 1, "ranks": [state(3, "T"), state(2)]},
                {"at": 1.5, "node": 0, "ranks": [state(0), state(1)]},
                {"at": 10.0, "node": 0, "ranks": [state(0, "D"), state(1)]},
            ),
            stragglers=({"at": 60.0, "rank": 3},),
            evidence={"oom_kills": 1},
        )
    )
    assert shown["restarts"] == [
        {"at": "1970-01-01T00:00:00.000Z", "round": 1, "cause": "crash"},
        {"at": "1970-01-01T00:00:09.000Z", "round": 2, "cause": "hang"},
    ]
    first, second = shown["hangs"]
    assert (first["at"], first["round"], first["culprits"]) == ("1970-01-01T00:00:01.500Z", 1, [3])
    assert [rank["rank"] for rank in first["ranks"]] == [0, 1, 2, 3]
    assert first["why"].startswith("rank 3 (node 1) is stopped")
    assert (second["round"], second["culprits"]) == (2, [0])
    assert shown["stragglers"] == [{"at": "1970-01-01T00:01:00.000Z", "rank": 3}]
    assert shown["evidence"] == {"oom_kills": 1}
    assert shown["seconds"] == {}
