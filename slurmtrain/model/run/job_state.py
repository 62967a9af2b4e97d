"""Slurm's job states and pending reasons: their meaning for an attempt, and their words.

Also the reasons of runs, as lists show them: the error first, and which reasons are the same.

Source: JOB STATE CODES in the manual pages of squeue and sacct, 22.05 to 25.11. States missing here count as live: a
run must not be given up because a newer Slurm has a new state. What submits a first run needs these, and no record of a
run, which takes milliseconds to import.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

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


# Reasons of a job that is held by its user, who may release it.
HELD_BY_USER = frozenset({"JobHeldUser", "job_requeued_in_held_state"})
# Reasons of a job that Slurm holds because it was started again too often (MaxBatchRequeue).
HELD_BY_SLURM = frozenset({"JobHoldMaxRequeue", "launch_failure_limit_exceeded_requeued_held"})
# The reason of a job that an administrator holds, or Slurm for the reason above: some versions give only this one.
HELD_BY_ADMIN = "JobHeldAdmin"
# Source: JOB REASON CODES in the manual pages of squeue, 22.05 to 25.11.
_REASONS = {
    "None": "Slurm has not looked at it yet",
    "Priority": "jobs of higher priority are before it",
    "Resources": "the nodes that it needs are busy",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "it waits for a job that can no longer end as it asks for; cancel it",
    "BeginTime": "it may not start before a given time; after a requeue that is some seconds to minutes",
    "JobHeldUser": "it is held by its user; 'scontrol release {job}' releases it",
    "JobHeldAdmin": "it is held by an administrator, or was started again too often; ask them, or submit it anew",
    "JobHoldMaxRequeue": "it was started again too often (MaxBatchRequeue); 'slurmtrain sync' or 'watch' replaces it",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "PartitionDown": "its partition is down",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "AssociationJobLimit": "its account runs as many jobs as it may",
    "QOSJobLimit": "its QOS runs as many jobs as it may",
    "BadConstraints": "no node can satisfy its constraints; cancel it and ask for less",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows; cancel it and ask for fewer",
    "PartitionTimeLimit": "its time limit is longer than its partition allows; cancel it and ask for less",
    "Licenses": "a license that it needs is in use",
    "Reservation": "its reservation has not begun",
    "PartitionInactive": "its partition is inactive",
    "Prolog": "the nodes are being prepared for it (PrologSlurmctld)",
    "AccountNotAllowed": "its partition does not admit its account; cancel it and choose another",
    "QOSNotAllowed": "its partition or account does not admit its QOS; cancel it and choose another",
    "ReservationDeleted": "its reservation was deleted; cancel it and submit it without",
    "BurstBufferResources": "there is too little room in the burst buffer",
    "BurstBufferStageIn": "its files are being copied to the burst buffer",
    "Cleaning": "its last start is being cleaned up",
    "SchedDefer": "Slurm starts jobs only in its next round",
    "JobArrayTaskLimit": "its array runs as many tasks as it may",
    "MaxMemPerLimit": "it asks for more memory than is allowed; cancel it and ask for less",
    "launch_failed_requeued_held": "it could not be launched and is held; 'scontrol release {job}' releases it",
    "job_requeued_in_held_state": "it was requeued and is held; 'scontrol release {job}' releases it",
    "launch_failure_limit_exceeded_requeued_held": (
        "it was started again too often (MaxBatchRequeue); 'slurmtrain sync' or 'watch' replaces it"
    ),
}
# squeue cuts reasons (slurm/parse).
_LONGEST = 48
# What some versions say in words.
_UNAVAILABLE = "Nodes_required_for_job"
_LIMIT = re.compile(r"(QOS|Assoc)(Grp|Max)([A-Za-z]*?)((?:Run)?Minutes)?(?:Per(User|Account|Job|Node))?(?:Limit)?")
_RESOURCES = {
    "job": "running jobs", "jobs": "running jobs", "submitjobs": "submitted jobs", "cpu": "CPUs", "node": "nodes",
    "nodes": "nodes", "mem": "memory", "memory": "memory", "gres": "GPUs (or other generic resources)",
    "wall": "running time", "wallduration": "running time", "license": "licenses", "billing": "billed resources",
}  # fmt: skip
_SCOPES = {"User": "of each user", "Account": "of each account", "Job": "of one job", "Node": "of one job on a node"}


def bare_reason(code: str) -> str:
    """A reason code as the manual pages spell it: squeue adds parentheses, and spaces for underscores."""
    return code.strip("()").split(",", 1)[0].strip().replace(" ", "_")


def describe_reason(code: str, job_id: str) -> str:
    """A reason code as a sentence; an unknown code is quoted as is.

    ``job_id`` goes into the suggested command, if there is one.
    """
    bare = code.strip("()").split(",", 1)[0].strip()
    name = bare_reason(code)
    if name.startswith(_UNAVAILABLE):
        name = bare = "ReqNodeNotAvail"
    text = _REASONS.get(name) or _describe_limit(name)
    if text is None:
        return f"Slurm says {code.strip('()')}" if bare else _REASONS["None"]
    # As in "ReqNodeNotAvail, UnavailableNodes:node[1-2]" and "ReqNodeNotAvail, Reserved for maintenance"; a longer text
    # is cut.
    more = code.strip("()").partition(",")[2].strip().replace("UnavailableNodes:", "") if len(code) < _LONGEST else ""
    return f"{text.format(job=job_id)} ({bare}{f': {more}' * bool(more)})"


def _describe_limit(name: str) -> str | None:
    """Which limit of a QOS or an account a reason names; None if it names none."""
    match = _LIMIT.fullmatch(name)
    if match is None:
        return None
    owner = "its QOS" if match[1] == "QOS" else "its account"
    resource = _RESOURCES.get(match[3].lower(), match[3])
    if match[4]:
        resource = f"the minutes of {resource}"
    # The limit Max* of an association is for a user in an account.
    whose = "of all jobs together" if match[2] == "Grp" else _SCOPES.get(match[5] or "User", "")
    if match[5] in ("Job", "Node"):
        return f"it asks for more than {owner} allows: {resource} {whose}; cancel it and ask for less"
    return f"a limit of {owner} is reached: {resource} {whose}"


# How runs of earlier versions begin: with the process that failed, and how it ended.
_WHO_FIRST = re.compile(r"(?P<who>(?:rank|the command on node) \d+ exited with code \d+): (?P<error>\S.*)", re.S)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def error_first(reason: str) -> str:
    """A ``reason`` that begins with the error itself, and then says which process ended how."""
    match = _WHO_FIRST.fullmatch(reason)
    return f"{match['error']}; {match['who']}" if match else reason


def commonest(reasons: Iterable[str]) -> tuple[str, int]:
    """The commonest of these reasons, and how many are alike: in all but numbers, such as ranks and steps."""
    alike: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason in map(error_first, reasons):
        key = _NUMBER.sub("#", reason)
        alike.setdefault(key, reason)
        counts[key] += 1
    [(key, count)] = counts.most_common(1) or [("", 0)]
    return alike.get(key, ""), count
