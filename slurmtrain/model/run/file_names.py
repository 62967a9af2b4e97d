"""What the names of a run's files say: the state of a checkpoint, what outlives deletion, what ``clean`` may remove."""

from __future__ import annotations

import re

from slurmtrain.model.run.layout import ATTEMPTS, ENVIRONMENTS, JOURNALS

# Numbers are bounded: anybody can name a file, and what is read here goes into a database.
_STEP = re.compile(r"step-([0-9]{1,15})")
_STAGED = re.compile(r"\..+\.[0-9]{1,9}-step-([0-9]{1,15})")
_DAMAGED = re.compile(r"damaged-step-([0-9]{1,15})(?:\.[0-9]{1,9})?")


def checkpoint_name(step: int) -> str:
    """The directory name of a published checkpoint."""
    return f"step-{step}"


def checkpoint_step(name: str) -> int | None:
    """The step of a published checkpoint from its directory name; None for anything else, even temporary ones."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def staging_name(attempt: str, step: int) -> str:
    """The directory name under which an attempt builds a checkpoint before publishing it; ``attempt``: its owner."""
    return f".{attempt}-step-{step}"


def staged_step(name: str) -> int | None:
    """The step of a checkpoint that an attempt was building; None for anything else."""
    match = _STAGED.fullmatch(name)
    return int(match[1]) if match else None


def trash_name(name: str) -> str:
    """The directory name of a checkpoint while it is being deleted."""
    return f".trash-{name}"


def is_trash(name: str) -> bool:
    """Whether this is the name of a checkpoint that is being deleted."""
    return name.startswith(".trash-")


def damaged_name(step: int, number: int) -> str:
    """The name of a checkpoint moved aside because it could not be restored; ``number`` counts them for this step."""
    return f"damaged-{checkpoint_name(step)}" + (f".{number}" if number else "")


def damaged_step(name: str) -> int | None:
    """The step of a checkpoint that was moved aside as damaged; None for anything else."""
    match = _DAMAGED.fullmatch(name)
    return int(match[1]) if match else None


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
