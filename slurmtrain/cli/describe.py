"""Attempts, their nodes, and what was found there, in words and rows of tables. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any

from slurmtrain.cli import formatting
from slurmtrain.model.hostlist import compress_hostlist, natural_sort_key
from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.accounting import KINDS

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
            status = str(finding["status"])
            # Nodes that pass share a row whatever they report.
            wording = "" if status in _QUIET else pattern(str(finding["summary"]))
            alike.setdefault((status, wording), []).append(host)
        # What most nodes report comes first.
        for (status, _), hosts in sorted(alike.items(), key=lambda item: -len(item[1])):
            summaries = [(host, str(findings[host]["summary"])) for host in hosts]
            nodes = f"all {len(hosts)}" if len(hosts) == len(findings) > 1 else formatting.describe_nodes(hosts)
            # Nodes that pass may have reported different things, which have no ranges: the first one stands for all.
            if len({pattern(summary) for _, summary in summaries}) == 1:
                summary = merge(summaries)
            else:
                summary = f"{summaries[0][1]} ({summaries[0][0]})"
            rows.append((check, status, nodes, summary))
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
        numbers = sorted({number for number, _, _ in reports})
        listed = f"attempt{'s' * (len(numbers) > 1)} {compress_hostlist(map(str, numbers)).strip('[]')}"
        within = "" if len(attempts) == 1 else f" in {listed}"
        nodes = formatting.describe_nodes(host for _, host, _ in reports)
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
        # Several nodes of a local run are one machine, and get one row.
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
            "-" if (rate := candidate.get("measured_mb_per_s")) is None else f"{rate:.3g} MB/s",
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
    lines = []
    for (interface, reason), excluded in alike.items():
        addresses = list(dict.fromkeys(str(each["address"]) for each in excluded))
        more = f" and {len(addresses) - 1} more" if len(addresses) > 1 else ""
        nodes = formatting.describe_nodes(each["host"] for each in excluded)
        lines.append(f"{interface} {addresses[0]}{more} on {nodes}: {reason}")
    return lines


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


def _proved(network: Mapping[str, Any]) -> str:
    problems = [str(problem) for problem in network.get("problems", ())]
    if network.get("proved") is None:
        return "not tried"
    return (
        "yes"
        if network["proved"]
        else "no" + (f": {'; '.join(first_of(problems, _PROBLEMS_SHOWN))}" if problems else "")
    )


# So many clocks are listed one by one.
_CLOCKS_LISTED = 4
# Measured figures: numbers with a unit, but not the numbers in names, versions and addresses.
_FIGURE = re.compile(
    r"(?<![\w.:-])([+-]?\d+(?:\.\d+)?(?:e[+-]\d+)?)"
    r"(?= ?(?:ms|s|min|h|days|times|%|[kKMGT]i?B(?:/s)?|[MG]bit/s|TFLOP/s)(?!\w))"
)


def count_and_nodes(hosts: Sequence[str]) -> str:
    """The nodes of an attempt, and how many there are if that is not obvious."""
    text = formatting.describe_nodes(hosts)
    return text if len(hosts) < 2 or text.endswith(")") else f"{text} ({len(hosts)} nodes)"


def describe_values(values: Mapping[str, str]) -> str:
    """A value of each node: once if all have it, else each with its nodes, the most frequent first."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    if len(hosts) == 1:
        return next(iter(hosts))
    ordered = sorted(hosts.items(), key=lambda item: -len(item[1]))
    return ", ".join(f"{value} on {formatting.describe_nodes(with_it)}" for value, with_it in ordered)


def describe_clocks(clock: Mapping[str, Mapping[str, Any]]) -> str:
    """How far the nodes' clocks are ahead of node 0's: each of a few, else the range, and which is furthest off."""
    if len(clock) <= _CLOCKS_LISTED:
        ordered = sorted(clock.items(), key=lambda pair: natural_sort_key(pair[0]))
        return ", ".join(f"{host} {describe_clock(measured)}" for host, measured in ordered)
    offsets = {host: float(measured["offset_ms"]) for host, measured in clock.items() if _is_measured(measured)}
    phrases = []
    if offsets:
        furthest = max(offsets, key=lambda host: abs(offsets[host]))
        low, high = _offset(min(offsets.values())), _offset(max(offsets.values()))
        phrases.append(low if low == high else f"{low} to {high}, the furthest on {furthest}")
    if missing := [host for host in clock if host not in offsets]:
        phrases.append(f"not measured on {formatting.describe_nodes(missing)}")
    return "; ".join(phrases)


def describe_clock(measured: Mapping[str, Any]) -> str:
    """How far one clock is ahead of node 0's, with the bound of the error."""
    if not _is_measured(measured):
        return "not measured"
    bound, offset = measured.get("bound_ms"), float(measured["offset_ms"])
    # Behind an offset in seconds, a bound in milliseconds would be read as seconds, too.
    return _offset(offset) + (f" ± {bound:.2g}" if bound and abs(offset) < 1000 else "")


def pattern(text: str) -> str:
    """A sentence without its figures: equal for sentences that :func:`merge` can merge."""
    return _FIGURE.sub("0", text)


