"""What an attempt had on its nodes, and how it differs from what another one had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurmtrain.model.environment.changes import Changes, changes_between
from slurmtrain.model.environment.software import Software, package_changes

KINDS = ("python", "versions", "packages", "machines", "variables")
# In the order that a description of a machine has.
_PARTS = ("cpu", "cores", "memory", "gpus", "kernel", "os")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What an attempt had; of what nodes share, what the first of them had.

    ``software``: Python and its packages; None if it is not known. ``versions``: of Python, torch, CUDA and so on.
    ``machines``: the kinds of machine, in words, with how many nodes are one. ``variables``: of the ranks.
    """

    software: Software | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    machines: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def kinds_of(machines: Iterable[Mapping[str, str]]) -> dict[str, int]:
    """Kinds of machine, in words, with how many of these there are of each.

    Args:
        machines: What each node says of itself.
    """
    return dict(sorted(Counter(map(_describe_machine, machines)).items()))


def _describe_machine(machine: Mapping[str, str]) -> str:
    texts = {**machine, "cores": f"{machine['cores']} cores" if machine.get("cores") else ""}
    return ", ".join(texts[part] for part in _PARTS if texts.get(part))


def compare(earlier: Environment, later: Environment) -> dict[str, Changes]:
    """What differs, by :data:`KINDS`, where anything does.

    Args:
        earlier: What an attempt had.
        later: What another one had.
    """
    changes: dict[str, Changes] = {"versions": changes_between(earlier.versions, later.versions)}
    if earlier.software is not None and later.software is not None:
        changes["packages"] = package_changes(earlier.software, later.software)
        pythons = ({"python": software.python} for software in (earlier.software, later.software))
        changes["python"] = changes_between(*pythons)
    if earlier.machines and later.machines:
        changes["machines"] = changes_between(_counted(earlier.machines), _counted(later.machines))
    if earlier.versions and later.versions:
        changes["variables"] = changes_between(earlier.variables, later.variables)
    else:
        # One of them is of a version that noted none of this.
        del changes["versions"]
    return {kind: changes[kind] for kind in KINDS if changes.get(kind)}


def _counted(machines: Mapping[str, int]) -> dict[str, str]:
    return {"nodes": "; ".join(f"{count} x ({kind})" for kind, count in machines.items())}
