"""The kind of a run's file, by its path: what outlives the run's deletion, and what ``clean`` may remove."""

from __future__ import annotations

from slurmtrain.model.run.layout import ATTEMPTS, ENVIRONMENTS, JOURNALS


def outlives_deletion(path: str) -> bool:
    """Whether a file of a run is kept when the run's files are deleted.

    What says what the run was and did, from which the registry is rebuilt, is kept, and what other commands and a
    late agent go by; it is small, except metrics. Everything else goes.

    Args:
        path: The file, relative to the run directory.
    """
    folder, _, rest = path.partition("/")
    if folder in (JOURNALS, ENVIRONMENTS, "claims"):
        return True
    if folder == ATTEMPTS:
        return rest.count("/") == 1 and rest.endswith(".jsonl")
    if folder == "submissions":
        return rest.count("/") == 1 and rest.endswith(".json")
    return path in ("spec.yaml", "plan.json", "code.diff", "environment.txt", "lease.json", ".lock", "upstreams.json")


def put_aside(name: str) -> bool:
    """Whether an entry of a run directory has the checkpoints of before ``resume --from-start`` or ``--step``."""
    return name.startswith("checkpoints.before-attempt-")


def is_log(path: str) -> bool:
    """Whether a file is the output of ranks, agents or a job, which nothing but people and ``doctor`` read.

    Args:
        path: The file, relative to the run directory.
    """
    parts = path.split("/")
    if parts[0] == ATTEMPTS:
        return len(parts) == 4 and parts[2] == "logs" and ".log" in parts[3]
    if parts[0] != "submissions" or len(parts) < 3:
        return False
    return parts[2] == "controller.log" or (parts[2] == "submitit" and path.endswith((".out", ".err")))


def is_of_submitit(path: str) -> bool:
    """Whether a file is what a job was started with: submitit's pickle and the batch script.

    Args:
        path: The file, relative to the run directory.
    """
    parts = path.split("/")
    return parts[0] == "submissions" and len(parts) == 4 and parts[2] == "submitit" and not is_log(path)
