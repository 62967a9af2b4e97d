"""Findings: what the facts of each check mean for each node, and the worst of several. Pure.

Facts are what :func:`slurmtrain.runtime.preflight.facts.measure.measure_all` returns on every node. A check that
compares nodes receives the facts of all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import median_low
from typing import Any

from slurmtrain.model.experiment.sections import PreflightSpec
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.hostlist import name_some

# From best to worst; a check that was skipped says nothing about the node.
STATUSES = ("skip", "pass", "warn", "fail")
Facts = Mapping[str, Any]
# Status, summary and evidence of one check on one node.
Judgement = tuple[str, str, Mapping[str, Any]]
# Judges the facts of one check by node, with the spec and the names of the hosts.
_Judge = Callable[[Mapping[int, Facts], Spec, Mapping[int, str]], Mapping[int, Judgement]]

# With two nodes, there is no telling whether one is slow or the other one fast.
_STRAGGLER_NODES = 3
# What the driver reports about hardware that needs a reset or a repair, by NVIDIA's Xid catalogue: uncorrected memory
# errors (48, 95), memory that could not be replaced (64), NVLink (74), fallen off the bus (79).
FATAL_XIDS = frozenset({48, 64, 74, 79, 95})
# What a program brings on itself, by the same catalogue: an exception, a wrong address, its own termination.
_XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45})
_RDMA_PROFILES = ("infiniband", "roce", "efa")
_VERSIONS = {
    "python": "Python", "torch": "torch", "cuda": "CUDA", "nccl": "NCCL", "driver": "driver",
    "slurmtrain": "slurmtrain",
}  # fmt: skip
# How many nodes of a type of hardware a summary names.
_MAX_OF_TYPE = 8
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found on one node. ``summary``: a phrase with figures. ``evidence``: plain JSON types only."""

    check: str
    status: str
    summary: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The finding as journaled; empty evidence is omitted."""
        plain: dict[str, Any] = {"check": self.check, "status": self.status, "summary": self.summary}
        return {**plain, "evidence": dict(self.evidence)} if self.evidence else plain


def apply_level(finding: Finding, level: str) -> Finding:
    """The finding; a failure becomes a warning if the spec's ``level`` is ``warn``."""
    return replace(finding, status="warn") if finding.status == "fail" and level == "warn" else finding


def worst_status(findings: Iterable[Finding]) -> str:
    """The worst status among these; ``pass`` if there are none."""
    statuses = [finding.status for finding in findings]
    return max((status for status in statuses if status != "skip"), key=STATUSES.index, default="pass")


def judge_checks(
    facts: Mapping[int, Mapping[str, Facts]], spec: Spec, hosts: Mapping[int, str]
) -> dict[int, list[Finding]]:
    """Judge what each node measured about itself.

    Facts that hold a reason instead are treated alike for all checks: ``skip`` skips the check, ``error`` is a warning,
    ``timeout`` a failure. Checks of the network and of the clocks are judged elsewhere.

    Args:
        facts: By node and check.
        spec: Contains the limits and the levels.
        hosts: The names of the nodes.

    Returns:
        Findings by node, in the order of the spec's sections, plug-ins last.
    """
    findings: dict[int, list[Finding]] = {node: [] for node in sorted(facts)}
    own = [each.name for each in fields(PreflightSpec)]
    levels = {check: getattr(spec.preflight, check).level for check in own if check in _JUDGES}
    of_plugins = {check for of_node in facts.values() for check in of_node} - {*own, "plugins"}
    levels |= {check: spec.preflight.plugins.get(check, "fail") for check in sorted(of_plugins)}
    levels["plugins"] = "fail"
    for check, level in levels.items():
        if level == "off":
            continue
        # A plug-in need not be installed on every node; slurmtrain's own checks are expected on all.
        of_check = {node: facts[node].get(check) for node in findings if check in _JUDGES or check in facts[node]}
        for node, judgement in _judge_check(check, of_check, spec, hosts).items():
            findings[node].append(apply_level(Finding(check, *judgement), level))
    return findings


def blamed_nodes(findings: Mapping[int, Sequence[Finding]]) -> set[int]:
    """The nodes that an attempt should continue without, because they have a failure of their own.

    A failure whose evidence says ``ambiguous`` shows only that nodes differ. If all of several nodes share a failure,
    such as a full shared disk, none of them is at fault.
    """
    nodes: dict[str, set[int]] = {}
    for node, of_node in findings.items():
        for finding in of_node:
            if finding.status == "fail" and not finding.evidence.get("ambiguous"):
                nodes.setdefault(finding.check, set()).add(node)
    shared = len(findings) if len(findings) > 1 else None
    return {node for failed in nodes.values() if len(failed) != shared for node in failed}


