"""The share that a run of a pack takes of its job's cores."""

from __future__ import annotations

import pytest

from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.runtime.agent.node_start import own_cores

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
