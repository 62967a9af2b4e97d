"""What a preflight found, as rows of tables: pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurmtrain.model.preflight.election import natural_sort_key

# host: its findings, each with check, status and summary
Checks = Mapping[str, Sequence[Mapping[str, Any]]]

CHECK_HEADERS = ("CHECK", "STATUS", "NODES", "FOUND")
NETWORK_HEADERS = ("NETWORK", "CHOSEN", "KIND", "SPEED", "MEASURED", "MTU", "INTERFACES", "PROVED")
_QUIET = ("pass", "skip")
_CLOCKS_SHOWN = 8
_PROBLEMS_SHOWN = 2


def check_rows(checks: Checks) -> list[tuple[str, str, str, str]]:
    """A line for each check, with what most nodes say, and one for each node that says something else."""
    rows = []
    for check, found in _by_check(checks).items():
        said = {host: _key(finding) for host, finding in found.items()}
        usual = Counter(said.values()).most_common(1)[0][0]
        alike = [host for host, key in said.items() if key == usual]
        rows.append((check, str(found[alike[0]]["status"]), _whose(alike, len(found)), _found(found, alike)))
        others = [host for host in found if host not in alike]
        rows += [(check, str(found[h]["status"]), h, str(found[h]["summary"])) for h in others]
    return rows


def notable(checks: Checks) -> list[tuple[str, str, str, str]]:
    """The lines of all checks but those that passed, or were passed over."""
    return [row for row in check_rows(checks) if row[1] not in _QUIET]


def count(checks: Checks) -> str:
    """How many checks every node passed, and how many were passed over, in words; empty where there are none."""
    statuses = [{str(finding["status"]) for finding in found.values()} for found in _by_check(checks).values()]
    passed, skipped = sum(s <= {"pass", "skip"} and s != {"skip"} for s in statuses), statuses.count({"skip"})
    told = [f"{passed} check{'s' * (passed != 1)} passed"] if statuses else []
    return ", ".join([*told, *([f"{skipped} skipped"] if skipped else [])])


def has_failed(checks: Checks) -> bool:
    """Whether any node failed any check."""
    return any(finding["status"] == "fail" for found in checks.values() for finding in found)


def network_rows(network: Mapping[str, Any] | None) -> list[tuple[str, ...]]:
    """A line for each network that an attempt could have trained over, the elected one first."""
    if not network:
        return []
    ordered = sorted(network["networks"], key=lambda one: one.get("name") != network["elected"])
    return [
        (
            str(one.get("name")),
            "yes" if one.get("name") == network["elected"] else "",
            str(one.get("kind") or "-"),
            speed(one.get("speed_mbps")),
            _rate(one.get("measured_mb_per_s")),
            str(one.get("mtu") or "-"),
            ", ".join(sorted({str(name) for name in one.get("interfaces", {}).values()})),
            _proved(one),
        )
        for one in ordered
    ]


def left_out(network: Mapping[str, Any] | None) -> list[str]:
    """Addresses that were no candidates, and why, in words."""
    hosts: dict[tuple[str, str, str], list[str]] = {}
    for one in (network or {}).get("excluded", ()):
        hosts.setdefault((one["interface"], one["address"], one["why"]), []).append(one["host"])
    return [
        f"{interface} {address} on {there[0] if len(there) == 1 else f'{len(there)} nodes'}: {why}"
        for (interface, address, why), there in hosts.items()
    ]


def clock_words(clock: Mapping[str, Mapping[str, Any]]) -> str:
    """How far each node's clock is ahead of node 0's; of many nodes those that are furthest away."""
    shown = sorted(clock.items(), key=lambda pair: natural_sort_key(pair[0]))
    if len(shown) > _CLOCKS_SHOWN:
        shown.sort(key=lambda pair: -abs(pair[1].get("offset_ms") or 0.0))
    told = [f"{host} {_offset(said)}" for host, said in shown]
    return ", ".join(_first(told, _CLOCKS_SHOWN))


def speed(mbps: float | None) -> str:
    """A network's speed, as the kernel gives it."""
    if mbps is None:
        return "-"
    return f"{mbps / 1000:g} Gbit/s" if mbps >= 1000 else f"{mbps:g} Mbit/s"


def _by_check(checks: Checks) -> dict[str, dict[str, Mapping[str, Any]]]:
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for host, findings in checks.items():
        for finding in findings:
            found.setdefault(str(finding["check"]), {})[host] = finding
    return found


def _key(finding: Mapping[str, Any]) -> tuple[str, str]:
    """What makes two nodes say the same: figures of those that pass may differ."""
    status = str(finding["status"])
    return (status, "" if status in _QUIET else str(finding["summary"]))


def _whose(hosts: Sequence[str], of: int) -> str:
    if len(hosts) == 1:
        return hosts[0]
    return f"all {of}" if len(hosts) == of else f"{len(hosts)} of {of}"


def _found(found: Mapping[str, Mapping[str, Any]], hosts: Sequence[str]) -> str:
    summaries = list(dict.fromkeys(str(found[host]["summary"]) for host in hosts))
    return summaries[0] + (f" ({hosts[0]})" if len(summaries) > 1 else "")


def _proved(one: Mapping[str, Any]) -> str:
    problems = [str(problem) for problem in one.get("problems", ())]
    if one.get("proved") is None:
        return "not tried"
    return "yes" if one["proved"] else "no" + (f": {'; '.join(_first(problems, _PROBLEMS_SHOWN))}" if problems else "")


def _first(told: Sequence[str], limit: int) -> Iterator[str]:
    yield from told[:limit]
    if len(told) > limit:
        yield f"and {len(told) - limit} more"


def _offset(said: Mapping[str, Any]) -> str:
    if said.get("offset_ms") is None:
        return "not measured"
    bound, offset = said.get("bound_ms"), float(said["offset_ms"])
    if abs(offset) >= 1000:
        return f"{offset / 1000:+.4g} s"
    return f"{offset:+.3g} ms" + (f" ± {bound:.2g}" if bound else "")


def _rate(mb_per_s: float | None) -> str:
    return "-" if mb_per_s is None else f"{mb_per_s:.3g} MB/s"
