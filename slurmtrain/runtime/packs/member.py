"""What the agent of a run does that shares its job with others: its own GPUs and cores, and its own cancel.

The agents of a pack are the tasks of one step, so a signal of Slurm's reaches all of them. A cancel of one run cannot
use one: the command closes the lease of the run, which its agent reads every few seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.run.layout import SubmissionDir
from slurmtrain.model.spec.sweep import Pack
from slurmtrain.runtime.environment.gpus import take_gpus
from slurmtrain.runtime.environment.node import Node, cpus_of_job
from slurmtrain.runtime.job import lease

_POLL_S = 2.0


def enter_pack(submission: SubmissionDir, node: Node, gpus: int) -> None:
    """Take this run's share of the job, and watch for its cancel. Nothing is done for a run with a job of its own.

    Args:
        submission: directory of the run's submission.
        node: this node.
        gpus: how many GPUs the run has.

    Raises:
        LaunchError: the job has too few GPUs.
    """
    pack, slot = node.launch.pack, node.launch.slot
    if pack is None:
        return
    if not pack.share_gpu:
        take_gpus(gpus, slot)
    cores = own_cores(sorted(os.sched_getaffinity(0)), cpus_of_job(), pack, slot)
    # Cores may have gone offline, and another run may use the same ones: both cost speed only.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)
    threading.Thread(target=_watch_for_cancel, args=(submission,), daemon=True).start()


def own_cores(cores: list[int], of_job: int | None, pack: Pack, slot: int) -> list[int]:
    """The cores that one run of a pack uses.

    If Slurm binds each task to its own cores, or confines no job at all, they stay as they are: the cores of a node may
    then belong to other jobs.

    Args:
        cores: cores that this process may use, ascending.
        of_job: how many of the node's the job has; None: unknown.
        pack: how the job is shared.
        slot: the number of this run, from 0.
    """
    share = len(cores) // pack.runs
    if len(cores) != of_job or not share:
        return cores
    return cores[slot * share : (slot + 1) * share]


def _watch_for_cancel(submission: SubmissionDir) -> None:
    while True:
        time.sleep(_POLL_S)
        with contextlib.suppress(OSError, SlurmtrainError):
            if lease.final_state(submission.run, submission.number) == "cancelled":
                os.kill(os.getpid(), signal.SIGTERM)
                return
