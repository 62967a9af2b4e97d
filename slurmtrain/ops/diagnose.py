"""Why an attempt of a run failed, by known patterns in its logs, by its journals, and by the state that Slurm gave."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any

from slurmtrain.errors import RunNotFound
from slurmtrain.model.diagnosis.log_scan import Hit, make_hit, rank_of, scan_log, time_of
from slurmtrain.model.diagnosis.patterns import CONFIRMATION, ROOT, explain_xid
from slurmtrain.model.diagnosis.redact import redact
from slurmtrain.model.diagnosis.root_cause import Diagnosis, PatternMatch, diagnose_hits
from slurmtrain.model.run.events.agent import NodeEnded, WorkersStarted
from slurmtrain.model.run.events.base import AnyEvent, Event, P
from slurmtrain.model.run.layout import attempt_of, node_of
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.run_details import attempt_json
from slurmtrain.ops.shared.views import SCHEMA, iso
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import describe_os_error

# How much of a log is read, at its beginning and at its end: causes stand at the end, wrong settings at the beginning.
HEAD_BYTES, TAIL_BYTES = 2 << 20, 6 << 20
# Many logs share the first of these, but each gets at least the second.
_ALL_BYTES = 64 << 20
_LEAST_BYTES = 64 << 10
# The log of a job has the lines of all its starts. Lines further than this from an attempt belong to another start.
_MARGIN_S = 120.0
# A line without a time gets that of a line before it, at most so many characters back.
_LOOK_BACK = 64 << 10
# Characters of a line that are shown.
_SHOWN_LINE = 500
# The name of the hit that says how the attempt ended.
OUTCOME = "outcome"
_JOURNALS = "the run's journals"
_RANK_LOG = re.compile(r"rank-(\d+)(?:\.(\d+))?\.log")
_FIXES = {
    "preempted": "nothing: it is requeued (`slurmtrain doctor SPEC` says how)",
    "timeout": "ask for more in resources.time, or let it be requeued (requeue.enabled)",
    "node_fail": "nothing, unless it is always the same node: then exclude it (slurm.exclude)",
    "oom": "raise resources.mem, or use less (data loader workers take a share each)",
    "hang": "look at the ranks that it names; `slurmtrain show` has the stack of each",
    "preflight": "see `slurmtrain show` and `slurmtrain nodes` for the checks that failed",
    "cancelled": "`slurmtrain resume` continues from the newest checkpoint",
    "lost": "check `sacct`, or ask the administrators: neither the job nor Slurm left a reason",
}


@dataclass(frozen=True, slots=True)
class Failing:
    """The rank that failed first, by the journals: how (``description``, a predicate), and its last lines of output."""

    rank: int
    host: str
    description: str
    last_lines: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"rank": self.rank, "host": self.host, "how": self.description, "last_lines": list(self.last_lines)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDiagnosis:
    """Why an attempt failed, as far as its files tell.

    ``attempt``: None if the run was never started. ``read``: the number of logs that were read. ``partly``: paths of
    logs of which only beginning and end were read. ``problems``: logs that could not be read, and why.
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
        attempt, diagnosis = self.attempt, self.diagnosis
        laggard = diagnosis.laggard
        return {
            "schema": SCHEMA,
            "run_id": self.run.id,
            "state": self.run.state,
            "attempt": attempt.number if attempt else None,
            "cause": attempt.cause if attempt else None,
            "reason": attempt.reason if attempt else self.run.reason,
            "root": match_json(diagnosis.root) if diagnosis.root else None,
            "others": [match_json(match) for match in diagnosis.others],
            "laggard": {"ranks": list(laggard.ranks), "why": laggard.why} if laggard else None,
            "ordered": diagnosis.ordered,
            "failing": self.failing.to_dict() if self.failing else None,
            "logs": {"read": self.read, "partly": list(self.partly), "problems": list(self.problems)},
        }


def match_json(match: PatternMatch) -> dict[str, Any]:
    """FOUND of the JSON contract. ``at_by``: whether ``at`` is the time of the line or that of its process's end."""
    first = match.first
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
        "count": match.count,
        "ranks": list(match.ranks),
    }


def diagnose(workspace: Workspace, run_id: str, number: int | None = None) -> AttemptDiagnosis:
    """Find out from its logs and journals why an attempt failed.

    Args:
        workspace: Where the run lives.
        run_id: The run.
        number: The attempt, counted from 1; None: the last one that failed, else the newest one.

    Raises:
        RunNotFound: The run has no such attempt.
    """
    # The journals may have grown since the last sync. Slurm was asked when the run was looked up.
    observe(workspace, [run_id], ask_slurm=False)
    run = workspace.store.load(run_id)
    assert run is not None
    attempt = _choose_attempt(run, number)
    if attempt is None:
        return AttemptDiagnosis(run=run, attempt=None, diagnosis=diagnose_hits(()), failing=None, read=0)
    journals = _Journals(workspace, run_id, attempt)
    logs = _Logs(journals)
    hits = [*logs.hits(workspace, run_id, attempt), *journals.hits()]
    return AttemptDiagnosis(
        run=run,
        attempt=attempt,
        diagnosis=diagnose_hits(hits, sorted(logs.ranks | set(journals.hosts))),
        failing=journals.failing(),
        read=logs.read,
        partly=logs.partly,
        problems=logs.problems,
    )


