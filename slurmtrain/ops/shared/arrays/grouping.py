"""Which runs can be elements of the same job array."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from slurmtrain.model.run.chain.upstreams import Upstream
from slurmtrain.model.spec.plan import Plan
from slurmtrain.model.spec.sweep import Pack

T = TypeVar("T")


def request_key(plan: Plan, secrets: Mapping[str, str], upstreams: Sequence[Upstream] = ()) -> str | None:
    """What a run requests from Slurm, as text: two runs with the same text can share a batch script.

    None: it cannot share one, since heterogeneous jobs cannot be elements of an array (sbatch(1)).

    Args:
        plan: the run's plan.
        secrets: the values that reach its job by the environment of sbatch alone.
        upstreams: the runs that it starts after.
    """
    spec = plan.spec
    if spec.resources.components:
        return None
    script = (spec.resources, sorted(spec.slurm.items()), spec.setup, spec.requeue.enabled, spec.network.profile)
    after = [upstream.run for upstream in upstreams]
    return repr((script, spec.preflight.exclude, spec.tracking.mlflow, sorted(secrets.items()), after))


def split_groups(keyed: Iterable[tuple[str | None, T]], largest: int, pack: int = 1) -> list[Sequence[T]]:
    """Groups of what has the same key, each in the given order, by their first members.

    Args:
        keyed: what to group, with its key; None: it is a group of its own.
        largest: how many jobs a group may be; with less than 2 there are only groups of one job.
        pack: how many members share a job. Those of a group fill all of its jobs, or are fewer than fill one.
    """
    groups: dict[str | int, list[T]] = {}
    for number, (key, member) in enumerate(keyed):
        groups.setdefault(number if key is None else key, []).append(member)
    size = max(1, largest) * pack
    parts: list[Sequence[T]] = []
    for group in groups.values():
        full = len(group) // pack * pack
        parts += [group[start : min(start + size, full)] for start in range(0, full, size)]
        parts += [group[full:]] if full < len(group) else []
    return parts


def pack_of_group(pack: Pack | None, members: int) -> Pack | None:
    """How the members of one of the groups of :func:`split_groups` share jobs; None: each has its own.

    Args:
        pack: how they are to.
        members: how many there are: if they do not fill a job, they are a smaller pack.
    """
    return pack if pack is None or members >= pack.runs else replace(pack, runs=members)
