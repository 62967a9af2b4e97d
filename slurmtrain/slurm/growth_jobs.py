"""A second job of a run, for nodes that it could use in addition to its own job's.

It is submitted from node 0 of the run, with the batch script and the options of the run's job, so that it gets nodes of
the same kind: only the number of nodes, the time limit and the name differ. It is never requeued: node 0 requests
another one if the run still needs it.

Slurm can also let a running job have the nodes of another one (``sbatch --dependency=expand``), but only where the site
sets ``SchedulerParameters=permit_job_expansion``, and running steps do not get them.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping, Sequence

from slurmtrain.runtime.environment.process_limits import soft_limit_of_ranks
from slurmtrain.runtime.environment.variables import EXTENDS, scrubbed
from slurmtrain.runtime.growth import Extension
from slurmtrain.slurm.jobs import second_job_name
from slurmtrain.slurm.parse import read_job
from slurmtrain.slurm.requeue import add_nodes, expanded, inherited_options
from slurmtrain.slurm.slurm_commands import run_command
from slurmtrain.system.process import block_signals

_MINUTE_S = 60
# sbatch with the user's soft limit of open files, which Slurm hands on to the job: the agent's own is higher.
_SBATCH = ("bash", "-c", 'ulimit -S -n "$0" 2>/dev/null; exec sbatch "$@"')


class SlurmNodes:
    """Requests for more nodes of one run (``slurmtrain.runtime.growth.growth.NodeRequests``)."""

    def __init__(self, name: str, run_id: str) -> None:
        """For the run with this ``name`` and id."""
        self._name = second_job_name(name, run_id)

    def request(
        self, job_id: str, extension: Extension, nodes: int, limit_s: float | None, without: Sequence[str]
    ) -> str:
        """Submit a second job like ``job_id``, and return its id. Raises SlurmDown.

        ``extension``: its purpose. ``nodes``: how many it should get at most. ``limit_s``: its time limit; None: the
        limit of ``job_id``. ``without``: nodes that it must not get, besides nodes that ``job_id`` has or excludes.
        """
        script = run_command("scontrol", "write", "batch_script", job_id, "-")
        job = read_job(run_command("scontrol", "show", "job", job_id))
        # A node may have room for two jobs.
        excluded = add_nodes(job.get("ExcNodeList", ""), [*expanded(job.get("NodeList", "")), *without])
        soft = soft_limit_of_ranks()
        # Options of the command line win over options in the script.
        options = [
            *inherited_options(job, script),
            f"--job-name={self._name}",
            f"--nodes=1-{nodes}" if nodes > 1 else "--nodes=1",
            f"--exclude={excluded}",
            "--no-requeue",
            # Instead of what the run's job waited for.
            f"--dependency=after:{job_id}",
            f"--export=ALL,{EXTENDS}={extension}",
            *(() if limit_s is None else (f"--time={max(1, math.ceil(limit_s / _MINUTE_S))}",)),
        ]
        # The batch script of an element finds its run by the element's index.
        _, underscore, index = job_id.partition("_")
        if underscore:
            options.append(f"--array={index}")
        limit = "unlimited" if soft < 0 else str(soft)
        # Not the environment of commands whose answers are read: the job would have its formats and locale.
        environ = scrubbed(os.environ)
        answer = run_command(*_SBATCH, limit, "--parsable", *options, stdin=script, environ=environ)
        return answer.strip().partition(";")[0] + underscore + index

    def cancel_all(self) -> None:
        """Cancel all second jobs of the run that have not ended. Raises SlurmDown."""
        # Slurm's SIGTERM to all processes of the run's job must not end it.
        with block_signals((signal.SIGTERM,)):
            run_command("scancel", "--me", f"--name={self._name}")

    def record(self, job_id: str) -> Mapping[str, str]:
        """What Slurm knows about a job, field by field. Raises SlurmDown."""
        return read_job(run_command("scontrol", "show", "job", job_id))
