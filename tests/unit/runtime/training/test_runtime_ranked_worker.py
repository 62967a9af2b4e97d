"""Which rank a process is that the run's command has started."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from slurmtrain.errors import LaunchError
from slurmtrain.runtime.training.loop import this_ranked_worker

# The second of two nodes with two processes each.
NODE = {"SLURMTRAIN_LAUNCHER": "node", "SLURMTRAIN_WORLD_SIZE": "4", "SLURMTRAIN_FIRST_RANK": "2"}


@pytest.fixture(autouse=True)
def _outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURMTRAIN_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


def set_variables(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_rank_of_a_launcher_is_the_one_that_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, **NODE, RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", TORCHELASTIC_RESTART_COUNT="0")
    worker = this_ranked_worker()
    assert (worker.rank, worker.local_rank, worker.world_size) == (3, 1, 4)


def test_the_round_is_that_of_the_agent_and_not_the_count_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    job = {"SLURMTRAIN_ATTEMPT_DIR": str(tmp_path), "SLURMTRAIN_SUBMISSION": "1", "SLURMTRAIN_ROUND": "2"}
    set_variables(monkeypatch, **NODE, **job, RANK="0", TORCHELASTIC_RESTART_COUNT="0")
    attempt = this_ranked_worker().attempt
    assert attempt is not None
    assert attempt.round == 2


def test_a_rank_that_its_launcher_has_restarted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, **NODE, RANK="3", TORCHELASTIC_RESTART_COUNT="1")
    with pytest.raises(LaunchError, match="restarted this rank by itself"):
        this_ranked_worker()
    # With ranks of slurmtrain's own this is the number of the round.
    monkeypatch.setenv("SLURMTRAIN_LAUNCHER", "ranks")
    assert this_ranked_worker().rank == 3


def test_a_process_that_cannot_know_its_rank_is_refused_unless_it_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_variables(monkeypatch, **NODE)
    with pytest.raises(LaunchError, match="not known which rank this process is: with 'launcher: node'"):
        this_ranked_worker()
    set_variables(monkeypatch, SLURMTRAIN_WORLD_SIZE="1", SLURMTRAIN_FIRST_RANK="0")
    assert (this_ranked_worker().rank, this_ranked_worker().launched) == (0, False)


def test_the_rank_in_a_process_group_of_the_script_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, **{**NODE, "SLURMTRAIN_LAUNCHER": "none"})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_rank", lambda: 3)
        monkeypatch.setattr(dist, "get_world_size", lambda: 4)
        worker = this_ranked_worker()
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
    assert (worker.rank, worker.local_rank, worker.world_size, worker.launched) == (3, 1, 4, True)


def test_outside_any_job_a_process_is_alone() -> None:
    assert (this_ranked_worker().rank, this_ranked_worker().world_size) == (0, 1)
