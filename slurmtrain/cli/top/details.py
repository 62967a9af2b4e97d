"""What the pane says about the selected run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from slurmtrain.cli.describe import attempt_problems
from slurmtrain.cli.shared import formatting, times
from slurmtrain.cli.shared.printable import printable
from slurmtrain.model.hostlist import compress_hostlist

_LABEL = 11
_METRICS_SHOWN = 12


def facts(run: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The known facts about a run, by worth: (name, text) each, without empty ones.

    Args:
        run: RUN of the JSON contract.
        attempts: Its ATTEMPTs, oldest first; empty if they are not known yet.
    """
    newest = attempts[-1] if attempts else None
    pairs = [
        ("state", run["state"] + (f": {run['reason']}" if run["reason"] not in ("", run["state"]) else "")),
        ("step", _progress(run)),
        ("params", formatting.params(run["params"])),
        ("metrics", formatting.metrics(run, _METRICS_SHOWN)),
        ("checkpoint", _checkpoint(run)),
        *(("attempt", line) for line in _attempts(attempts)),
        ("nodes", _nodes(newest)),
        ("gpus", _gpus(newest)),
        ("tags", " ".join(run["tags"])),
        ("note", run["note"]),
        ("sweep", run["sweep"] or ""),
        ("job", f"{run['job_id']} ({run['executor']})" if run["job_id"] else ""),
        ("directory", run["dir"]),
    ]
    return [(name, printable(times.localized(text))) for name, text in pairs if text not in ("", "-")]


def lines(pairs: Sequence[tuple[str, str]], width: int) -> list[tuple[str, str]]:
    """Facts as lines of at most ``width`` cells: (name, text), the name empty on the lines that continue a fact.

    Args:
        pairs: From :func:`facts`.
        width: In cells, names included.
    """
    room = max(10, width - _LABEL)
    return [
        (name if number == 0 else "", part)
        for name, text in pairs
        for number, part in enumerate(wrap(text, room) or [""])
    ]


def label(name: str) -> str:
    """The name of a fact, as wide as all names are."""
    return name.ljust(_LABEL)


def _progress(run: Mapping[str, Any]) -> str:
    to_go = f"{formatting.duration(run['eta_seconds'])} to go" if run["eta_seconds"] else ""
    goodput = "" if run["goodput"] is None else f"goodput {100 * run['goodput']:.0f} %"
    lost = f"lost {run['lost_steps']} steps" if run["lost_steps"] else ""
    parts = (formatting.steps(run), formatting.rate(run), to_go, lost, goodput)
    return ", ".join(part for part in parts if part not in ("", "-"))


def _checkpoint(run: Mapping[str, Any]) -> str:
    newest = run["checkpoint"]
    return "" if newest is None else f"{formatting.newest_checkpoint(run)}, {formatting.size(newest['bytes'])}"


def _attempts(attempts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How each attempt ended, the newest first."""
    for attempt in reversed(attempts):
        why = attempt["cause"] or attempt["state"]
        steps = f"steps {attempt['first_step']} to {attempt['last_step']}" if attempt["last_step"] is not None else ""
        lost = f"lost {attempt['lost_steps']}" if attempt["lost_steps"] else ""
        time = attempt_problems.describe_time(attempt["seconds"])
        reason = attempt["reason"] if attempt["reason"] != why else ""
        yield f"{attempt['number']} " + "; ".join(filter(None, (why, steps, lost, time, reason)))


def _nodes(attempt: Mapping[str, Any] | None) -> str:
    hosts = [] if attempt is None else attempt["nodes"]
    try:
        return compress_hostlist(hosts)
    except ValueError:
        return ", ".join(hosts)


def _gpus(attempt: Mapping[str, Any] | None) -> str:
    """What the preflight has seen of the GPUs: nothing records how busy they are."""
    by_summary: dict[str, list[str]] = {}
    for host, checks in ({} if attempt is None else attempt["checks"]).items():
        for check in checks:
            if check.get("check") == "gpu":
                by_summary.setdefault(str(check.get("summary")), []).append(host)
    if len(by_summary) == 1:
        return next(iter(by_summary))
    return "; ".join(f"{', '.join(hosts)}: {summary}" for summary, hosts in by_summary.items())
