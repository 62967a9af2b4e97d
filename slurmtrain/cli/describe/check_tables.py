"""The findings of a preflight as rows of tables. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurmtrain.cli.describe.node_lists import describe_clock, describe_nodes, merge, pattern
from slurmtrain.model.hostlist import compress_hostlist

# The findings by host, each with check, status and summary.
Checks = Mapping[str, Sequence[Mapping[str, Any]]]

CHECK_HEADERS = ("CHECK", "STATUS", "NODES", "FOUND")
NODE_HEADERS = ("NODE", "INTERFACE", "CLOCK", "FOUND")
NETWORK_HEADERS = ("NETWORK", "USED", "KIND", "SPEED", "MEASURED", "MTU", "INTERFACES", "PROVED")
# Statuses that need no attention.
_QUIET = ("pass", "skip")
# What fits on a line of a terminal.
_PROBLEMS_SHOWN = 2


def check_rows(checks: Checks) -> list[tuple[str, str, str, str]]:
    """A row for each check and each finding of it, apart from figures, with the nodes that report it."""
    rows = []
    for check, findings in _by_check(checks).items():
        alike: dict[tuple[str, str], list[str]] = {}
        for host, finding in findings.items():
            alike.setdefault(_comparison_key(finding), []).append(host)
        # What most nodes report comes first.
        for (status, _), hosts in sorted(alike.items(), key=lambda item: -len(item[1])):
            summaries = [(host, str(findings[host]["summary"])) for host in hosts]
            rows.append((check, status, _describe_hosts(hosts, len(findings)), _summarize(summaries)))
    return rows


def finding_lines(attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each finding that needs attention, with its nodes and, if there are several attempts, its attempts.

    Args:
        attempts: ATTEMPT of the JSON contract, the oldest first.
    """
    alike: dict[tuple[str, str, str], list[tuple[int, str, str]]] = {}
    for attempt in attempts:
        for check, findings in _by_check(attempt["checks"]).items():
            for host, finding in findings.items():
                status, summary = str(finding["status"]), str(finding["summary"])
                if status not in _QUIET:
                    alike.setdefault((status, check, pattern(summary)), []).append((attempt["number"], host, summary))
    lines = []
    for (status, check, _), reports in alike.items():
        numbers = {number for number, _, _ in reports}
        within = "" if len(attempts) == 1 else f" in {_describe_attempts(numbers)}"
        nodes = describe_nodes(host for _, host, _ in reports)
        lines.append(f"{status}  {check} on {nodes}{within}: {merge([report[1:] for report in reports])}")
    return lines


def node_rows(attempt: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each node of an attempt (ATTEMPT of the JSON contract): all that is known about it alone."""
    interfaces, clock, checks = attempt["interfaces"], attempt["clock"], attempt["checks"]
    return [
        (
            host,
            interfaces.get(host, "-"),
            describe_clock(clock[host]) if host in clock else "-",
            "; ".join(
                f"{finding['status']} {finding['check']}: {finding['summary']}"
                for finding in checks.get(host, ())
                if finding["status"] not in _QUIET
            ),
        )
        for host in dict.fromkeys(attempt["nodes"])
    ]


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
    """A line for each interface with addresses that were not candidates, with the reason."""
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for excluded in (network or {}).get("excluded", ()):
        alike.setdefault((excluded["interface"], excluded["why"]), []).append(excluded)
    return [
        f"{interface} {_describe_addresses(excluded)} on {describe_nodes(each['host'] for each in excluded)}: {reason}"
        for (interface, reason), excluded in alike.items()
    ]


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
    """A key that is equal for nodes that share a row; nodes that pass share one whatever they report."""
    status = str(finding["status"])
    return (status, "" if status in _QUIET else pattern(str(finding["summary"])))


def _describe_hosts(hosts: Sequence[str], total: int) -> str:
    return f"all {total}" if len(hosts) == total > 1 else describe_nodes(hosts)


def _describe_attempts(numbers: set[int]) -> str:
    return f"attempt{'s' * (len(numbers) > 1)} {compress_hostlist(map(str, numbers)).strip('[]')}"


def _describe_addresses(excluded: Sequence[Mapping[str, Any]]) -> str:
    addresses = list(dict.fromkeys(str(each["address"]) for each in excluded))
    return addresses[0] + (f" and {len(addresses) - 1} more" if len(addresses) > 1 else "")


def _summarize(summaries: Sequence[tuple[str, str]]) -> str:
    """The summaries of nodes as one, or the first with its node if they differ in more than figures."""
    if len({pattern(summary) for _, summary in summaries}) == 1:
        return merge(summaries)
    return f"{summaries[0][1]} ({summaries[0][0]})"


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


def _rate(mb_per_s: float | None) -> str:
    return "-" if mb_per_s is None else f"{mb_per_s:.3g} MB/s"
