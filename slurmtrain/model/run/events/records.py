"""Records inside events: plain JSON mappings whose known keys have the right types once they have been read.

They are read like events: a value of the wrong type counts as missing and is reported, unknown keys are kept, and a
record without a required key is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from slurmtrain.model.run.events.values import (
    READERS,
    UNUSABLE,
    Reader,
    is_index,
    is_text,
    list_of,
    reader_of,
    values_of,
)

ProcessRecord: TypeAlias = Mapping[str, Any]
"""A process: ``host``, ``boot`` (the machine's boot id), ``pid``, and ``start`` (in clock ticks since boot)."""
FailureRecord: TypeAlias = Mapping[str, Any]
"""A rank that failed: ``rank``, ``pid``, ``exit_code`` or ``signal``, ``at`` (seconds since 1970), ``error``,
``last_lines`` of its log. If the run's command starts the ranks itself, ``node`` is its node, and ``rank`` is None
where it is the command that failed."""
FindingRecord: TypeAlias = Mapping[str, Any]
"""What a check found: ``check``, ``status``, ``summary`` and, if there is any, ``evidence``."""
RankRecord: TypeAlias = Mapping[str, Any]
"""A rank of a hanging run: ``rank``, ``node``, ``step``, ``phase``, ``idle_s`` (seconds), ``state``, ``stack``, ``cpu``
(cores)."""
GitRecord: TypeAlias = Mapping[str, Any]
"""A revision: ``commit``, whether files differ from it (``dirty``) and how many (``modified``), and the ``branch``, if
one is checked out."""
NetworkRecord: TypeAlias = Mapping[str, Any]
"""A network that ranks could train over: ``name``, ``family``, ``interfaces`` and ``addresses`` by host, ``kind``,
``speed_mbps``, ``mtu``, ``measured_mb_per_s``, ``pinned``, ``proved``, ``problems``."""
AddressRecord: TypeAlias = Mapping[str, Any]
"""An address that no rank could train over: ``host``, ``interface``, ``address``, ``why``."""
EvidenceRecord: TypeAlias = Mapping[str, Any]
"""What an agent saw besides the ranks: ``oom_kills``, ``memory_limit`` (bytes), ``xids`` (``code``, ``bus``, ``times``,
``line``), ``gone`` (nodes), ``slurm`` (its answer)."""
ParentRecord: TypeAlias = Mapping[str, Any]
"""A run that another one comes from: its id ``run``, the ``relation``, and the ``step`` of a checkpoint."""
RoundRecord: TypeAlias = Mapping[str, Any]
"""The end of a round of ranks: ``cause``, ``began_at_step``, ``committed`` (step), ``reached`` (step), ``where``,
``foreign``, ``began_from`` (fingerprint), ``left`` (fingerprint)."""


# For each record: its required and its optional keys, with the types of their values as annotations.
RECORD_KEYS: Mapping[str, tuple[dict[str, str], dict[str, str]]] = {
    "ProcessRecord": ({"host": "str", "boot": "str", "pid": "int", "start": "int"}, {}),
    "FailureRecord": (
        {"rank": "int | None"},
        {"node": "int | None", "pid": "int | None", "exit_code": "int | None", "signal": "str | None",
         "at": "float | None", "error": "str | None", "last_lines": "Sequence[str] | None"},
    ),
    "FindingRecord": ({}, {"check": "str", "status": "str", "summary": "str", "evidence": "Mapping[str, Any]"}),
    "RankRecord": (
        {},
        {"rank": "int", "node": "int", "step": "int", "phase": "str", "idle_s": "float", "state": "str",
         "stack": "Sequence[str]", "cpu": "float | None"},
    ),
    "GitRecord": ({"commit": "str"}, {"dirty": "bool", "modified": "int", "branch": "str"}),
    "NetworkRecord": (
        {},
        {"name": "str", "family": "int", "interfaces": "Mapping[str, str]", "addresses": "Mapping[str, str]",
         "kind": "str", "speed_mbps": "float | None", "mtu": "int", "measured_mb_per_s": "float | None",
         "pinned": "bool", "proved": "bool | None", "problems": "Sequence[str]"},
    ),
    "AddressRecord": ({"host": "str", "interface": "str", "address": "str", "why": "str"}, {}),
    "XidRecord": ({"code": "int"}, {"bus": "str", "times": "int", "line": "str"}),
    "EvidenceRecord": (
        {},
        {"oom_kills": "int", "memory_limit": "int | None", "xids": "Sequence[XidRecord]", "gone": "Sequence[str]",
         "slurm": "Mapping[str, Any]"},
    ),
    "ParentRecord": ({"run": "str", "relation": "str"}, {"step": "int | None"}),
    "RoundRecord": (
        {"cause": "str", "began_at_step": "int", "committed": "int"},
        {"reached": "int | None", "where": "str", "foreign": "bool", "began_from": "str | None", "left": "str | None"},
    ),
}  # fmt: skip


def _reader(required: dict[str, str], optional: dict[str, str]) -> Reader:
    """A reader of records with these keys."""
    readers = {key: reader_of(annotation) for key, annotation in (required | optional).items()}
    anything = READERS["Any"]

    def read(value: object, left_out: list[object]) -> Any:
        if not isinstance(value, dict):
            return UNUSABLE
        usable = {}
        for key, item in value.items():
            before = len(left_out)
            kept = readers.get(key, anything)(item, left_out) if is_text(key) else UNUSABLE
            if kept is UNUSABLE:
                left_out.append(item)
            else:
                usable[key] = item if len(left_out) == before else kept
        return usable if required.keys() <= usable.keys() else UNUSABLE

    return read


for _name, _keys in RECORD_KEYS.items():
    READERS[_name] = _reader(*_keys)
    READERS[f"Sequence[{_name}]"] = list_of(READERS[_name], leave_out=True)
    # Ranks and nodes by number.
    READERS[f"Mapping[str, {_name}]"] = values_of(READERS[_name], is_index)
# ``elected`` is an index in this list.
READERS["Sequence[NetworkRecord]"] = list_of(READERS["NetworkRecord"])