def _judge_check(
    check: str, facts: Mapping[int, Facts | None], spec: Spec, hosts: Mapping[int, str]
) -> dict[int, Judgement]:
    """Judge one check, for the nodes that have facts about it or should have them."""
    judgements: dict[int, Judgement] = {}
    measured: dict[int, Facts] = {}
    for node, of_node in facts.items():
        match of_node:
            case None:
                judgements[node] = "warn", "it was not measured", {}
            case {"skip": reason}:
                judgements[node] = "skip", str(reason), {}
            case {"error": error}:
                judgements[node] = "warn", f"could not be measured: {error}", {"error": error}
            case {"timeout": limit_s}:
                judgements[node] = "fail", f"no answer within {limit_s:g} s", {"timeout_s": limit_s}
            case _:
                measured[node] = of_node
    try:
        judgements |= _JUDGES.get(check, _judge_plugin)(measured, spec, hosts)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
        # A node with another version of slurmtrain may report other facts; the check of versions reports it.
        summary = f"its result cannot be evaluated: {type(problem).__name__}: {problem}"
        judgements |= {node: ("warn", summary, {}) for node in measured}
    return dict(sorted(judgements.items()))


def _by_node(judge: Callable[[Facts, Spec], Judgement]) -> _Judge:
    """The judge of a check that looks at each node by itself."""
    return lambda measured, spec, _: {node: judge(facts, spec) for node, facts in measured.items()}


# --- checks that compare nodes ----------------------------------------------------------------------------------


def _judge_shared(measured: Mapping[int, Facts], spec: Spec, hosts: Mapping[int, str]) -> dict[int, Judgement]:
    limit = min(spec.preflight.shared.timeout_s, spec.preflight.timeout_s)
    written = "write_ms" in measured.get(0, {})
    # If only the writer sees the file, it may well be the writer that has a different directory.
    others_read = any("read_ms" in facts for node, facts in measured.items() if node != 0)

    def judge_node(node: int, facts: Facts) -> Judgement:
        if "refused" in facts:
            return "fail", f"cannot be written: {facts['refused']}", {"reason": facts["refused"]}
        if "read_ms" in facts:
            write_time = f"written in {_ms(facts['write_ms'])}, " if "write_ms" in facts else ""
            return "pass", f"{write_time}read after {_ms(facts['read_ms'])}", facts
        if not written:
            return "skip", f"{hosts[0]} could not write a file for this test", {}
        summary = f"a file that {hosts[0]} wrote did not appear within {limit:g} s"
        return "fail", summary, {"timeout_s": limit} | ({} if others_read or node == 0 else {"ambiguous": True})

    return {node: judge_node(node, facts) for node, facts in measured.items()}


def _judge_versions(measured: Mapping[int, Facts], _: Spec, hosts: Mapping[int, str]) -> dict[int, Judgement]:
    """The minority is at fault; if no version has a majority, all nodes fail, and none is to blame alone."""
    differences: dict[int, list[str]] = {node: [] for node in measured}
    in_minority: set[int] = set()
    for key, name in _VERSIONS.items():
        holders: dict[str, list[int]] = {}
        for node, facts in measured.items():
            holders.setdefault(facts[key] or "none", []).append(node)
        common = max(holders, key=lambda version: len(holders[version]), default="")
        has_majority = 2 * len(holders.get(common, ())) > len(measured)
        for version, nodes in holders.items():
            others = [common] if has_majority else [other for other in holders if other != version]
            if others in ([], [version]):
                continue
            rest = ", ".join(f"{other} on {name_some([hosts[node] for node in holders[other]])}" for other in others)
            in_minority |= set(nodes) if has_majority else set()
            for node in nodes:
                differences[node].append(f"{name} {version}, but {rest}")
    judgements: dict[int, Judgement] = {}
    for node, facts in measured.items():
        summary = ", ".join(f"{name} {facts[key]}" for key, name in _VERSIONS.items() if facts[key])
        judgements[node] = "pass", summary, facts
        if differences[node]:
            evidence = facts if node in in_minority else {**facts, "ambiguous": True}
            judgements[node] = "fail", "; ".join(differences[node]), evidence
    return judgements


