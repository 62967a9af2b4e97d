"""The findings of a preflight as rows of tables. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurmtrain.model.preflight.election import natural_sort_key

# The findings by host, each with check, status and summary.
Checks = Mapping[str, Sequence[Mapping[str, Any]]]

CHECK_HEADERS = ("CHECK", "STATUS", "NODES", "FOUND")
NETWORK_HEADERS = ("NETWORK", "CHOSEN", "KIND", "SPEED", "MEASURED", "MTU", "INTERFACES", "PROVED")
# Statuses that need no attention.
_QUIET = ("pass", "skip")
# What fits on a line of a terminal.
_CLOCKS_SHOWN = 8
_PROBLEMS_SHOWN = 2


def check_rows(checks: Checks) -> list[tuple[str, str, str, str]]:
    """A row for each check, with what most nodes report, and one for each node that reports something else."""
    rows = []
    for check, findings in _by_check(checks).items():
        keys = {host: _comparison_key(finding) for host, finding in findings.items()}
        # On hundreds of nodes only those that differ are of interest.
        usual = Counter(keys.values()).most_common(1)[0][0]
        alike = [host for host, key in keys.items() if key == usual]
        status = str(findings[alike[0]]["status"])
        rows.append((check, status, _describe_hosts(alike, len(findings)), _summarize(findings, alike)))
        others = [host for host in findings if host not in alike]
        rows += [(check, str(findings[host]["status"]), host, str(findings[host]["summary"])) for host in others]
    return rows


def notable(checks: Checks) -> list[tuple[str, str, str, str]]:
    """The rows of all checks but those that passed or were skipped."""
    return [row for row in check_rows(checks) if row[1] not in _QUIET]


def describe_count(checks: Checks) -> str:
    """How many checks all nodes passed, and how many all skipped, as a phrase; empty if there are none."""
    statuses = [{str(finding["status"]) for finding in findings.values()} for findings in _by_check(checks).values()]
    passed, skipped = sum(s <= {"pass", "skip"} and s != {"skip"} for s in statuses), statuses.count({"skip"})
    phrases = [f"{passed} check{'s' * (passed != 1)} passed"] if statuses else []
    return ", ".join([*phrases, *([f"{skipped} skipped"] if skipped else [])])


def has_failed(checks: Checks) -> bool:
    """Whether any node failed any check."""
    return any(finding["status"] == "fail" for findings in checks.values() for finding in findings)


def network_rows(network: Mapping[str, Any] | None) -> list[tuple[str, ...]]:
    """A row for each network that an attempt could have used for training, the elected one first."""
    if not network:
        return []
    ordered = sorted(network["networks"], key=lambda candidate: candidate.get("name") != network["elected"])
    return [
        (
            str(candidate.get("name")),
            "yes" if candidate.get("name") == network["elected"] else "",
            str(candidate.get("kind") or "-"),
            speed(candidate.get("speed_mbps")),
            _rate(candidate.get("measured_mb_per_s")),
            str(candidate.get("mtu") or "-"),
            ", ".join(sorted({str(name) for name in candidate.get("interfaces", {}).values()})),
            _proved(candidate),
        )
        for candidate in ordered
    ]


def excluded_addresses(network: Mapping[str, Any] | None) -> list[str]:
    """A line for each address that was not a candidate, with the reason."""
    hosts_by_address: dict[tuple[str, str, str], list[str]] = {}
    for excluded in (network or {}).get("excluded", ()):
        key = (excluded["interface"], excluded["address"], excluded["why"])
        hosts_by_address.setdefault(key, []).append(excluded["host"])
    return [
        f"{interface} {address} on {hosts[0] if len(hosts) == 1 else f'{len(hosts)} nodes'}: {reason}"
        for (interface, address, reason), hosts in hosts_by_address.items()
    ]


def describe_clocks(clock: Mapping[str, Mapping[str, Any]]) -> str:
    """How far each node's clock is ahead of node 0's; of many nodes, only those with the largest offsets."""
    shown = sorted(clock.items(), key=lambda pair: natural_sort_key(pair[0]))
    if len(shown) > _CLOCKS_SHOWN:
        # The largest offsets come first: the others are fine.
        shown.sort(key=lambda pair: -abs(pair[1].get("offset_ms") or 0.0))
    return ", ".join(_first([f"{host} {_offset(measured)}" for host, measured in shown], _CLOCKS_SHOWN))


def speed(mbps: float | None) -> str:
    """A network's speed, as reported by the kernel."""
    if mbps is None:
        return "-"
    return f"{mbps / 1000:g} Gbit/s" if mbps >= 1000 else f"{mbps:g} Mbit/s"


def _by_check(checks: Checks) -> dict[str, dict[str, Mapping[str, Any]]]:
    by_check: dict[str, dict[str, Mapping[str, Any]]] = {}
    for host, findings in checks.items():
        for finding in findings:
            by_check.setdefault(str(finding["check"]), {})[host] = finding
    return by_check


def _comparison_key(finding: Mapping[str, Any]) -> tuple[str, str]:
    """A key that is equal for nodes that share a row; nodes that pass share one even if their figures differ."""
    status = str(finding["status"])
    return (status, "" if status in _QUIET else str(finding["summary"]))


def _describe_hosts(hosts: Sequence[str], total: int) -> str:
    if len(hosts) == 1:
        return hosts[0]
    return f"all {total}" if len(hosts) == total else f"{len(hosts)} of {total}"


def _summarize(findings: Mapping[str, Mapping[str, Any]], hosts: Sequence[str]) -> str:
    """The first host's summary, with its name if the others differ."""
    summaries = list(dict.fromkeys(str(findings[host]["summary"]) for host in hosts))
    return summaries[0] + (f" ({hosts[0]})" if len(summaries) > 1 else "")


def _proved(network: Mapping[str, Any]) -> str:
    problems = [str(problem) for problem in network.get("problems", ())]
    if network.get("proved") is None:
        return "not tried"
    return (
        "yes" if network["proved"] else "no" + (f": {'; '.join(_first(problems, _PROBLEMS_SHOWN))}" if problems else "")
    )


def _first(texts: Sequence[str], limit: int) -> Iterator[str]:
    yield from texts[:limit]
    if len(texts) > limit:
        yield f"and {len(texts) - limit} more"


def _offset(clock: Mapping[str, Any]) -> str:
    if clock.get("offset_ms") is None:
        return "not measured"
    bound, offset = clock.get("bound_ms"), float(clock["offset_ms"])
    if abs(offset) >= 1000:
        return f"{offset / 1000:+.4g} s"
    return f"{offset:+.3g} ms" + (f" ± {bound:.2g}" if bound else "")


def _rate(mb_per_s: float | None) -> str:
    return "-" if mb_per_s is None else f"{mb_per_s:.3g} MB/s"
