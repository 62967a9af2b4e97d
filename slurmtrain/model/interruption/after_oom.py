"""What the next attempt of a run gets after it ran out of memory: pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.experiment.sections import OomSpec
from slurmtrain.model.experiment.values import parse_memory, write_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMemory:
    """What decides whether a batch fits into memory.

    ``memory``: how much an attempt requests per node, in MiB; None if nothing limits it to that. ``accumulation``: into
    how many parts the script divides its batch.
    """

    memory: int | None = None
    accumulation: int = 1

    @classmethod
    def of_attempt(cls, executor: str, resources: Mapping[str, Any]) -> BatchMemory:
        """The batch memory of a run's newest attempt.

        Args:
            executor: what started the run: ``local`` limits no memory.
            resources: the ``resources`` of the attempt, as journaled.
        """
        accumulation = resources.get("accumulation")
        return cls(
            memory=None if executor == "local" else _read_memory(resources.get("mem")),
            accumulation=accumulation if isinstance(accumulation, int) and accumulation > 0 else 1,
        )

    def __str__(self) -> str:
        parts = [] if self.memory is None else [write_size(self.memory << 20)]
        if self.accumulation > 1:
            parts.append(f"its batch in {self.accumulation} parts")
        return " and ".join(parts)

    def overrides(self, before: BatchMemory) -> list[str]:
        """The overrides that give the next attempt this batch memory, after an attempt with ``before``."""
        changes = {"mem": (before.memory, f"{self.memory}M"), "accumulation": (before.accumulation, self.accumulation)}
        now = {"mem": self.memory, "accumulation": self.accumulation}
        return [f"resources.{key}={value}" for key, (old, value) in changes.items() if now[key] != old]


def _read_memory(value: object) -> int | None:
    try:
        return parse_memory(value)
    except ValueError:
        return None


def after_oom(last: BatchMemory, rule: OomSpec, *, of_gpu: bool) -> BatchMemory | None:
    """What the next attempt gets; None if the last one had all that it may have.

    Args:
        last: what the last attempt had.
        rule: the spec's.
        of_gpu: whether it was the memory of a GPU that did not suffice: a job cannot request more of that.
    """
    if not of_gpu and last.memory is not None and rule.at_most is not None and last.memory < rule.at_most:
        more = min(math.ceil(last.memory * rule.mem), rule.at_most)
        return BatchMemory(memory=more, accumulation=last.accumulation)
    parts = last.accumulation * (rule.accumulation or 0)
    if 0 < parts <= rule.max_accumulation:
        return BatchMemory(memory=last.memory, accumulation=parts)
    return None


def why_not(last: BatchMemory, rule: OomSpec, *, of_gpu: bool) -> str:
    """Why :func:`after_oom` gives nothing, in a sentence without a full stop.

    Args:
        last: what the last attempt had.
        rule: the spec's.
        of_gpu: whether it was the memory of a GPU that did not suffice.
    """
    limits = []
    if not of_gpu and last.memory is not None and rule.at_most is not None:
        limits.append(f"requeue.oom.at_most is {write_size(rule.at_most << 20)}")
    if rule.accumulation is not None:
        limits.append(f"requeue.oom.max_accumulation is {rule.max_accumulation}")
    memory = "GPU memory" if of_gpu else "memory"
    had = f" with {last}" if str(last) and not (of_gpu and last.accumulation == 1) else ""
    if not limits:
        return f"it ran out of {memory}{had}, which requeue.oom does not raise, and would again"
    return f"it ran out of {memory}{had}, and {' and '.join(limits)}"
