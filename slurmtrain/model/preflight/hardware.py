"""Whether all ranks of a job compute on the same hardware, and which nodes have what if not. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Facts = Mapping[str, Any]
Judgement = tuple[str, str, Mapping[str, Any]]
# How many nodes of a type a summary names.
_MAX_NAMED = 8
_GIB = 1 << 30


def judge_hardware(measured: Mapping[int, Facts], hosts: Mapping[int, str], *, mixed: bool) -> dict[int, Judgement]:
    """Judge whether a mixture of hardware is one that the spec allows.

    Different GPUs are a failure; different CPUs, in a job without GPUs, are a warning. No node is at fault: each works.

    Args:
        measured: By node, ``gpus``, which have a ``name`` and ``memory`` in bytes or None; or ``cpu``, the model, and
            ``cpus``, how many of them the node's ranks may use.
        hosts: The names of the nodes.
        mixed: Whether the spec allows it: ``resources.mixed``.

    Returns:
        A status, a summary and evidence for each node.
    """
    types = {node: describe_hardware(facts) for node, facts in measured.items()}
    holders: dict[str, list[str]] = {}
    for node, description in types.items():
        holders.setdefault(description, []).append(hosts[node])
    if len(holders) < 2 and not any(_differ(facts) for facts in measured.values()):
        return {node: ("pass", types[node], facts) for node, facts in measured.items()}
    mixture = "; ".join(f"{_name_hosts(names)}: {description}" for description, names in holders.items())
    if mixed:
        return {node: ("pass", types[node], {**facts, "mixed": True}) for node, facts in measured.items()}
    if not any(facts.get("gpus") for facts in measured.values()):
        summary = f"CPUs differ, and each step waits for the slowest rank ({mixture}): 'resources.mixed: true' balances"
        status = "warn"
    else:
        summary = f"GPUs differ ({mixture}): set 'resources.mixed: true', or request one type"
        status = "fail"
    return {node: (status, summary, {**facts, "ambiguous": True}) for node, facts in measured.items()}


def describe_hardware(facts: Facts) -> str:
    """What a node with these ``facts`` has, in words: ``8 x NVIDIA A100-SXM4-80GB, 80 GiB``."""
    if not facts.get("gpus"):
        return f"{facts['cpus']:g} x {facts['cpu']}"
    counts = Counter(map(_describe_gpu, facts["gpus"]))
    return " and ".join(f"{count} x {gpu}" for gpu, count in sorted(counts.items()))


def _describe_gpu(gpu: Facts) -> str:
    """The same for GPUs that differ only in what the driver keeps of their memory."""
    name = gpu.get("name") or "GPU of an unknown type"
    return f"{name}, {gpu['memory'] / _GIB:.0f} GiB" if gpu.get("memory") else name


def _differ(facts: Facts) -> bool:
    """Whether the GPUs of one node differ."""
    return len(set(map(_describe_gpu, facts.get("gpus") or ()))) > 1


def _name_hosts(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