def merge(texts: Sequence[tuple[str, str]]) -> str:
    """Sentences of one pattern as one, with ranges for the figures that differ.

    Args:
        texts: Each with its node; the node with the largest figure is named.
    """
    first = texts[0][1]
    figures = [[float(figure) for figure in _FIGURE.findall(text)] for _, text in texts]
    columns = list(zip(*figures, strict=True))
    differing = [column for column in columns if min(column) != max(column)]
    if not differing:
        return first
    ranges = iter(columns)

    def spread(match: re.Match[str]) -> str:
        column = next(ranges)
        low, high = min(column), max(column)
        return match[0] if low == high else f"{low:g} to {high:g}"

    largest = texts[differing[0].index(max(differing[0]))][0]
    return f"{_FIGURE.sub(spread, first)} (the largest on {largest})"


def _is_measured(measured: Mapping[str, Any]) -> bool:
    return measured.get("offset_ms") is not None


def _offset(milliseconds: float) -> str:
    return f"{milliseconds / 1000:+.4g} s" if abs(milliseconds) >= 1000 else f"{milliseconds:+.3g} ms"


# How many restarts, hangs or stragglers are listed; --json has all of them.
_SHOWN = 5


def describe_time(seconds: Mapping[str, float], goodput: float | None = None) -> str:
    """``seconds`` by kind, omitting kinds under half a second, and ``goodput``, the useful share."""
    times = [f"{kind} {formatting.duration(round(s))}" for kind in KINDS if (s := seconds.get(kind, 0.0)) >= 0.5]
    return ", ".join([*times, *([] if goodput is None else [f"goodput {100 * goodput:.0f} %"])])


def describe_cost(cost: Mapping[str, Any]) -> str:
    """The field ``cost`` of a run in a line; empty if it has cost nothing yet."""
    if not cost["node_hours"]:
        return ""
    amounts = [
        f"{formatting.amount(cost[purpose], cost['currency'])} {purpose}"
        for purpose in ("lost", "saving", "starting")
        if cost[purpose]
    ]
    count = cost["interruptions"]
    if count and cost["lost"]:
        amounts[0] += f" to {count} interruption{'s' * (count != 1)}"
    parts = [f"{formatting.amount(cost['spent'], cost['currency'])} {cost['unit']}", *amounts]
    if cost["idle"]:
        parts.append(f"{formatting.amount(cost['idle'], cost['currency'])} idle so far")
    if cost["saved_by_spot"] is not None:
        parts.append(f"on demand {formatting.amount(cost['on_demand'], cost['currency'])}")
    return ", ".join(parts) + (f" ({cost['problem']})" if cost["problem"] else "")


def describe_speed(measures: Mapping[str, Any]) -> str:
    """How fast a run was, and what its steps were spent on, by the ``measures`` of its JSON; may be empty."""
    rates = [
        f"{formatting.figures(measures[f'{unit}_per_second'])} {unit}/s"
        for unit in ("steps", "samples", "tokens")
        if measures[f"{unit}_per_second"] is not None
    ]
    shares = [
        f"{title} {100 * measures[name]:.0f} %"
        for title, name in (("data", "data_wait_share"), ("communication", "communication_share"), ("MFU", "mfu"))
        if measures[name] is not None
    ]
    median, most = (formatting.step_time(measures[name]) for name in ("step_p50_s", "step_p95_s"))
    step = [] if median == "-" else [f"step {median} (p95 {most})"]
    energy = measures["energy_kwh"]
    return ", ".join([*rates, *step, *shares, *([] if energy is None else [f"{formatting.figures(energy)} kWh"])])


def describe_slow_ranks(measures: Mapping[str, Any]) -> str:
    """The ranks that others wait for, by the ``measures`` of a run's JSON; empty if there are none."""
    if not measures["slow_ranks"]:
        return ""
    ranks = {rank["rank"]: rank for rank in measures["ranks"]}
    median = formatting.step_time(median_low(rank["own_p50_s"] for rank in ranks.values() if rank["own_p50_s"]))
    named = [
        f"rank {rank['rank']} on {rank['node'] or 'an unknown node'} ({formatting.step_time(rank['own_p50_s'])})"
        for rank in map(ranks.__getitem__, measures["slow_ranks"])
    ]
    return f"{', '.join(first_of(named, _SHOWN))}; the median rank needs {median} of its own in a step"


def describe_profile(profile: Mapping[str, Any]) -> str:
    """What a profiler has recorded, or why it could not."""
    rank = "" if profile["rank"] is None else f" rank {profile['rank']}, steps {profile['first']} to {profile['last']}"
    why = f" ({profile['why']})" if profile["why"] else ""
    result = profile["problem"] or f"{profile['path']}, {formatting.size(profile['bytes'])}"
    return f"{profile['tool']}, attempt {profile['attempt']}{',' * bool(rank)}{rank}{why}: {result}"


