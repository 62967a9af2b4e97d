"""Why ranks died, beyond how they ended: what the kernel of their node has noted meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slurmtrain.model.interruption.exit_report import ExitReport
from slurmtrain.runtime.agent.kernel_log import MemoryEvents, last_record, look, oom_reason, xids

# Errors of a GPU itself, after which others of its node may do better (NVIDIA's catalogue of Xid errors).
_OF_GPU = frozenset({48, 63, 64, 74, 79, 92, 95, 119, 120})


@dataclass(frozen=True, slots=True)
class Before:
    """What the kernel had noted before the ranks started."""

    memory: MemoryEvents
    record: int | None

    @classmethod
    def now(cls) -> Before:
        """Look now."""
        return cls(look(), last_record())


def explained(ending: ExitReport, before: Before) -> ExitReport:
    """The ending of a node, with what was noted since: a rank that was killed for memory has not crashed."""
    memory, errors = look().since(before.memory), xids(before.record)
    found: dict[str, Any] = {}
    if memory.kills:
        found["oom_kills"] = memory.kills
        found["memory_limit"] = memory.limit_bytes
    if errors:
        found["xids"] = errors
    if ending.cause == "crash":
        ending = _out_of_memory(ending, memory)
    return replace(ending, evidence={**ending.evidence, **found}) if found else ending


def gpu_failed(ending: ExitReport) -> bool:
    """Whether a GPU of the node is to blame."""
    return any(error.get("code") in _OF_GPU for error in ending.evidence.get("xids", ()))


def _out_of_memory(ending: ExitReport, memory: MemoryEvents) -> ExitReport:
    # Of a whole machine, some other job's may have been killed.
    kills = (memory.kills or 0) if memory.own else 0
    for failure in ending.failures[:1]:
        reason = oom_reason(failure.get("signal"), kills, memory.limit_bytes, _said(failure), rank=failure.get("rank"))
        if reason is not None:
            return replace(ending, cause="oom", reason=f"{reason}; {ending.reason}")
    return ending


def _said(failure: Mapping[str, Any]) -> str:
    return "\n".join([failure.get("error") or "", *failure.get("last_lines", ())[-3:]])
