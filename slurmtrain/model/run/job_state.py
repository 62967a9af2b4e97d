"""Slurm's job states, and their meaning for an attempt.

Source: JOB STATE CODES in the manual pages of squeue and sacct, 22.05 to 25.11. States missing here count as live: a
run must not be given up because a newer Slurm has a new state. What submits a first run needs these, and no record of a
run, which takes milliseconds to import.
"""

from __future__ import annotations

# The cause of an attempt's end by its final state in Slurm, unless the attempt itself journaled a cause.
CAUSE_OF_STATE = {
    "BOOT_FAIL": "node_fail",
    "CANCELLED": "cancelled",
    "COMPLETED": "lost",
    "DEADLINE": "timeout",
    "FAILED": "crash",
    "LAUNCH_FAILED": "node_fail",
    "NODE_FAIL": "node_fail",
    "OUT_OF_MEMORY": "oom",
    "PREEMPTED": "preempted",
    "RECONFIG_FAIL": "node_fail",
    "REQUEUED": "preempted",
    "REVOKED": "cancelled",
    "TIMEOUT": "timeout",
}
# In WAITING the job is in the queue; in HELD it stays there until a person releases it.
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
# Its processes are stopped where they are, and go on when Slurm resumes it.
SUSPENDED = "SUSPENDED"
# The scheduler does not know the job any more, but never reported that it ended.
ABSENT = "ABSENT"
# Neither the scheduler nor the machine knows the job, and the time allowed for it to show up again has passed.
GONE = "gone"

_DESCRIPTIONS = {
    "BOOT_FAIL": "a node could not be started",
    "CANCELLED": "cancelled in Slurm",
    "DEADLINE": "it missed its deadline",
    "LAUNCH_FAILED": "Slurm could not launch it",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "it used more memory than it had requested",
    "PREEMPTED": "preempted by a job of higher priority",
    "RECONFIG_FAIL": "the nodes could not be reconfigured",
    "REQUEUED": "requeued",
    "REVOKED": "revoked by its cluster",
    "TIMEOUT": "the time limit was reached",
}


def base(state: str) -> str:
    """The state without what Slurm appends: ``CANCELLED by 1001``, ``CANCELLED+``."""
    words = state.split()
    return words[0].rstrip("+").upper() if words else ""


def is_final(state: str) -> bool:
    """Whether a start of a job in this state is over. COMPLETING is not: its tasks may still write."""
    return base(state) in CAUSE_OF_STATE or state == GONE


def describe_state(state: str) -> str:
    """A final state in plain words."""
    return _DESCRIPTIONS.get(base(state), f"Slurm says {state}")
