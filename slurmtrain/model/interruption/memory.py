"""How much memory a run gets after it ran out of it: pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slurmtrain.model.spec.oom import OomSpec
from slurmtrain.model.spec.units import parse_memory, write_size


def requested_memory(executor: str, resources: Mapping[str, Any]) -> int | None:
    """How much memory per node the newest attempt of a run requested, in MiB; None if nothing limits it to that.

    Args:
        executor: what started the run: ``local`` limits nothing.
        resources: the ``resources`` of the attempt, as journaled.
    """
    if executor == "local":
        return None
    try:
        return parse_memory(resources.get("mem"))
    except ValueError:
        return None


def more_memory(memory: int, rule: OomSpec) -> int | None:
    """How much the next attempt requests, in MiB; None if the last one had all that it may have.

    Args:
        memory: what the last attempt requested, in MiB.
        rule: the spec's.
    """
    return min(math.ceil(memory * rule.mem), rule.at_most) if memory < rule.at_most else None


def describe_memory(memory: int) -> str:
    """An amount in MiB, as people write it in a spec."""
    return write_size(memory << 20)
