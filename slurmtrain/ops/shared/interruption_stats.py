"""What a submission tells its job about interruptions: how often its partition had them, and what saves cost."""

from __future__ import annotations

import time
from dataclasses import dataclass

from slurmtrain.errors import SlurmDown
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.interruption.interval import InterruptionStats, add_attempts, too_slow
from slurmtrain.ops.shared.workspace import Workspace

# Nodes are repaired and replaced, so anything older says little.
_WINDOW_S = 90 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class PartitionStats:
    """What is known about the partition that a run goes to, and notes on it for the user.

    ``partition`` is empty for local runs, and if Slurm does not report its default.
    """

    partition: str
    history: InterruptionStats
    notes: tuple[str, ...] = ()


def outlook(workspace: Workspace, run_id: str, plan: Plan, executor: str) -> PartitionStats:
    """What this registry knows about interruptions where a run is about to go. Slurm is not queried again.

    Args:
        workspace: Where the registry is.
        run_id: The run, possibly a new one.
        plan: Its plan.
        executor: ``slurm`` or ``local``.
    """
    partition, grace_s = _partition(workspace, plan) if executor == "slurm" else ("", None)
    history = InterruptionStats(grace_s=grace_s)
    if workspace.has_registry and (partition or executor == "local"):
        from slurmtrain.registry.queries import partition_history

        since = time.time() - _WINDOW_S
        recorded = workspace.store.ask(
            lambda db: partition_history(db, run_id, plan.spec.name, executor, partition, since)
        )
        # What a stall costs depends on the run's own model and ranks; how long a save takes, less so.
        stall_s = recorded.stall_s if recorded.own else None
        costs = InterruptionStats(grace_s=grace_s, stall_s=stall_s, save_s=recorded.save_s)
        history = add_attempts(costs, recorded.lived)
    note = too_slow(history.save_s, grace_s, plan.spec.checkpoint.every, f"partition {partition}")
    return PartitionStats(partition, history, (note,) if note else ())


def _partition(workspace: Workspace, plan: Plan) -> tuple[str, float | None]:
    """The partition's name and grace, from the answer that Slurm gave when the request was checked."""
    from slurmtrain.slurm import site_limits

    try:
        partitions = workspace.scheduler.partitions()
    except SlurmDown:
        return "", None
    return site_limits.partition_names(plan, partitions), site_limits.grace_s(plan, partitions)