def describe_restart(restart: Mapping[str, Any]) -> str:
    """Why ranks were restarted in place, after which step, and without which nodes."""
    step = restart.get("reached")
    after = f" after step {step}" if step is not None else ""
    why = f": {restart['why']}" if restart.get("why") else ""
    lost = restart.get("lost") or ()
    without = f"; without node {', '.join(map(str, lost))}" if lost else ""
    return f"{restart.get('cause') or 'restart'}{after}{why}{without}"


def describe_hang(hang: Mapping[str, Any]) -> str:
    """Which ranks hung, if known, and for how long no rank had made progress."""
    # The rank that has been idle for the shortest time tells since when none has moved.
    idle = min((rank["idle_s"] for rank in hang["ranks"] if rank["idle_s"] > 0), default=None)
    return str(hang["why"]) + (f" (no progress for {formatting.duration(idle)})" if idle is not None else "")


def describe_raised_limit(change: Mapping[str, Any]) -> str:
    """Why the limit for a step was raised, and to what."""
    raised = change.get("raised_s")
    to = f"raised to {formatting.duration(raised)}" if raised is not None else "raised"
    return f"{to}: {change['why']}" if change.get("why") else to


def describe_passed_over(passed_over: Mapping[str, Any]) -> str:
    """Which checkpoint its ranks did not resume from, and why."""
    step = passed_over.get("step")
    of_step = f" of step {step}" if step is not None else ""
    return f"the checkpoint{of_step} ({passed_over.get('path')}), since {passed_over.get('why') or 'it is suspected'}"


def describe_straggler(straggler: Mapping[str, Any]) -> str:
    """How much slower a rank was than the others, excluding the time that it waited for them."""
    host = f" on {straggler['host']}" if straggler.get("host") else ""
    after = f" at step {straggler['step']}" if straggler.get("step") is not None else ""
    own, median = (f"{1000 * (straggler.get(name) or 0):.3g} ms" for name in ("own_s", "median_s"))
    times = f"{straggler.get('ratio') or 0:.3g} times as slow as others"
    return f"rank {straggler.get('rank')}{host} was {times}{after}: {own} of its own per step, the median is {median}"


def describe_evidence(evidence: Mapping[str, Any]) -> str:
    """What the agent observed on its node besides the reason, without empty values."""
    return ", ".join(
        f"{name.removesuffix('_s') if isinstance(value, float) else name} {_value(name, value)}"
        for name, value in evidence.items()
        if value
    )


def newest_lines(texts: Iterable[str]) -> list[str]:
    """The last few of these lines without duplicates, and how many came before them."""
    counted = Counter(texts)
    lines = [line if count == 1 else f"{line} ({count} times)" for line, count in counted.items()]
    more = len(lines) - _SHOWN
    return [*([f"{more} earlier ones; --json shows them"] if more > 0 else []), *lines[-_SHOWN:]]


def first_of(texts: Sequence[str], limit: int) -> list[str]:
    """The first of these ``texts``, at most ``limit``, and how many more there are."""
    return [*texts[:limit], *([f"and {len(texts) - limit} more"] if len(texts) > limit else [])]


def _value(name: str, value: Any) -> str:
    """A value; times are in seconds since 1970 if its ``name`` ends in ``_time``, lengths if in ``_s``."""
    if isinstance(value, Mapping):
        return f"({describe_evidence(value)})"
    if isinstance(value, list | tuple):
        return ", ".join(first_of([_value("", item) for item in value], _SHOWN))
    if isinstance(value, float) and name.endswith("_time"):
        return formatting.calendar(iso(value))
    return formatting.duration(value) if isinstance(value, float) and name.endswith("_s") else formatting.number(value)


def describe_shares(choices: Sequence[Mapping[str, Any]] | None) -> str:
    """How the ranks of an attempt divide batches, from the data of its ``shares`` events; empty if it has none."""
    newest = choices[-1] if choices else {}
    # A journal may hold less than slurmtrain writes.
    if not newest.get("shares") or newest.get("step_s") is None:
        return ""
    counts = " ".join(map(str, newest["shares"]))
    changes = sum(each.get("step_s") != each.get("before_s") for each in choices or ())
    change = f"changed {changes} time{'' if changes == 1 else 's'}" if changes else "never changed"
    return f"{counts} samples by rank since step {newest.get('step')}, {newest['step_s'] * 1e3:.3g} ms ({change})"


def describe_interval(event: Mapping[str, Any] | None) -> str:
    """How often an attempt saves, and why, from the data of its newest ``interval`` event; empty if it has none."""
    if not event or event.get("seconds") is None:
        return ""
    return f"every {event['seconds']:.0f} s" + (f": {event['why']}" if event.get("why") else "")


def describe_git_state(git: Mapping[str, Any]) -> str:
    """A revision, its branch, and whether files differ from it; ``-`` without one."""
    if not git.get("commit"):
        return "-"
    modified = git.get("modified")
    changes = f"{modified} modified" if modified else "with changes"
    state = (changes if git["dirty"] else "clean") if "dirty" in git else ""
    branch = f" ({git['branch']})" if git.get("branch") else ""
    return ", ".join(filter(None, (f"{str(git['commit'])[:12]}{branch}", state)))
