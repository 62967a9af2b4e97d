"""The share that a run of a pack takes of its job: cores and GPUs."""

from __future__ import annotations

import pytest

from slurmtrain.errors import LaunchError
from slurmtrain.model.spec.sweep.pack import Pack
from slurmtrain.runtime.job import environment
from slurmtrain.runtime.packs.member import own_cores

EIGHT = list(range(10, 18))


def test_runs_of_a_pack_divide_the_cores_of_their_job() -> None:
    shares = [own_cores(EIGHT, 8, Pack(4), slot) for slot in range(4)]
    assert shares == [[10, 11], [12, 13], [14, 15], [16, 17]]


@pytest.mark.parametrize(
    ("of_job", "runs"),
    [
        pytest.param(16, 2, id="each task is bound to its own cores"),
        pytest.param(2, 2, id="jobs are not confined to their cores"),
        pytest.param(None, 2, id="Slurm does not say"),
        pytest.param(8, 9, id="there are fewer cores than runs"),
    ],
)
def test_cores_stay_as_slurm_gave_them_where_others_may_use_them(of_job: int | None, runs: int) -> None:
    assert own_cores(EIGHT, of_job, Pack(runs), 1) == EIGHT


@pytest.mark.parametrize(
    ("visible", "count", "slot", "own"),
    [
        ("0,1,2,3", 2, 1, "2,3"),
        ("GPU-a,GPU-b", 1, 0, "GPU-a"),
        (None, 2, 1, "2,3"),
        ("0,1", 0, 1, "0,1"),
    ],
)
def test_each_run_sees_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, slot: int, own: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environment.take_gpus(count, slot)
    assert environment.environment_of_agent()["CUDA_VISIBLE_DEVICES"] == own


def test_a_job_with_too_few_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(LaunchError, match="run 1 of the pack needs GPUs 1 to 1"):
        environment.take_gpus(1, 1)
