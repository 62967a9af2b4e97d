"""What the facts of each check mean for each node, as findings. Pure.

Facts are what :func:`slurmtrain.runtime.preflight.facts.measure.measure_all` returns on every node. A check that
compares nodes receives the facts of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from statistics import median_low
from typing import Any

from slurmtrain.model.experiment.sections import PreflightSpec
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.preflight.finding import Finding, apply_level
from slurmtrain.model.preflight.hardware import judge_hardware

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
    "python": "Python",
    "torch": "torch",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "driver": "driver",
    "slurmtrain": "slurmtrain",
}
# How many hosts a summary names.
_MAX_NAMED = 3


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
    for check, level in _levels(facts, spec):
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


def _levels(facts: Mapping[int, Mapping[str, Facts]], spec: Spec) -> Iterator[tuple[str, str]]:
    """Checks that are judged here and their levels, the spec's own first."""
    own = [field.name for field in fields(PreflightSpec)]
    for check in own:
        if check in _JUDGES:
            yield check, getattr(spec.preflight, check).level
    for check in sorted({check for measured in facts.values() for check in measured} - {*own, "plugins"}):
        yield check, spec.preflight.plugins.get(check, "fail")
    yield "plugins", "fail"


def _judge_check(
    check: str, facts: Mapping[int, Facts | None], spec: Spec, hosts: Mapping[int, str]
) -> dict[int, Judgement]:
    """Judge one check, for the nodes that have facts about it or should have them."""
    judgements = {node: judgement for node, of_node in facts.items() if (judgement := _judge_missing_facts(of_node))}
    measured = {node: of_node for node, of_node in facts.items() if of_node is not None and node not in judgements}
    try:
        judgements |= _JUDGES.get(check, _judge_plugin)(measured, spec, hosts)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A node with another version of slurmtrain may report other facts; the check of versions reports it.
        summary = f"its facts cannot be judged: {type(error).__name__}: {error}"
        judgements |= {node: ("warn", summary, {}) for node in measured}
    return dict(sorted(judgements.items()))


def _judge_missing_facts(facts: Facts | None) -> Judgement | None:
    if facts is None:
        return "warn", "it was not measured", {}
    if "skip" in facts:
        return "skip", str(facts["skip"]), {}
    if "error" in facts:
        return "warn", f"could not be measured: {facts['error']}", {"error": facts["error"]}
    if "timeout" in facts:
        return "fail", f"no answer within {facts['timeout']:g} s", {"timeout_s": facts["timeout"]}
    return None


def _each(judge_one: Callable[[Facts, Spec], Judgement]) -> _Judge:
    """The judge of a check that looks at each node by itself."""
    return lambda measured, spec, _: {node: judge_one(facts, spec) for node, facts in measured.items()}


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
            return "skip", f"{hosts[0]} wrote nothing that could be seen", {}
        summary = f"what {hosts[0]} wrote was not seen within {limit:g} s"
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
        for version, (others, has_majority) in _differing_versions(holders, len(measured)).items():
            rest = ", ".join(f"{other} on {_name_hosts(holders[other], hosts)}" for other in others)
            in_minority |= set(holders[version]) if has_majority else set()
            for node in holders[version]:
                differences[node].append(f"{name} {version}, but {rest}")
    return {
        node: _judge_node_versions(facts, differences[node], ambiguous=node not in in_minority)
        for node, facts in measured.items()
    }


def _differing_versions(holders: Mapping[str, Sequence[int]], nodes: int) -> dict[str, tuple[list[str], bool]]:
    """Each deviating version, with the versions that the other nodes have, and whether those nodes are a majority.

    ``holders`` are the nodes with each version, ``nodes`` the number of all nodes.
    """
    common = max(holders, key=lambda version: len(holders[version]), default="")
    if 2 * len(holders.get(common, ())) > nodes:
        return {version: ([common], True) for version in holders if version != common}
    if len(holders) < 2:
        return {}
    return {version: ([other for other in holders if other != version], False) for version in holders}


def _judge_node_versions(facts: Facts, differences: Sequence[str], *, ambiguous: bool) -> Judgement:
    if differences:
        return "fail", "; ".join(differences), {**facts, "ambiguous": True} if ambiguous else facts
    return "pass", ", ".join(f"{name} {facts[key]}" for key, name in _VERSIONS.items() if facts[key]), facts


