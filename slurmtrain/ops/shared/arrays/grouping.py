"""Which runs can be elements of the same job array."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from slurmtrain.model.spec.plan import Plan

T = TypeVar("T")


def request_key(plan: Plan, secrets: Mapping[str, str]) -> str:
    """What a run requests from Slurm, as text: two runs with the same text can share a batch script.

    Args:
        plan: the run's plan.
        secrets: the values that reach its job by the environment of sbatch alone.
    """
    spec = plan.spec
    script = (spec.resources, sorted(spec.slurm.items()), spec.setup, spec.requeue.enabled, spec.network.profile)
    return repr((script, spec.preflight.exclude, spec.tracking.mlflow, sorted(secrets.items())))


def split_groups(keyed: Iterable[tuple[str, T]], largest: int) -> list[Sequence[T]]:
    """Groups of what has the same key, each in the given order, by their first members.

    Args:
        keyed: what to group, with its key.
        largest: how many members a group may have; with less than 2 there are only groups of one.
    """
    groups: dict[str, list[T]] = {}
    for key, member in keyed:
        groups.setdefault(key, []).append(member)
    size = max(1, largest)
    return [group[start : start + size] for group in groups.values() for start in range(0, len(group), size)]