def _choose_attempt(run: Run, number: int | None) -> Attempt | None:
    if number is not None:
        chosen = next((attempt for attempt in run.attempts if attempt.number == number), None)
        if chosen is None:
            raise RunNotFound(f"run {run.id} has no attempt {number}; it has {len(run.attempts)}")
        return chosen
    failed = [attempt for attempt in run.attempts if attempt.ended and attempt.cause != "completed"]
    return failed[-1] if failed else run.newest


class _Journals:
    """What the journals of an attempt say: where its ranks ran, when they ended, and what the agents saw.

    ``hosts``: of each rank, by its number. ``failures``: the first one of each rank, as journaled.
    """

    def __init__(self, workspace: Workspace, run_id: str, attempt: Attempt) -> None:
        def events(cls: type[P]) -> list[Event[P]]:
            of_attempt = [e for e in workspace.store.events(run_id, cls) if attempt_of(e.source) == attempt.key]
            return sorted(of_attempt, key=lambda event: event.order)

        self.attempt = attempt
        self._ends = events(NodeEnded)
        self.hosts = _hosts_of_ranks(events(WorkersStarted), attempt)
        self.failures: dict[int, Mapping[str, Any]] = {}
        for end in self._ends:
            for failure in end.payload.failures:
                # Ends are in order, so this is the first failure of the rank.
                self.failures.setdefault(failure["rank"], failure)
                self.hosts.setdefault(failure["rank"], self._host(end))

    def exit_at(self, rank: int | None) -> float | None:
        """When a rank failed, in seconds since 1970; None if it did not, or if that is unknown."""
        return self.failures[rank].get("at") if rank in self.failures else None

    def failing(self) -> Failing | None:
        """The rank that failed first. One that failed because of another node counts only if there is no other."""
        ends = [end for end in self._ends if end.payload.failures]
        if not ends:
            return None
        first = min(ends, key=lambda end: (end.payload.cascade, end.payload.failed_at or end.time))
        failure = first.payload.failures[0]
        signal, code = failure.get("signal"), failure.get("exit_code")
        description = f"was killed by {signal}" if signal else f"exited with code {code}"
        if failure.get("error"):
            description += f": {_shown(str(failure['error']))}"
        lines = [_shown(str(line)) for line in failure.get("last_lines") or ()]
        return Failing(failure["rank"], self.hosts[failure["rank"]], description, lines)

    def hits(self) -> Iterator[Hit]:
        """What the journals add to the logs: evidence of the agents, hangs, and the cause of the attempt's end."""
        for end in self._ends:
            yield from _evidence_hits(end, self._host(end))
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


def _hosts_of_ranks(workers: Iterable[Event[WorkersStarted]], attempt: Attempt) -> dict[int, str]:
    """Where each rank was last started."""
    hosts = {}
    for event in workers:
        for rank in event.payload.processes:
            hosts[int(rank)] = attempt.hosts.get(node_of(event.source), "")
    return hosts


def _evidence_hits(end: Event[NodeEnded], host: str) -> Iterator[Hit]:
    """What an agent saw on its node after the ranks had ended: processes that the kernel killed, errors of GPUs."""
    attributes: dict[str, Any] = {
        "name": "evidence",
        "text": "",
        "origin": end.source,
        "host": host,
        "at": end.payload.failed_at or end.time,
    }
    evidence = end.payload.evidence
    if kills := evidence.get("oom_kills"):
        limit = evidence.get("memory_limit")
        share = f", whose limit is {limit / 2**30:.1f} GiB" if isinstance(limit, int | float) and limit else ""
        cause = f"memory was full: the kernel killed {kills} process(es) of the job{share}"
        yield Hit(role=ROOT, cause=cause, fix=_FIXES["oom"], **attributes)
    for error in evidence.get("xids") or ():
        role, cause, fix = explain_xid(int(error["code"]), str(error.get("bus") or ""))
        yield Hit(role=role, cause=cause, fix=fix, **{**attributes, "text": _shown(str(error.get("line") or ""))})


# --- logs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Log:
    """A file to read. ``rank`` and ``host``: its writer's. ``shared``: other starts of the job write to it as well."""

    path: Path
    rank: int | None
    host: str
    shared: bool = False