def judge_hardware(measured: Mapping[int, Facts], spec: Spec, hosts: Mapping[int, str]) -> dict[int, Judgement]:
    """Judge whether a mixture of hardware is one that the spec allows (``resources.mixed``).

    Different GPUs are a failure; different CPUs, in a job without GPUs, are a warning. No node is at fault: each works.

    Args:
        measured: By node, ``gpus``, which have a ``name`` and ``memory`` in bytes or None; or ``cpu``, the model, and
            ``cpus``, how many of them the node's ranks may use.
        spec: Says whether it allows it.
        hosts: The names of the nodes.

    Returns:
        A status, a summary and evidence for each node.
    """
    types: dict[int, str] = {}
    holders: dict[str, list[str]] = {}
    is_mixture = False
    for node, facts in measured.items():
        counts = Counter(map(_describe_gpu, facts.get("gpus") or ()))
        words = [f"{count} x {gpu}" for gpu, count in sorted(counts.items())] or [f"{facts['cpus']:g} x {facts['cpu']}"]
        types[node] = " and ".join(words)
        holders.setdefault(types[node], []).append(hosts[node])
        is_mixture |= len(counts) > 1 or len(holders) > 1
    if not is_mixture or spec.resources.mixed:
        more = {"mixed": True} if is_mixture else {}
        return {node: ("pass", types[node], {**facts, **more}) for node, facts in measured.items()}
    mixture = "; ".join(f"{name_some(names, _MAX_OF_TYPE)}: {description}" for description, names in holders.items())
    if any(facts.get("gpus") for facts in measured.values()):
        summary = f"GPUs differ ({mixture}): set 'resources.mixed: true', or request one type"
        status = "fail"
    else:
        summary = f"CPUs differ, so each step waits for the slowest rank ({mixture}): 'resources.mixed: true' balances"
        status = "warn"
    return {node: (status, summary, {**facts, "ambiguous": True}) for node, facts in measured.items()}


def _describe_gpu(gpu: Facts) -> str:
    """The same text for GPUs that differ only in what the driver keeps of their memory."""
    name = gpu.get("name") or "GPU of an unknown type"
    return f"{name}, {gpu['memory'] / _GIB:.0f} GiB" if gpu.get("memory") else name


def _judge_straggler(measured: Mapping[int, Facts], spec: Spec, _: Mapping[int, str]) -> dict[int, Judgement]:
    limit = spec.preflight.straggler.max_ratio
    seconds_of = {node: facts["seconds"] for node, facts in measured.items()}
    # The low median: if half of the nodes are slow, they are still compared with the fast half.
    median = median_low(seconds_of.values()) if measured else 0.0
    judgements: dict[int, Judgement] = {}
    for node, seconds in seconds_of.items():
        judgements[node] = "pass", f"{seconds * 1e3:.3g} ms", {"seconds": seconds}
        if len(measured) >= _STRAGGLER_NODES:
            ratio = seconds / median
            summary = f"{seconds * 1e3:.3g} ms, {ratio:.2g} times the median"
            summary += f" (limit {limit:g})" if ratio > limit else ""
            evidence = {"seconds": seconds, "median": median, "ratio": ratio}
            judgements[node] = "fail" if ratio > limit else "pass", summary, evidence
    return judgements


# --- checks of each node by itself ------------------------------------------------------------------------------


def _judge_gpu(facts: Facts, spec: Spec) -> Judgement:
    failures: list[str] = []
    remarks: list[str] = []
    requested, count, usable = facts["asked"], facts["count"], facts["gemm"].get("count")
    if count is not None and count < requested:
        failures.append(f"{count} of {requested} GPUs")
    # A process can use only one instance of a GPU that is partitioned (MIG), however many there are.
    elif usable is not None and usable < requested and not facts["mig"]:
        failures.append(f"torch can use {usable} of {requested} GPUs")
    failures += _gpu_failures(facts, spec.preflight.gpu.max_used_mb)
    for xid in facts["xids"] or ():
        if xid["code"] not in _XIDS_OF_PROGRAMS:
            summary = f"{xid['times']} x Xid {xid['code']} of {xid['bus']} in the kernel log"
            (failures if xid["code"] in FATAL_XIDS else remarks).append(summary)
    if failures:
        return "fail", "; ".join(failures + remarks), facts
    return ("warn", "; ".join(remarks), facts) if remarks else ("pass", _describe_good_gpus(facts), facts)


def _gpu_failures(facts: Facts, max_used_mb: int) -> Iterator[str]:
    """What is wrong with each GPU, by NVML and by the matrix product."""
    gemm = facts["gemm"]
    for index, gpu in enumerate(facts["gpus"]):
        if gpu.get("error"):
            yield f"GPU {index}: {gpu['error']}"
        if gpu.get("uncorrected"):
            yield f"GPU {index} has {_count_noun(gpu['uncorrected'], 'uncorrected memory error')}"
        if gpu.get("pending"):
            yield f"GPU {index} must be reset to replace memory that failed"
        if (gpu.get("used_mb") or 0) > max_used_mb:
            yield f"GPU {index} has {gpu['used_mb']} MB in use (limit {max_used_mb} MB)"
    if "error" in gemm:
        yield f"cannot multiply: {gemm['error']}"
    for gpu in gemm.get("gpus", ()):
        if "error" in gpu:
            yield f"GPU {gpu['gpu']} cannot multiply: {gpu['error']}"


