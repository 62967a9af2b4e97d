"""Why a job is pending, as text. Source: JOB REASON CODES in the manual pages of squeue, 22.05 to 25.11."""

from __future__ import annotations

import re

# Reasons of a job that is held by its user, who may release it.
HELD_BY_USER = frozenset({"JobHeldUser", "job_requeued_in_held_state"})
# Reasons of a job that Slurm holds because it was started again too often (MaxBatchRequeue).
HELD_BY_SLURM = frozenset({"JobHoldMaxRequeue", "launch_failure_limit_exceeded_requeued_held"})
# The reason of a job that an administrator holds, or Slurm for the reason above: some versions give only this one.
HELD_BY_ADMIN = "JobHeldAdmin"
_TEXTS = {
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
    "BadConstraints": "no node can satisfy its constraints; cancel it and ask for less",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows; cancel it and ask for fewer",
    "PartitionTimeLimit": "its time limit is longer than its partition allows; cancel it and ask for less",
    "PartitionConfig": "its partition does not allow what it asks for",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "AssociationJobLimit": "its account runs as many jobs as it may",
    "AssociationResourceLimit": "its account uses as much as it may",
    "AssociationTimeLimit": "its account has used up its time",
    "QOSJobLimit": "its QOS runs as many jobs as it may",
    "QOSResourceLimit": "its QOS uses as much as it may",
    "QOSTimeLimit": "its QOS has used up its time",
    "Licenses": "a license that it needs is in use",
    "Reservation": "its reservation has not begun",
    "Cleaning": "its last start is being cleaned up",
    "Prolog": "the site's prolog is running",
    "FrontEndDown": "no front end is up",
    "JobArrayTaskLimit": "its array runs as many tasks as it may",
    "BurstBufferResources": "burst buffers are short",
    "BurstBufferStageIn": "its burst buffer is being filled",
    "MaxMemPerLimit": "it asks for more memory than is allowed; cancel it and ask for less",
    "launch_failed_requeued_held": "it could not be launched and is held; 'scontrol release {job}' releases it",
    "job_requeued_in_held_state": "it was requeued and is held; 'scontrol release {job}' releases it",
    "launch_failure_limit_exceeded_requeued_held": (
        "it was started again too often (MaxBatchRequeue); 'slurmtrain sync' or 'watch' replaces it"
    ),
}
_LIMIT = re.compile(r"(QOS|Assoc)(Grp|Max)(\w*)")


def bare_reason(code: str) -> str:
    """A reason code as the manual pages spell it: squeue adds parentheses, and spaces for underscores."""
    return code.strip("()").split(",", 1)[0].strip().replace(" ", "_")


def describe_reason(code: str, job_id: str) -> str:
    """A reason code as a sentence; an unknown code is quoted as is.

    ``job_id`` goes into the suggested command, if there is one.
    """
    bare = code.strip("()").split(",", 1)[0].strip()
    text = _TEXTS.get(bare_reason(code))
    if text is None and (limit := _LIMIT.fullmatch(bare)):
        whose = "its QOS" if limit[1] == "QOS" else "its account"
        text = f"a limit of {whose} is reached"
    if text is None:
        return f"Slurm says {code.strip('()')}" if bare else _TEXTS["None"]
    return f"{text.format(job=job_id)} ({bare})"
