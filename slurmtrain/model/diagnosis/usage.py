"""The resources that a run requested and used, and the request that would have sufficed. Pure.

Memory, CPUs and GPUs are per node, as requests are: the figures of the node that needed the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from slurmtrain.model.diagnosis.node_load import GPU_MEMORY, JOB_CORES, JOB_MEMORY, UTILIZATION, LoadSample
from slurmtrain.model.experiment.values import parse_duration, parse_node_memory, write_duration
from slurmtrain.model.interruption.outlook import format_span

RESOURCES = ("memory", "cpus", "gpus", "time")
MARGINS: Mapping[str, float] = {"memory": 0.2, "cpus": 0.0, "gpus": 0.0, "time": 0.25}
"""What a request should have beyond the use, as a share: another run of the same spec needs a little more or less."""
_MEGABYTE, _MIB, _GIB = 1e6, 1 << 20, 1 << 30
# A request that is larger than what suffices by less than this share is right.
_FITS = 0.25
# Fewer samples say too little about the use between them.
_LEAST_SAMPLES = 5
# CPU cores as they were busy except for so large a share of the samples.
_RARE = 0.05
# A GPU that was never busy for so many percent of the time was not used.
_LEAST_GPU = 3.0
# A shorter time limit makes no job start sooner.
_LEAST_TIME_S = 600
# Amounts as people write them: up to the first number, in units of the second.
_STEPS_GIB = ((1.0, 0.125), (8.0, 0.5), (64.0, 1.0), (256.0, 4.0), (math.inf, 16.0))
_STEPS_S = ((3600, 300), (21_600, 900), (math.inf, 3600))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One resource of a run, as an entry of ``usage`` in the JSON contract.

    Attributes:
        resource: One of :data:`RESOURCES`.
        requested: How much it asked for; None: it did not say, or takes what there is.
        used: How much it used at most; of CPUs, on average; None: unknown.
        suffices: How much would have sufficed, with the margin; None: not known yet.
        unit: ``bytes``, ``cores``, ``GPUs`` or ``seconds``.
        margin: What ``suffices`` has beyond the use, as a share.
        request: The same as a spec has it, such as ``mem: 12GB``; None: unknown.
        why: This as a sentence, without a full stop; empty if nothing is known.
        utilization: How busy GPUs were on average, as a share; None: unknown, or other resources.
        memory_bytes: The most memory in use on one GPU; None: likewise.
    """

    resource: str
    unit: str
    requested: float | None = None
    used: float | None = None
    suffices: float | None = None
    margin: float = 0.0
    request: str | None = None
    why: str = ""
    utilization: float | None = None
    memory_bytes: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        plain = asdict(self)
        return {"resource": plain.pop("resource"), "asked": plain.pop("requested"), **plain}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """What the samples of a node in one attempt say. None: nothing.

    ``cores`` is a mean, ``busy_cores`` was exceeded rarely; ``gpus_used`` counts GPUs that did anything.
    """

    samples: int
    memory_bytes: float | None = None
    cores: float | None = None
    busy_cores: float | None = None
    gpus_used: int | None = None
    utilization: float | None = None
    gpu_memory_bytes: float | None = None