def _describe_good_gpus(facts: Facts) -> str:
    gemm = facts["gemm"]
    multiplied = gemm.get("gpus", ())
    names = sorted({gpu["name"] for gpu in (*facts["gpus"], *multiplied) if gpu.get("name")})
    parts = [_count_noun(facts["count"], "GPU"), *names]
    if multiplied:
        speeds = [gpu["tflops"] for gpu in multiplied]
        parts.append(" to ".join(dict.fromkeys(f"{speed:.3g}" for speed in (min(speeds), max(speeds)))) + " TFLOP/s")
    if "skip" in gemm:
        parts.append(f"no matrix product was measured: {gemm['skip']}")
    if facts["nvml"] is not None:
        parts.append(f"memory errors were not checked: {facts['nvml']}")
    return ", ".join(parts)


def _count_noun(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _space_judge(check: str) -> _Judge:
    """The judge of the free space that one of the checks disk, tmp and shm measured."""

    def judge_node(facts: Facts, spec: Spec) -> Judgement:
        limit = getattr(spec.preflight, check).min_gb
        if facts.get("missing"):
            return "fail", f"there is no {facts['path']}", facts
        if not facts["writable"]:
            return "fail", f"{facts['path']} cannot be written", facts
        if facts["free"] < limit * 1e9:
            return "fail", f"{_gb(facts['free'])} free (limit {limit:g} GB)", facts
        if facts["inodes"] == 0:
            return "fail", "no more files can be created: no inodes are free", facts
        return "pass", f"{_gb(facts['free'])} free", facts

    return _by_node(judge_node)


def _ms(amount: float) -> str:
    return f"{amount:.0f} ms" if amount >= 10 else f"{amount:.2g} ms"


def _gb(amount: float) -> str:
    """Bytes as GB (1e9 bytes)."""
    return f"{amount / 1e9:.0f} GB" if amount >= 1e10 else f"{amount / 1e9:.3g} GB"


def _judge_limits(facts: Facts, spec: Spec) -> Judgement:
    # None is no limit.
    files, memory, limits = facts["nofile"], facts["memlock"], spec.preflight.limits
    few_files = f" (limit {limits.min_nofile})" if files is not None and files < limits.min_nofile else ""
    little_memory = ""
    if memory is not None and limits.min_memlock_gb is not None:
        little_memory = f" (limit {limits.min_memlock_gb:g} GB)" if memory < limits.min_memlock_gb * 1e9 else ""
    # RDMA registers, and so locks, all memory that it sends from and receives into.
    elif memory is not None and facts["rdma"] and spec.network.profile in _RDMA_PROFILES:
        little_memory = f" (RDMA over {', '.join(facts['rdma'])} needs any amount)"
    summary = f"{'any number of' if files is None else files} open files{few_files}, "
    summary += f"{'any amount' if memory is None else _gb(memory)} of locked memory{little_memory}"
    return "fail" if few_files or little_memory else "pass", summary, facts


def _judge_dns(facts: Facts, spec: Spec) -> Judgement:
    limit = spec.preflight.dns.max_ms
    # A slow lookup delays everything that needs it, so the slowest decides.
    address, slowest = max(facts.items(), key=lambda item: float(item[1]))
    summary = f"{_ms(slowest)} for {address}"
    return ("fail", f"{summary} (limit {limit:g} ms)", facts) if slowest > limit else ("pass", summary, facts)


_judge_plugin = _by_node(lambda facts, _: (facts["status"], facts["summary"], facts["evidence"]))
_JUDGES: dict[str, _Judge] = {
    "shared": _judge_shared,
    "versions": _judge_versions,
    "gpu": _by_node(_judge_gpu),
    "hardware": judge_hardware,
    "disk": _space_judge("disk"),
    "tmp": _space_judge("tmp"),
    "shm": _space_judge("shm"),
    "limits": _by_node(_judge_limits),
    "dns": _by_node(_judge_dns),
    "straggler": _judge_straggler,
    # "said" holds sentences; journals contain this key as evidence.
    "environment": _by_node(
        lambda facts, _: ("fail" if facts["said"] else "pass", "; ".join(facts["said"]) or "nothing to say", facts)
    ),
}