def _name_hosts(nodes: Sequence[int], hosts: Mapping[int, str]) -> str:
    more = f" and {len(nodes) - _MAX_NAMED} more" if len(nodes) > _MAX_NAMED else ""
    return ", ".join(hosts[node] for node in nodes[:_MAX_NAMED]) + more


def _judge_hardware(measured: Mapping[int, Facts], spec: Spec, hosts: Mapping[int, str]) -> dict[int, Judgement]:
    return judge_hardware(measured, hosts, mixed=spec.resources.mixed)


def _judge_straggler(measured: Mapping[int, Facts], spec: Spec, _: Mapping[int, str]) -> dict[int, Judgement]:
    if not measured:
        return {}
    limit = spec.preflight.straggler.max_ratio
    # The low median: if half of the nodes are slow, they are still compared with the fast half.
    median = median_low(facts["seconds"] for facts in measured.values())

    def judge_seconds(seconds: float) -> Judgement:
        if len(measured) < _STRAGGLER_NODES:
            return "pass", f"{seconds * 1e3:.3g} ms", {"seconds": seconds}
        ratio = seconds / median
        evidence = {"seconds": seconds, "median": median, "ratio": ratio}
        summary = f"{seconds * 1e3:.3g} ms, {ratio:.2g} times the median"
        return ("fail", f"{summary} (limit {limit:g})", evidence) if ratio > limit else ("pass", summary, evidence)

    return {node: judge_seconds(facts["seconds"]) for node, facts in measured.items()}


# --- checks of each node by itself ------------------------------------------------------------------------------


def _judge_gpu(facts: Facts, spec: Spec) -> Judgement:
    fatal_xids, other_xids = _describe_xids(facts["xids"] or ())
    failures = [
        *_count_failures(facts),
        *_memory_failures(facts, spec.preflight.gpu.max_used_mb),
        *fatal_xids,
        *_gemm_failures(facts["gemm"]),
    ]
    if failures:
        return "fail", "; ".join(failures + other_xids), facts
    return ("warn", "; ".join(other_xids), facts) if other_xids else ("pass", _describe_good_gpus(facts), facts)


def _describe_xids(xids: Sequence[Facts]) -> tuple[list[str], list[str]]:
    """The Xid messages that the hardware is to blame for: the messages that mean it is broken, and all others."""
    fatal: list[str] = []
    others: list[str] = []
    for xid in xids:
        if xid["code"] not in _XIDS_OF_PROGRAMS:
            summary = f"{xid['times']} x Xid {xid['code']} of {xid['bus']} in the kernel log"
            (fatal if xid["code"] in FATAL_XIDS else others).append(summary)
    return fatal, others


def _gemm_failures(gemm: Facts) -> Iterator[str]:
    if "error" in gemm:
        yield f"cannot multiply: {gemm['error']}"
    for gpu in gemm.get("gpus", ()):
        if "error" in gpu:
            yield f"GPU {gpu['gpu']} cannot multiply: {gpu['error']}"


def _count_failures(facts: Facts) -> Iterator[str]:
    requested, count, usable = facts["asked"], facts["count"], facts["gemm"].get("count")
    if count is not None and count < requested:
        yield f"{count} of {requested} GPUs"
    # A process can use only one instance of a GPU that is partitioned (MIG), however many there are.
    elif usable is not None and usable < requested and not facts["mig"]:
        yield f"torch can use {usable} of {requested} GPUs"


def _memory_failures(facts: Facts, max_used_mb: int) -> Iterator[str]:
    for index, gpu in enumerate(facts["gpus"]):
        if gpu.get("error"):
            yield f"GPU {index}: {gpu['error']}"
        if gpu.get("uncorrected"):
            yield f"GPU {index} has {_count_noun(gpu['uncorrected'], 'uncorrected memory error')}"
        if gpu.get("pending"):
            yield f"GPU {index} must be reset to replace memory that failed"
        if (gpu.get("used_mb") or 0) > max_used_mb:
            yield f"GPU {index} has {gpu['used_mb']} MB in use (limit {max_used_mb} MB)"