class _Logs:
    """The logs of an attempt, read within bounds. The public attributes are filled by :meth:`hits`."""

    def __init__(self, journals: _Journals) -> None:
        self._journals = journals
        # Programs log local time without naming the zone; nodes and this machine are taken to share it.
        self._zone: tzinfo = datetime.now().astimezone().tzinfo or UTC
        self.ranks: set[int] = set()
        self.read = 0
        self.partly: list[str] = []
        self.problems: list[str] = []

    def hits(self, workspace: Workspace, run_id: str, attempt: Attempt) -> Iterator[Hit]:
        """The known patterns in the logs of ranks, of agents and of the batch script of an ``attempt``.

        ``workspace`` and ``run_id``: where these logs are.
        """
        logs = list(self._files(workspace, run_id, attempt))
        # A thousand ranks would otherwise mean gigabytes.
        share = max(_LEAST_BYTES, _ALL_BYTES // max(1, len(logs)))
        legible = set()
        for log in logs:
            # One log that cannot be read must not hide what the others say.
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
                yield from self._hits_in(text, log, offset)
        for rank, failure in self._journals.failures.items():
            if rank not in legible:  # the log is gone, but the agent has journaled its last lines
                lines = "\n".join([*map(str, failure.get("last_lines") or ()), str(failure.get("error") or "")])
                yield from self._hits_in(lines, _Log(Path(f"journal of rank {rank}"), rank, ""), 0)

    def _files(self, workspace: Workspace, run_id: str, attempt: Attempt) -> Iterator[_Log]:
        directory = workspace.root.run(run_id)
        logs = directory.attempt(attempt.job_id, attempt.restart).logs
        matches = [(path, _RANK_LOG.fullmatch(path.name)) for path in _listed(logs)]
        rank_logs = [(path, int(match[1]), int(match[2] or 0)) for path, match in matches if match]
        # By rank and round, so that hits without a time are in the order in which they were written.
        for path, rank, _ in sorted(rank_logs, key=lambda log: log[1:]):
            self.ranks.add(rank)
            yield _Log(path, rank, self._journals.hosts.get(rank, ""))
        submission = directory.submission(attempt.submission)
        for path in _listed(submission.submitit):
            if path.name.startswith(f"{attempt.job_id}_") and path.name.endswith("_log.out"):
                yield _Log(path, None, attempt.hosts.get(path.name.split("_")[-2], ""), shared=True)
        if submission.controller_log.exists():
            yield _Log(submission.controller_log, None, "", shared=True)

    def _hits_in(self, text: str, log: _Log, offset: int) -> Iterator[Hit]:
        """The hits in a part of a log that begins at this offset."""
        attempt = self._journals.attempt
        # torch's log lines have no year: the end of the attempt decides it.
        near = attempt.ended_at or attempt.started_at or attempt.submitted_at or 0.0
        for place, pattern, match, line in scan_log(text):
            at = time_of(line, near, self._zone)
            if log.shared and not self._is_ours(at if at is not None else self._before(text, place, near)):
                continue
            # In the job's log only torch's own lines name their rank.
            rank = log.rank if log.rank is not None else rank_of(line)
            exact = at is not None
            yield make_hit(
                pattern,
                match,
                text=_shown(line),
                origin=str(log.path),
                rank=rank,
                host=log.host or self._journals.hosts.get(rank if rank is not None else -1, ""),
                at=at if exact else self._journals.exit_at(rank),
                exact=exact,
                line=offset + place,
            )

    def _before(self, text: str, place: int, near: float) -> float | None:
        """The time of the nearest line before an offset that has one, in seconds since 1970."""
        for line in reversed(text[max(0, place - _LOOK_BACK) : place].split("\n")):
            at = time_of(line, near, self._zone)
            if at is not None:
                return at
        return None

    def _is_ours(self, at: float | None) -> bool:
        """Whether a line of a shared log may be of this attempt, by its time; a line without a time may."""
        attempt = self._journals.attempt
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
    """(offset, text) of a log's beginning and end, or of all of it, and whether that is all of it. Raises OSError.

    ``share``: bytes that may be read of it.
    """
    tail = min(TAIL_BYTES, share * 3 // 4)
    head = min(HEAD_BYTES, share // 4)
    with path.open("rb") as file:
        # Of the open file: a rank that still runs may write meanwhile.
        size = os.fstat(file.fileno()).st_size
        if size <= head + tail:
            return [(0, _text(file.read(head + tail)))], True
        first = file.read(head)
        file.seek(size - tail)
        return [(0, _text(first)), (size - tail, _text(file.read(tail)))], False


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def _shown(line: str) -> str:
    """A line as it is printed: without secrets and control characters, and not too long."""
    # Logs may hold escape sequences, which could rewrite what else is on the terminal.
    clean = "".join(character if character.isprintable() else " " for character in redact(line.strip()))
    return clean if len(clean) <= _SHOWN_LINE else f"{clean[:_SHOWN_LINE]}..."
