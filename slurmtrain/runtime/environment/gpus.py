"""Which GPUs are whose: of the runs of a pack, of a local run, and of its nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurmtrain.errors import LaunchError
from slurmtrain.runtime.environment import variables

if TYPE_CHECKING:
    from slurmtrain.model.spec.plan import Plan


def take_gpus(count: int, slot: int) -> None:
    """Let this process see only its own of the job's GPUs.

    Args:
        count: How many each run of the pack has.
        slot: Which of the runs this is, from 0.

    Raises:
        LaunchError: The job has too few.
    """
    if not count:
        return
    # Without it, as where Slurm knows no device files, CUDA numbers all GPUs of the node.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    begin, end = slot * count, (slot + 1) * count
    names = [str(number) for number in range(end)] if visible is None else visible.split(",")
    if len(names) < end:
        raise LaunchError(f"run {slot} of the pack needs GPUs {begin} to {end - 1} of its job, which has {visible!r}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[begin:end])


def local_job(job_id: str, gpus: Sequence[str]) -> dict[str, str]:
    """The variables that give a local job its id and its GPUs, since no scheduler does.

    Args:
        job_id: the id.
        gpus: the names of the GPUs, as CUDA_VISIBLE_DEVICES has them.
    """
    return {variables.JOB_ID: job_id, variables.GPUS: ",".join(gpus)}


def local_gpus() -> list[str]:
    """The GPUs that the submitter of a local run could see, as CUDA_VISIBLE_DEVICES names them."""
    return [name for name in os.environ.get(variables.GPUS, "").split(",") if name]


def set_local_gpus(names: Sequence[str]) -> None:
    """Let this run use only some of these GPUs, from now on."""
    os.environ[variables.GPUS] = ",".join(names)


def gpus_of_node(plan: Plan, node: int) -> dict[str, str]:
    """Assign each node of a local run its own GPUs, from ``SLURMTRAIN_GPUS``, the GPUs that the submitter could see."""
    resources = plan.spec.resources
    first = sum(resources.of_node(other).gpus_per_node for other in range(node))
    own = local_gpus()[first : first + resources.of_node(node).gpus_per_node]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
