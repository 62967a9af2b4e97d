"""Why an attempt of a run failed: its logs by known patterns, its journals' evidence, and Slurm's word together."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any

from slurmtrain.errors import RunNotFound
from slurmtrain.model.diagnosis import patterns
from slurmtrain.model.diagnosis.patterns import CONFIRMATION, ROOT, Diagnosis, Hit, PatternMatch
from slurmtrain.model.diagnosis.redact import redact
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.layout import attempt_of, node_of
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.views import SCHEMA, attempt_json, iso
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import describe_os_error

# What is read of a log: its beginning and its end, less of each where there are many logs.
HEAD_BYTES, TAIL_BYTES = 2 << 20, 6 << 20
_ALL_BYTES = 64 << 20
_LEAST_BYTES = 64 << 10
# Lines of a job's log further than this from an attempt belong to another start of the job.
_MARGIN_S = 120.0
# How far back a line without a time looks for one before it.
_LOOK_BACK = 64 << 10
_SHOWN_LINE = 500
# What an attempt ended with, among what is found.
OUTCOME = "outcome"
_JOURNALS = "the run's journals"
_RANK_LOG = re.compile(r"rank-(\d+)(?:\.(\d+))?\.log")
_FIXES = {
    "preempted": "nothing: it is put back (`slurmtrain doctor SPEC` says how)",
    "timeout": "ask for more in resources.time, or let it be put back (requeue.enabled)",
    "node_fail": "nothing, unless it is always the same node: then exclude it (slurm.exclude)",
    "oom": "raise resources.mem, or use less (data loader workers take a share each)",
    "hang": "look at the ranks that it names; `slurmtrain show` has what each of them did",
    "preflight": "see `slurmtrain show` and `slurmtrain nodes` for what the nodes failed",
    "cancelled": "`slurmtrain resume` goes on from the newest checkpoint",
    "lost": "see `sacct` and the administrators: neither the job nor Slurm said anything",
}


@dataclass(frozen=True, slots=True)
class Failing:
    """The rank that failed first, by the journals: how, and the last that it said."""

    rank: int
    host: str
    how: str
    last_lines: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"rank": self.rank, "host": self.host, "how": self.how, "last_lines": list(self.last_lines)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """What was found of an attempt. ``read``: how many logs; ``problems``: those that could not be read, and why.

    ``partly``: logs of which only beginning and end were read.
    """

    run: Run
    attempt: Attempt | None
    diagnosis: Diagnosis
    failing: Failing | None
    read: int
    partly: Sequence[str] = ()
    problems: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """What ``doctor RUN --json`` prints."""
        attempt, found = self.attempt, self.diagnosis
        return {
            "schema": SCHEMA,
            "run_id": self.run.id,
            "state": self.run.state,
            "attempt": attempt.number if attempt else None,
            "cause": attempt.cause if attempt else None,
            "reason": attempt.reason if attempt else self.run.reason,
            "root": found_json(found.root) if found.root else None,
            "others": [found_json(one) for one in found.others],
            "laggard": {"ranks": list(found.laggard.ranks), "why": found.laggard.why} if found.laggard else None,
            "ordered": found.ordered,
            "failing": self.failing.to_dict() if self.failing else None,
            "logs": {"read": self.read, "partly": list(self.partly), "problems": list(self.problems)},
        }


def found_json(found: PatternMatch) -> dict[str, Any]:
    """FOUND of the JSON contract. ``at_by``: whether the line says when, or the end of its process does."""
    first = found.first
    return {
        "name": first.name,
        "role": first.role,
        "cause": first.cause,
        "fix": first.fix,
        "line": first.text,
        "log": first.origin,
        "rank": first.rank,
        "host": first.host,
        "at": iso(first.at),
        "at_by": None if first.at is None else "line" if first.exact else "exit",
        "count": found.count,
        "ranks": list(found.ranks),
    }


def diagnose(workspace: Workspace, run_id: str, number: int | None = None) -> Diagnosed:
    """Read the logs of an attempt of a run, by default of the last one that went wrong, and say what they tell.

    Raises RunNotFound for an attempt that there is not.
    """
    observe(workspace, [run_id], ask_slurm=False)
    run = workspace.store.load(run_id)
    assert run is not None
    attempt = _chosen(run, number)
    if attempt is None:
        return Diagnosed(run=run, attempt=None, diagnosis=patterns.diagnose(()), failing=None, read=0)
    told = _Told(workspace, run_id, attempt)
    logs = _Logs(told)
    hits = [*logs.hits(workspace, run_id, attempt), *told.hits()]
    return Diagnosed(
        run=run,
        attempt=attempt,
        diagnosis=patterns.diagnose(hits, sorted(logs.ranks | set(told.hosts))),
        failing=told.failing(),
        read=logs.read,
        partly=logs.partly,
        problems=logs.problems,
    )


def _chosen(run: Run, number: int | None) -> Attempt | None:
    if number is not None:
        chosen = next((one for one in run.attempts if one.number == number), None)
        if chosen is None:
            raise RunNotFound(f"run {run.id} has no attempt {number}; it has {len(run.attempts)}")
        return chosen
    bad = [one for one in run.attempts if one.ended and one.cause != "completed"]
    return bad[-1] if bad else run.newest


class _Told:
    """What the journals of an attempt say: where ranks were, when they ended, and what the agents saw."""

    def __init__(self, workspace: Workspace, run_id: str, attempt: Attempt) -> None:
        def events(kind: str) -> list[AnyEvent]:
            found = [one for one in workspace.store.events(run_id, kind) if attempt_of(one.source) == attempt.key]
            return sorted(found, key=lambda one: one.order)

        self.attempt = attempt
        self._ends = events("end")
        self.hosts = _hosts_of_ranks(events("workers"), attempt)
        self.failures: dict[int, Mapping[str, Any]] = {}
        for end in self._ends:
            for failure in end.data.get("failures") or ():
                self.failures.setdefault(failure["rank"], failure)
                self.hosts.setdefault(failure["rank"], self._host(end))

    def exit_at(self, rank: int | None) -> float | None:
        """When a rank failed."""
        return self.failures[rank].get("at") if rank in self.failures else None

    def failing(self) -> Failing | None:
        """The rank that failed first, those last that failed because another had."""
        ends = [end for end in self._ends if end.data.get("failures")]
        if not ends:
            return None
        first = min(ends, key=lambda end: (bool(end.data.get("cascade")), end.data.get("failed_at") or end.time))
        one = first.data["failures"][0]
        killed, code = one.get("signal"), one.get("exit_code")
        how = f"was killed by {killed}" if killed else f"exited with code {code}"
        if one.get("error"):
            how += f": {_shown(str(one['error']))}"
        lines = [_shown(str(line)) for line in one.get("last_lines") or ()]
        return Failing(one["rank"], self.hosts[one["rank"]], how, lines)

    def hits(self) -> Iterator[Hit]:
        """What journals say beside the logs: evidence of the agents, hangs, and what the attempt ended with."""
        for end in self._ends:
            evidence = end.data.get("evidence")
            if isinstance(evidence, Mapping):
                yield from _evident(evidence, end, self._host(end))
        for number, hang in enumerate(attempt_json(self.attempt)["hangs"]):
            first = next(iter(hang["culprits"]), None)
            yield Hit(
                name="hang",
                role=ROOT,
                cause=f"no step was finished for too long: {hang['why']}",
                fix=_FIXES["hang"],
                text="",
                origin=_JOURNALS,
                rank=first,
                host=self.hosts.get(first, "") if first is not None else "",
                at=datetime.fromisoformat(hang["at"]).timestamp(),
                exact=True,
                line=number,
            )
        cause = self.attempt.cause
        if cause in _FIXES:
            yield Hit(
                name=OUTCOME,
                role=CONFIRMATION,
                cause=self.attempt.reason or cause,
                fix=_FIXES[cause],
                text="",
                origin=_JOURNALS,
                at=self.attempt.ended_at,
            )

    def _host(self, event: AnyEvent) -> str:
        return self.attempt.hosts.get(node_of(event.source), "")


def _hosts_of_ranks(workers: Iterable[AnyEvent], attempt: Attempt) -> dict[int, str]:
    """Where each rank was last started."""
    hosts = {}
    for event in workers:
        for rank in event.data.get("processes") or {}:
            hosts[int(rank)] = attempt.hosts.get(node_of(event.source), "")
    return hosts


def _evident(evidence: Mapping[str, Any], end: AnyEvent, host: str) -> Iterator[Hit]:
    """What an agent saw of its node when the ranks had ended: processes that the kernel killed, errors of GPUs."""
    about: dict[str, Any] = {
        "name": "evidence",
        "text": "",
        "origin": end.source,
        "host": host,
        "at": end.data.get("failed_at") or end.time,
    }
    if kills := evidence.get("oom_kills"):
        limit = evidence.get("memory_limit")
        of = f", whose share of memory is {limit / 2**30:.1f} GiB" if isinstance(limit, int | float) and limit else ""
        cause = f"memory was full: the kernel killed {kills} process(es) of the job{of}"
        yield Hit(role=ROOT, cause=cause, fix=_FIXES["oom"], **about)
    for error in evidence.get("xids") or ():
        role, cause, fix = patterns.xid(int(error["code"]), str(error.get("bus") or ""))
        yield Hit(role=role, cause=cause, fix=fix, **{**about, "text": _shown(str(error.get("line") or ""))})


# --- logs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Log:
    """A file to read. ``shared``: other starts of the job have written to it too."""

    path: Path
    rank: int | None
    host: str
    shared: bool = False


class _Logs:
    """The logs of an attempt, read within bounds."""

    def __init__(self, told: _Told) -> None:
        self._told = told
        self._zone: tzinfo = datetime.now().astimezone().tzinfo or UTC
        self.ranks: set[int] = set()
        self.read = 0
        self.partly: list[str] = []
        self.problems: list[str] = []

    def hits(self, workspace: Workspace, run_id: str, attempt: Attempt) -> Iterator[Hit]:
        """What the patterns find, in the logs of ranks, of agents and of the batch script."""
        logs = list(self._files(workspace, run_id, attempt))
        share = max(_LEAST_BYTES, _ALL_BYTES // max(1, len(logs)))
        legible = set()
        for log in logs:
            try:
                parts, whole = _parts(log.path, share)
            except OSError as error:
                self.problems.append(f"{log.path}: {describe_os_error(error)}")
                continue
            self.read += 1
            legible.add(log.rank)
            if not whole:
                self.partly.append(str(log.path))
            for offset, text in parts:
                yield from self._found(text, log, offset)
        for rank, failure in self._told.failures.items():
            if rank not in legible:  # the agent kept its last lines
                said = "\n".join([*map(str, failure.get("last_lines") or ()), str(failure.get("error") or "")])
                yield from self._found(said, _Log(Path(f"journal of rank {rank}"), rank, ""), 0)

    def _files(self, workspace: Workspace, run_id: str, attempt: Attempt) -> Iterator[_Log]:
        directory = workspace.root.run(run_id)
        place = directory.attempt(attempt.job_id, attempt.restart)
        found = [(path, _RANK_LOG.fullmatch(path.name)) for path in _listed(place.logs)]
        named = [(path, int(match[1]), int(match[2] or 0)) for path, match in found if match]
        for path, rank, _ in sorted(named, key=lambda one: one[1:]):
            self.ranks.add(rank)
            yield _Log(path, rank, self._told.hosts.get(rank, ""))
        submission = directory.submission(attempt.submission)
        for path in _listed(submission.submitit):
            if path.name.startswith(f"{attempt.job_id}_") and path.name.endswith("_log.out"):
                yield _Log(path, None, attempt.hosts.get(path.name.split("_")[-2], ""), shared=True)
        if submission.controller_log.exists():
            yield _Log(submission.controller_log, None, "", shared=True)

    def _found(self, text: str, log: _Log, offset: int) -> Iterator[Hit]:
        attempt = self._told.attempt
        near = attempt.ended_at or attempt.started_at or attempt.submitted_at or 0.0
        for place, pattern, match, line in patterns.find(text):
            at = patterns.time_of(line, near, self._zone)
            if log.shared and not self._is_ours(at if at is not None else self._before(text, place, near)):
                continue
            rank = log.rank if log.rank is not None else patterns.rank_of(line)
            exact = at is not None
            yield patterns.hit(
                pattern,
                match,
                text=_shown(line),
                origin=str(log.path),
                rank=rank,
                host=log.host or self._told.hosts.get(rank if rank is not None else -1, ""),
                at=at if exact else self._told.exit_at(rank),
                exact=exact,
                line=offset + place,
            )

    def _before(self, text: str, place: int, near: float) -> float | None:
        """The time of the last line before a place that has one."""
        for line in reversed(text[max(0, place - _LOOK_BACK) : place].split("\n")):
            at = patterns.time_of(line, near, self._zone)
            if at is not None:
                return at
        return None

    def _is_ours(self, at: float | None) -> bool:
        """Whether a line of a log that all starts of a job write to can be of this one."""
        attempt = self._told.attempt
        if at is None:
            return True
        begun, ended = attempt.started_at or attempt.submitted_at, attempt.ended_at
        return (begun is None or at >= begun - _MARGIN_S) and (ended is None or at <= ended + _MARGIN_S)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder / name for name in os.listdir(folder))
    except OSError:
        return []


def _parts(path: Path, share: int) -> tuple[list[tuple[int, str]], bool]:
    """(offset, text) of a log's beginning and end, or of all of it, and whether it is all. Raises OSError."""
    tail = min(TAIL_BYTES, share * 3 // 4)
    head = min(HEAD_BYTES, share // 4)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= head + tail:
            return [(0, _text(file.read(head + tail)))], True
        first = file.read(head)
        file.seek(size - tail)
        return [(0, _text(first)), (size - tail, _text(file.read(tail)))], False


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def _shown(line: str) -> str:
    """A line as it is printed: without secrets, signs that move the cursor, or what would fill the screen."""
    clean = "".join(sign if sign.isprintable() else " " for sign in redact(line.strip()))
    return clean if len(clean) <= _SHOWN_LINE else f"{clean[:_SHOWN_LINE]}..."
