"""The GPUs of a run that shares its job."""

from __future__ import annotations

import pytest

from slurmtrain.errors import LaunchError
from slurmtrain.runtime.environment.variables import environment_of_agent, take_gpus


@pytest.mark.parametrize(
    ("visible", "count", "slot", "own"),
    [("0,1,2,3", 2, 1, "2,3"), ("GPU-a,GPU-b", 1, 0, "GPU-a"), (None, 2, 1, "2,3"), ("0,1", 0, 1, "0,1")],
)
def test_each_run_sees_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, slot: int, own: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    take_gpus(count, slot)
    assert environment_of_agent()["CUDA_VISIBLE_DEVICES"] == own


def test_a_job_with_too_few_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(LaunchError, match="run 1 of the pack needs GPUs 1 to 1"):
        take_gpus(1, 1)