def _describe_good_gpus(facts: Facts) -> str:
    gemm = facts["gemm"]
    multiplied = gemm.get("gpus", ())
    names = sorted({gpu["name"] for gpu in (*facts["gpus"], *multiplied) if gpu.get("name")})
    parts = [_count_noun(facts["count"], "GPU"), *names]
    if multiplied:
        speeds = [gpu["tflops"] for gpu in multiplied]
        parts.append(" to ".join(dict.fromkeys(f"{speed:.3g}" for speed in (min(speeds), max(speeds)))) + " TFLOP/s")
    if "skip" in gemm:
        parts.append(f"no matrix product: {gemm['skip']}")
    if facts["nvml"] is not None:
        parts.append(f"memory errors not checked: {facts['nvml']}")
    return ", ".join(parts)


def _count_noun(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _judge_space(check: str) -> Callable[[Facts, Spec], Judgement]:
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
            return "fail", "no more files can be created: no inode is free", facts
        return "pass", f"{_gb(facts['free'])} free", facts

    return judge_node


def _ms(amount: float) -> str:
    return f"{amount:.0f} ms" if amount >= 10 else f"{amount:.2g} ms"


def _gb(amount: float) -> str:
    """Bytes as GB (1e9 bytes)."""
    return f"{amount / 1e9:.0f} GB" if amount >= 1e10 else f"{amount / 1e9:.3g} GB"


def _judge_limits(facts: Facts, spec: Spec) -> Judgement:
    files, memory = facts["nofile"], facts["memlock"]
    files_problem = _files_problem(files, spec)
    memory_problem = None if memory is None else _memory_problem(memory, facts["rdma"], spec)
    summaries = [
        f"{'any number of' if files is None else files} open files" + (files_problem or ""),
        f"{'any amount' if memory is None else _gb(memory)} of locked memory" + (memory_problem or ""),
    ]
    return "fail" if files_problem or memory_problem else "pass", ", ".join(summaries), facts


def _files_problem(files: int | None, spec: Spec) -> str | None:
    """What is wrong with the limit on open files, None being no limit; None if nothing is wrong."""
    minimum = spec.preflight.limits.min_nofile
    return f" (limit {minimum})" if files is not None and files < minimum else None


def _memory_problem(memory: int, rdma_devices: Sequence[str], spec: Spec) -> str | None:
    """What is wrong with a limit on locked memory, in bytes; None if nothing is."""
    minimum_gb = spec.preflight.limits.min_memlock_gb
    if minimum_gb is not None:
        return f" (limit {minimum_gb:g} GB)" if memory < minimum_gb * 1e9 else None
    # RDMA registers, and so locks, all memory that it sends from and receives into.
    if rdma_devices and spec.network.profile in _RDMA_PROFILES:
        return f" (RDMA over {', '.join(rdma_devices)} needs any amount)"
    return None


def _judge_dns(facts: Facts, spec: Spec) -> Judgement:
    limit = spec.preflight.dns.max_ms
    # A slow lookup delays everything that needs it, so the slowest decides.
    address, slowest = max(facts.items(), key=lambda item: float(item[1]))
    summary = f"{_ms(slowest)} for {address}"
    return ("fail", f"{summary} (limit {limit:g} ms)", facts) if slowest > limit else ("pass", summary, facts)


def _judge_environment(facts: Facts, _: Spec) -> Judgement:
    # "said" holds sentences; journals contain this key as evidence.
    return ("fail", "; ".join(facts["said"]), facts) if facts["said"] else ("pass", "nothing to say", facts)


def _judge_node_of_plugin(facts: Facts, _: Spec) -> Judgement:
    return facts["status"], facts["summary"], facts["evidence"]


_judge_plugin = _each(_judge_node_of_plugin)
_JUDGES: dict[str, _Judge] = {
    "shared": _judge_shared,
    "versions": _judge_versions,
    "gpu": _each(_judge_gpu),
    "hardware": _judge_hardware,
    "disk": _each(_judge_space("disk")),
    "tmp": _each(_judge_space("tmp")),
    "shm": _each(_judge_space("shm")),
    "limits": _each(_judge_limits),
    "dns": _each(_judge_dns),
    "straggler": _judge_straggler,
    "environment": _each(_judge_environment),
}
