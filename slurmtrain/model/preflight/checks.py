"""What the facts of each check say of each node: pure.

Facts are what :func:`slurmtrain.runtime.preflight.facts.measure.measure_all` returns on every node. A check that
compares nodes is given the facts of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from statistics import median_low
from typing import Any

from slurmtrain.model.preflight.finding import Finding, apply_level
from slurmtrain.model.spec.preflight_checks import PreflightSpec
from slurmtrain.model.spec.spec import Spec

Facts = Mapping[str, Any]
# Status, summary and evidence of one check on one node.
Judgement = tuple[str, str, Mapping[str, Any]]
_Judge = Callable[[Mapping[int, Facts], Spec, Mapping[int, str]], Mapping[int, Judgement]]

# Below this many nodes nobody can say which one is slow.
_STRAGGLER_NODES = 3
# What the driver reports of hardware that needs a reset or a repair, by NVIDIA's Xid catalogue: uncorrected memory
# errors (48, 95), memory that could not be replaced (64), NVLink (74), fallen off the bus (79).
FATAL_XIDS = frozenset({48, 64, 74, 79, 95})
# What a program causes in itself, by the same catalogue: an exception, a wrong address, its own end.
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
_NAMED = 3


def judge_checks(
    facts: Mapping[int, Mapping[str, Facts]], spec: Spec, hosts: Mapping[int, str]
) -> dict[int, list[Finding]]:
    """What each node's facts, by check, amount to: findings in the order of the spec's sections, plug-ins last.

    Facts that say why there are none are treated alike for all checks: ``skip`` passes the check over, ``error`` is a
    warning, ``timeout`` a failure. Checks of the network and of the clocks are judged elsewhere.
    """
    findings: dict[int, list[Finding]] = {node: [] for node in sorted(facts)}
    for check, level in _levels(facts, spec):
        if level == "off":
            continue
        known = {node: facts[node].get(check) for node in findings if check in _JUDGES or check in facts[node]}
        for node, verdict in _verdicts(check, known, spec, hosts).items():
            findings[node].append(apply_level(Finding(check, *verdict), level))
    return findings


def blamed_nodes(findings: Mapping[int, Sequence[Finding]]) -> set[int]:
    """The nodes that an attempt should go on without: those with a failure that is theirs.

    A failure whose evidence says ``ambiguous`` shows only that nodes differ. One that all of several nodes share, such
    as a full shared disk, is the fault of none of them.
    """
    nodes: dict[str, set[int]] = {}
    for node, found in findings.items():
        for finding in found:
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


def _verdicts(
    check: str, known: Mapping[int, Facts | None], spec: Spec, hosts: Mapping[int, str]
) -> dict[int, Judgement]:
    """Verdicts of one check, for the nodes that have facts of it or should have."""
    verdicts = {node: verdict for node, facts in known.items() if (verdict := _without_facts(facts))}
    measured = {node: facts for node, facts in known.items() if facts is not None and node not in verdicts}
    try:
        verdicts |= _JUDGES.get(check, _plugin)(measured, spec, hosts)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A node whose slurmtrain is another version may say other things; the check of versions names it.
        said = f"its facts cannot be judged: {type(error).__name__}: {error}"
        verdicts |= {node: ("warn", said, {}) for node in measured}
    return dict(sorted(verdicts.items()))


def _without_facts(facts: Facts | None) -> Judgement | None:
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


def _shared(measured: Mapping[int, Facts], spec: Spec, hosts: Mapping[int, str]) -> dict[int, Judgement]:
    limit = min(spec.preflight.shared.timeout_s, spec.preflight.timeout_s)
    written = "write_ms" in measured.get(0, {})
    # Where nobody but the writer sees the file, it may as well be the writer that has another directory.
    someone = any("read_ms" in facts for node, facts in measured.items() if node != 0)

    def one(node: int, facts: Facts) -> Judgement:
        if "refused" in facts:
            return "fail", f"cannot be written: {facts['refused']}", {"reason": facts["refused"]}
        if "read_ms" in facts:
            wrote = f"written in {_ms(facts['write_ms'])}, " if "write_ms" in facts else ""
            return "pass", f"{wrote}read after {_ms(facts['read_ms'])}", facts
        if not written:
            return "skip", f"{hosts[0]} wrote nothing that could be seen", {}
        said = f"what {hosts[0]} wrote was not seen within {limit:g} s"
        return "fail", said, {"timeout_s": limit} | ({} if someone or node == 0 else {"ambiguous": True})

    return {node: one(node, facts) for node, facts in measured.items()}


def _versions(measured: Mapping[int, Facts], _: Spec, hosts: Mapping[int, str]) -> dict[int, Judgement]:
    """The minority is at fault; where no version has a majority, all nodes fail, and none is to blame alone."""
    odd: dict[int, list[str]] = {node: [] for node in measured}
    sure: set[int] = set()
    for key, name in _VERSIONS.items():
        holders: dict[str, list[int]] = {}
        for node, facts in measured.items():
            holders.setdefault(facts[key] or "none", []).append(node)
        common = max(holders, key=lambda value: len(holders[value]), default="")
        majority = 2 * len(holders.get(common, ())) > len(measured)
        for value, nodes in holders.items():
            against = [other for other in holders if other != value and (other == common or not majority)]
            if not against or (majority and value == common):
                continue
            rest = ", ".join(f"{other} on {_names(holders[other], hosts)}" for other in against)
            sure |= set(nodes) if majority else set()
            for node in nodes:
                odd[node].append(f"{name} {value}, but {rest}")
    return {
        node: (
            "fail" if odd[node] else "pass",
            "; ".join(odd[node]) or ", ".join(f"{name} {facts[key]}" for key, name in _VERSIONS.items() if facts[key]),
            {**facts, "ambiguous": True} if odd[node] and node not in sure else facts,
        )
        for node, facts in measured.items()
    }


def _names(nodes: Sequence[int], hosts: Mapping[int, str]) -> str:
    more = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
    return ", ".join(hosts[node] for node in nodes[:_NAMED]) + more


def _straggler(measured: Mapping[int, Facts], spec: Spec, _: Mapping[int, str]) -> dict[int, Judgement]:
    if not measured:
        return {}
    limit = spec.preflight.straggler.max_ratio
    median = median_low(facts["seconds"] for facts in measured.values())

    def one(seconds: float) -> Judgement:
        if len(measured) < _STRAGGLER_NODES:
            return "pass", f"{seconds * 1e3:.3g} ms", {"seconds": seconds}
        ratio = seconds / median
        evidence = {"seconds": seconds, "median": median, "ratio": ratio}
        said = f"{seconds * 1e3:.3g} ms, {ratio:.2g} times the median"
        return ("fail", f"{said} (limit {limit:g})", evidence) if ratio > limit else ("pass", said, evidence)

    return {node: one(facts["seconds"]) for node, facts in measured.items()}


# --- checks of each node by itself ------------------------------------------------------------------------------


def _gpu(facts: Facts, spec: Spec) -> Judgement:
    failures = [*_count_failures(facts), *_memory_failures(facts, spec.preflight.gpu.max_used_mb)]
    warnings: list[str] = []
    for xid in facts["xids"] or ():
        if xid["code"] in _XIDS_OF_PROGRAMS:
            continue
        said = f"{xid['times']} x Xid {xid['code']} of {xid['bus']} in the kernel log"
        (failures if xid["code"] in FATAL_XIDS else warnings).append(said)
    gemm = facts["gemm"]
    if "error" in gemm:
        failures.append(f"cannot multiply: {gemm['error']}")
    failures += [
        f"GPU {each['gpu']} cannot multiply: {each['error']}" for each in gemm.get("gpus", ()) if "error" in each
    ]
    if failures:
        return "fail", "; ".join(failures + warnings), facts
    return ("warn", "; ".join(warnings), facts) if warnings else ("pass", _good_gpus(facts), facts)


def _count_failures(facts: Facts) -> Iterator[str]:
    asked, count, usable = facts["asked"], facts["count"], facts["gemm"].get("count")
    if count is not None and count < asked:
        yield f"{count} of {asked} GPUs"
    # A process can use but one instance of a GPU that is divided (MIG).
    elif usable is not None and usable < asked and not facts["mig"]:
        yield f"torch can use {usable} of {asked} GPUs"


def _memory_failures(facts: Facts, max_used_mb: int) -> Iterator[str]:
    for index, gpu in enumerate(facts["gpus"]):
        if gpu.get("error"):
            yield f"GPU {index}: {gpu['error']}"
        if gpu.get("uncorrected"):
            yield f"GPU {index} has {_many(gpu['uncorrected'], 'uncorrected memory error')}"
        if gpu.get("pending"):
            yield f"GPU {index} must be reset to replace memory that failed"
        if (gpu.get("used_mb") or 0) > max_used_mb:
            yield f"GPU {index} has {gpu['used_mb']} MB in use (limit {max_used_mb} MB)"


def _good_gpus(facts: Facts) -> str:
    gemm = facts["gemm"]
    multiplied = gemm.get("gpus", ())
    names = sorted({gpu["name"] for gpu in (*facts["gpus"], *multiplied) if gpu.get("name")})
    said = [_many(facts["count"], "GPU"), *names]
    if multiplied:
        speeds = [gpu["tflops"] for gpu in multiplied]
        said.append(" to ".join(dict.fromkeys(f"{speed:.3g}" for speed in (min(speeds), max(speeds)))) + " TFLOP/s")
    if "skip" in gemm:
        said.append(f"not made to multiply: {gemm['skip']}")
    if facts["nvml"] is not None:
        said.append(f"memory errors not looked for: {facts['nvml']}")
    return ", ".join(said)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _room(check: str) -> Callable[[Facts, Spec], Judgement]:
    def one(facts: Facts, spec: Spec) -> Judgement:
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

    return one


def _ms(amount: float) -> str:
    return f"{amount:.0f} ms" if amount >= 10 else f"{amount:.2g} ms"


def _gb(amount: float) -> str:
    """Bytes as GB, which are 1e9 of them."""
    return f"{amount / 1e9:.0f} GB" if amount >= 1e10 else f"{amount / 1e9:.3g} GB"


def _limits(facts: Facts, spec: Spec) -> Judgement:
    files, memory = facts["nofile"], facts["memlock"]
    wanted, wanted_gb = spec.preflight.limits.min_nofile, spec.preflight.limits.min_memlock_gb
    said = [f"{'any number of' if files is None else files} open files"]
    said.append(f"{'any amount' if memory is None else _gb(memory)} of locked memory")
    good = files is None or files >= wanted
    if not good:
        said[0] += f" (limit {wanted})"
    if memory is not None and wanted_gb is not None and memory < wanted_gb * 1e9:
        said[1] += f" (limit {wanted_gb:g} GB)"
        good = False
    # RDMA registers, and so locks, whatever it sends and receives.
    elif memory is not None and wanted_gb is None and facts["rdma"] and spec.network.profile in _RDMA_PROFILES:
        said[1] += f" (RDMA over {', '.join(facts['rdma'])} needs any amount)"
        good = False
    return "pass" if good else "fail", ", ".join(said), facts


def _dns(facts: Facts, spec: Spec) -> Judgement:
    limit = spec.preflight.dns.max_ms
    address, slowest = max(facts.items(), key=lambda item: float(item[1]))
    said = f"{_ms(slowest)} for {address}"
    return ("fail", f"{said} (limit {limit:g} ms)", facts) if slowest > limit else ("pass", said, facts)


def _environment(facts: Facts, _: Spec) -> Judgement:
    return ("fail", "; ".join(facts["said"]), facts) if facts["said"] else ("pass", "nothing to say", facts)


def _one_plugin(facts: Facts, _: Spec) -> Judgement:
    return facts["status"], facts["summary"], facts["evidence"]


_plugin = _each(_one_plugin)
_JUDGES: dict[str, _Judge] = {
    "shared": _shared,
    "versions": _versions,
    "gpu": _each(_gpu),
    "disk": _each(_room("disk")),
    "tmp": _each(_room("tmp")),
    "shm": _each(_room("shm")),
    "limits": _each(_limits),
    "dns": _each(_dns),
    "straggler": _straggler,
    "environment": _each(_environment),
}