def use_of_node(samples: Iterable[LoadSample]) -> NodeUse:
    """What a node used in one attempt, by all of its ``samples``."""
    count, memory, cores = 0, [], []
    busy: dict[int, list[float]] = {}
    held: list[float] = []
    for sample in samples:
        count += 1
        memory += [sample.figures[JOB_MEMORY] * _MEGABYTE] if JOB_MEMORY in sample.figures else []
        cores += [sample.figures[JOB_CORES]] if JOB_CORES in sample.figures else []
        held += [megabytes * _MEGABYTE for megabytes in sample.of_gpus(GPU_MEMORY).values()]
        for gpu, percent in sample.of_gpus(UTILIZATION).items():
            busy.setdefault(gpu, []).append(percent)
    cores.sort()
    means = [sum(each) / len(each) / 100 for each in busy.values()]
    return NodeUse(
        samples=count,
        memory_bytes=max(memory, default=None),
        cores=sum(cores) / len(cores) if cores else None,
        busy_cores=cores[max(0, math.ceil((1 - _RARE) * len(cores)) - 1)] if cores else None,
        gpus_used=sum(max(each) >= _LEAST_GPU for each in busy.values()) if busy else None,
        utilization=sum(means) / len(means) if means else None,
        gpu_memory_bytes=max(held, default=None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Elapsed:
    """How long a run has run. Times are in seconds; ``to_go``: until its last step, None: unknown.

    ``longest`` is of one attempt, ``total`` of all. ``causes``: why attempts ended.
    """

    longest: float | None
    total: float
    to_go: float | None
    is_completed: bool
    causes: Sequence[str] = ()


def judge_usage(resources: Mapping[str, Any], nodes: Sequence[NodeUse], elapsed: Elapsed) -> list[Usage]:
    """What a run asked for and used, an entry for each of :data:`RESOURCES`, also where nothing is known.

    Args:
        resources: The spec's ``resources``, as written into a plan.
        nodes: What nodes used, of all attempts.
        elapsed: How long it has run.
    """
    # Components ask for different amounts, of nodes that nothing here tells apart.
    requested = {} if resources.get("components") else resources
    # Of a run that ended early, the rest of its work might have used more.
    is_typical = elapsed.is_completed or elapsed.to_go is not None
    is_known = is_typical and max((each.samples for each in nodes), default=0) >= _LEAST_SAMPLES
    gpus = requested.get("gpus_per_node") or 0
    ranks = requested.get("procs_per_node") or gpus or 1
    cores = ranks * requested["cpus_per_proc"] if requested.get("cpus_per_proc") else None
    return [
        _memory_usage(
            _read(parse_node_memory, requested.get("mem")), nodes, is_known=is_known, ran_out="oom" in elapsed.causes
        ),
        _cpu_usage(cores, ranks, nodes, is_known=is_known),
        _gpu_usage(gpus, nodes, is_known=is_known),
        _time_usage(_read(parse_duration, requested.get("time")), elapsed),
    ]


def _read(parse: Callable[[Any], int], value: Any) -> int | None:
    """An amount as a plan has it; None if there is none, or it cannot be read."""
    with suppress(ValueError):
        return None if value is None else parse(value)
    return None


def _memory_usage(request_mib: int | None, nodes: Sequence[NodeUse], *, is_known: bool, ran_out: bool) -> Usage:
    requested, used = request_mib * _MIB if request_mib else None, _most(each.memory_bytes for each in nodes)
    usage, margin = Usage(resource="memory", unit="bytes", requested=requested, used=used), MARGINS["memory"]
    of_request = "" if requested is None else f" of {_write_memory(requested)}"
    if ran_out:
        # More than was ever in use would have been needed.
        return replace(usage, why=f"it ran out of memory{f' with {_write_memory(requested)}' if requested else ''}")
    if used is None:
        return usage
    why = f"at most {_write_memory(used)}{of_request} of a node was in use"
    if not is_known:
        return replace(usage, why=why)
    suffices = _up(used * (1 + margin) / _GIB, _STEPS_GIB) * _GIB
    request = f"mem: {_write_memory(suffices)}"
    return replace(
        usage, suffices=suffices, margin=margin, request=request, why=why + _request_advice(usage, suffices, request)
    )


def _cpu_usage(requested: int | None, ranks: int, nodes: Sequence[NodeUse], *, is_known: bool) -> Usage:
    used, busy = _most(each.cores for each in nodes), _most(each.busy_cores for each in nodes)
    usage = Usage(resource="cpus", unit="cores", requested=requested, used=None if used is None else round(used, 2))
    if used is None or busy is None:
        return usage
    of_request = "" if requested is None else f" of {requested}"
    why = f"{used:.1f}{of_request} cores of a node were busy on average, and rarely more than {busy:.1f}"
    if not is_known:
        return replace(usage, why=why)
    each = max(1, math.ceil(busy / ranks))
    request = f"cpus_per_proc: {each}"
    advice = _request_advice(usage, each * ranks, request)
    return replace(usage, suffices=each * ranks, request=request, why=why + advice)


def _gpu_usage(requested: int, nodes: Sequence[NodeUse], *, is_known: bool) -> Usage:
    if not requested:
        # Other GPUs that it can see are not its own.
        return Usage(resource="gpus", unit="GPUs", requested=requested)
    used = _most(each.gpus_used for each in nodes)
    shares = [each.utilization for each in nodes if each.utilization is not None]
    utilization = round(sum(shares) / len(shares), 4) if shares else None
    usage = Usage(
        resource="gpus",
        unit="GPUs",
        requested=requested,
        used=used,
        utilization=utilization,
        memory_bytes=_most(each.gpu_memory_bytes for each in nodes),
    )
    if used is None or utilization is None:
        return usage
    held = "" if usage.memory_bytes is None else f", with at most {_write_memory(usage.memory_bytes)} of their memory"
    why = f"{used:g} of {requested} GPUs of a node were used, {100 * utilization:.0f} % of the time{held}"
    # Ranks have a GPU each: with fewer of them it would be another run.
    if not is_known or used >= requested:
        return replace(
            usage, suffices=requested if is_known else None, request=_gpu_request(requested, is_known), why=why
        )
    request = _gpu_request(max(1, int(used)), is_known)
    return replace(usage, suffices=max(1, used), request=request, why=f"{why}: {request} would have sufficed")


def _gpu_request(count: int, is_known: bool) -> str | None:
    return f"gpus_per_node: {count}" if is_known else None


def _time_usage(request_s: int | None, elapsed: Elapsed) -> Usage:
    usage = Usage(resource="time", unit="seconds", requested=request_s, used=elapsed.longest)
    if elapsed.longest is None:
        return usage
    limit = "" if request_s is None else f" of {format_span(request_s)}"
    why = f"the longest attempt ran for {format_span(elapsed.longest)}{limit}"
    # With a longer limit, an attempt that reached it would have gone on.
    needs = elapsed.total if "timeout" in elapsed.causes else elapsed.longest
    if elapsed.to_go is not None:
        needs, why = needs + elapsed.to_go, f"{why}, and {format_span(elapsed.to_go)} are to go"
    elif not elapsed.is_completed:
        return usage if request_s is None else replace(usage, why=why)
    if "timeout" in elapsed.causes:
        why += f"; all attempts together ran for {format_span(elapsed.total)}"
    suffices = max(_LEAST_TIME_S, _up(needs * (1 + MARGINS["time"]), _STEPS_S))
    request = f'time: "{write_duration(int(suffices))}"'
    advice = _request_advice(usage, suffices, request)
    return replace(usage, suffices=suffices, margin=MARGINS["time"], request=request, why=why + advice)


def _request_advice(usage: Usage, suffices: float, request: str) -> str:
    """What to ask for, if that is something else, as the end of a sentence."""
    if usage.requested is not None and suffices <= usage.requested <= suffices * (1 + _FITS):
        return ""
    is_short = usage.requested is not None and usage.requested < suffices
    return f": {request} would {'be needed' if is_short else 'have sufficed'}"


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _up(amount: float, steps: Sequence[tuple[float, float]]) -> float:
    """The next larger amount that people would write. ``steps``: amounts, each with the unit of amounts up to it."""
    step = next(step for most, step in steps if amount <= most)
    return math.ceil(round(amount / step, 6)) * step


def _write_memory(count: float) -> str:
    """Bytes in the unit that people use, which specs read back if it is a multiple of 1 MiB."""
    gib = count / _GIB
    return f"{gib:.3g}GB" if gib >= 1 else f"{max(1.0, count / _MIB):.0f}MB"
