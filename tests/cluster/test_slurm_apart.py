"""Ranks on two nodes of a real Slurm that do not know each other: the run completes, and says so."""

from __future__ import annotations

import pytest
from helpers.cluster import ClusterSite
from helpers.rare import rare

TWO = {"nodes": 2, "procs_per_node": 1, "time": "00:05:00"}
FOUR = {"nodes": 2, "procs_per_node": 2, "time": "00:05:00"}


@rare
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "keys", "problem"),
    [
        ("python {script}", {"resources": TWO}, "ranks 0 and 1 have no connection to each other"),
        ("python {script} --join", {"resources": FOUR}, None),
        ("python -m torch.distributed.run {script} --join", {"resources": FOUR}, None),
        (
            "bash -c 'python -m torch.distributed.run --standalone --nnodes 1 --nproc_per_node 2 {script} --join'",
            {"resources": FOUR, "launcher": "node"},
            "nodes 0 and 1 have no connection to each other: the same training runs 2 times",
        ),
        (
            "python -m accelerate.commands.launch --cpu {script}",
            {"resources": FOUR},
            "accelerate launch has started none of the 4 ranks",
        ),
    ],
)
def test_ranks_that_train_apart_are_noticed(
    site: ClusterSite, command: str, keys: dict[str, object], problem: str | None
) -> None:
    spec = site.spec("apart", command=command.format(script=site.scripts / "apart.py"), **keys)
    run_id = site.submit(spec)
    run = site.until_state(run_id, "completed", "failed")
    assert run["state"] == "completed"
    if problem is None:
        assert run["reason"] == ""
        return
    assert run["reason"].startswith(problem)
    assert problem in site.call("doctor", run_id).stdout
