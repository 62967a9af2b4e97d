"""Which CPUs of a node each of its ranks runs on: the key ``resources.bind``. Pure.

Memory needs no policy of its own: the kernel gives a process pages of its own NUMA node (set_mempolicy(2)).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

CORES, NUMA, GPU = "cores", "numa", "gpu"
BINDINGS = (CORES, NUMA, GPU)


@dataclass(frozen=True, slots=True)
class Cpu:
    """Where a logical CPU is: its NUMA ``node``, its ``package``, and its ``core`` there, which others may share."""

    node: int = 0
    package: int = 0
    core: int = 0


def bind_ranks(
    bind: str, cpus: Mapping[int, Cpu], ranks: int, near: Sequence[Collection[int]] = ()
) -> list[frozenset[int]]:
    """The CPUs of each rank of a node, by its local rank; none of them is left without any.

    Args:
        bind: One of :data:`BINDINGS`.
        cpus: The CPUs that the node's agent may use.
        ranks: How many ranks the node has.
        near: With ``gpu``, the CPUs near the GPU of each rank; empty for one that is not known.
    """
    if bind == NUMA:
        nodes = sorted({place.node for place in cpus.values()})
        groups = [frozenset(cpu for cpu, place in cpus.items() if place.node == node) for node in nodes]
        return [frozenset().union(*part) for part in _parts(groups, ranks)]
    everywhere = frozenset(cpus)
    usable = [everywhere & frozenset(each) or everywhere for each in near] if bind == GPU else [everywhere] * ranks
    result = []
    for rank, own in enumerate(usable):
        # Ranks that may run on the same CPUs divide them.
        sharing = [other for other, theirs in enumerate(usable) if theirs == own]
        order = _by_core(own, cpus)
        result.append(frozenset().union(*_parts(order, len(sharing))[sharing.index(rank)]))
    return result


def _by_core(own: Collection[int], cpus: Mapping[int, Cpu]) -> list[frozenset[int]]:
    """The physical cores among some CPUs, neighbours beside each other."""
    cores: dict[tuple[int, int, int], set[int]] = {}
    for cpu in sorted(own):
        place = cpus[cpu]
        cores.setdefault((place.node, place.package, place.core), set()).add(cpu)
    return [frozenset(cores[core]) for core in sorted(cores)]


def _parts(groups: Sequence[frozenset[int]], count: int) -> list[Sequence[frozenset[int]]]:
    """Divide ``groups`` into ``count`` parts of about equal size in their order; where there are fewer, parts share."""
    size = len(groups)
    if size < count:
        return [groups[index * size // count : index * size // count + 1] for index in range(count)]
    return [groups[index * size // count : (index + 1) * size // count] for index in range(count)]


def write_cpus(cpus: Collection[int]) -> str:
    """CPUs as the kernel lists them, such as ``0-3,8``."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def read_cpus(text: str) -> set[int]:
    """The CPUs in a list of the kernel's. Raises ValueError."""
    cpus: set[int] = set()
    for span in filter(None, text.strip().split(",")):
        first, _, last = span.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
