"""What the journals of an attempt say about its failure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from slurmtrain.model.diagnosis.hang import LOADER_WAIT
from slurmtrain.model.diagnosis.log_scan import Hit
from slurmtrain.model.diagnosis.patterns import CONFIRMATION, NOTE, ROOT, explain_xid
from slurmtrain.model.diagnosis.redact import redact
from slurmtrain.model.interruption.policy import policy_of
from slurmtrain.model.run.events.agent_events import NodeEnded, WorkersStarted
from slurmtrain.model.run.events.base import AnyEvent, Event, P
from slurmtrain.model.run.layout import attempt_of, node_of
from slurmtrain.model.run.run import APART, Attempt
from slurmtrain.ops.shared.run_details import attempt_json
from slurmtrain.ops.shared.workspace import Workspace

# How many characters of a line are shown.
_SHOWN_LINE = 500
# No node has more ranks, and a journal may hold any number.
_MOST_RANKS = 1024
# The name of the hit that says how the attempt ended.
OUTCOME = "outcome"
_JOURNALS = "the run's journals"
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
# CPython's issue 112275: a child of fork() waits for a lock that another thread of its parent held.
_LOADER_FIX = (
    "look at what its dataset waits for; a worker can also hang as it is forked, with Python before 3.11.10: "
    "persistent_workers=True forks once instead of once an epoch, multiprocessing_context='forkserver' never"
)
_NOT_REQUEUED = "`slurmtrain resume` continues; leave requeue.enabled out, and it is requeued next time"
_FIX_PASSED_OVER = "`slurmtrain verify` reads the checkpoint; `slurmtrain resume` tries it again"


@dataclass(frozen=True, slots=True)
class FailedRank:
    """The rank that the journals say failed first: how (``description``, a predicate), and its last output lines.

    ``rank``: None if it is the command that was to start the ranks of ``host``.
    """

    rank: int | None
    host: str
    description: str
    last_lines: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {"rank": self.rank, "host": self.host, "how": self.description, "last_lines": list(self.last_lines)}


class AttemptJournals:
    """The facts in the journals of an attempt: where its ranks ran, when they ended, and what the agents saw.

    ``hosts``: the host of each rank. ``failures``: the first failure of each rank, as journaled; the failure of a
    command that was to start ranks is under None.
    """

    def __init__(self, workspace: Workspace, run_id: str, attempt: Attempt) -> None:
        """Read the journals of an ``attempt`` of the run ``run_id`` from the registry of ``workspace``."""

        def events(cls: type[P]) -> list[Event[P]]:
            of_attempt = [e for e in workspace.store.events(run_id, cls) if attempt_of(e.source) == attempt.key]
            return sorted(of_attempt, key=lambda event: event.order)

        self.attempt = attempt
        self._ends = events(NodeEnded)
        self.hosts = _hosts_of_ranks(events(WorkersStarted), attempt)
        self.failures: dict[int | None, Mapping[str, Any]] = {}
        for end in self._ends:
            for failure in end.payload.failures:
                # Ends are in order, so this is the first failure of the rank.
                self.failures.setdefault(failure["rank"], failure)
                if failure["rank"] is not None:
                    self.hosts.setdefault(failure["rank"], self._host(end))

    def exit_at(self, rank: int | None) -> float | None:
        """When a rank failed, in seconds since 1970; None if it did not, or if that is unknown."""
        return self.failures[rank].get("at") if rank in self.failures else None

    def failing(self) -> FailedRank | None:
        """The rank that failed first. One that failed because of another node counts only if there is no other."""
        ends = [end for end in self._ends if end.payload.failures]
        if not ends:
            return None
        # Agents end their ranks when another node fails ("cascade"), and clocks may differ, so the cause outranks time.
        first = min(ends, key=lambda end: (end.payload.cascade, end.payload.failed_at or end.time))
        failure = first.payload.failures[0]
        signal, code = failure.get("signal"), failure.get("exit_code")
        description = f"was killed by {signal}" if signal else f"exited with code {code}"
        if failure.get("error"):
            description += f": {printable(str(failure['error']))}"
        lines = [printable(str(line)) for line in failure.get("last_lines") or ()]
        rank = failure["rank"]
        host = self.hosts[rank] if rank is not None else self._host(first)
        return FailedRank(rank, host, description, lines)

    def hits(self) -> Iterator[Hit]:
        """What the journals add to the logs: evidence of the agents, hangs, and the cause of the attempt's end."""
        for end in self._ends:
            yield from _evidence_hits(end, self._host(end))
        # As in ``show``: only all nodes together can name the culprits, a single one cannot.
        facts = attempt_json(self.attempt)
        for number, hang in enumerate(facts["hangs"]):
            first = next(iter(hang["culprits"]), None)
            yield Hit(
                name="hang",
                role=ROOT,
                cause=f"no step was finished for too long: {hang['why']}",
                fix=_hang_fix(hang["why"]) + _how_long_it_computed(facts["raised_limits"]),
                text="",
                origin=_JOURNALS,
                rank=first,
                host=self.hosts.get(first, "") if first is not None else "",
                at=datetime.fromisoformat(hang["at"]).timestamp(),
                exact=True,
                line=number,
            )
        for number, passed_over in enumerate(facts["passed_over"]):
            yield Hit(
                name="passed_over",
                role=NOTE,
                cause=f"its ranks did not continue from {passed_over['path']}, since {passed_over['why']}",
                fix=_FIX_PASSED_OVER,
                text="",
                origin=_JOURNALS,
                at=datetime.fromisoformat(passed_over["at"]).timestamp(),
                exact=True,
                line=number,
            )
        if apart := str(self.attempt.evidence.get(APART) or ""):
            problem, _, fix = apart.partition("; ")
            yield Hit(name=APART, role=NOTE, cause=problem, fix=fix, text="", origin=_JOURNALS)
        cause = self.attempt.cause
        if cause in _FIXES:
            yield Hit(
                name=OUTCOME,
                role=CONFIRMATION,
                cause=self.attempt.reason or cause,
                fix=_NOT_REQUEUED if cause == "preempted" and not self._is_requeued() else _FIXES[cause],
                text="",
                origin=_JOURNALS,
                at=self.attempt.ended_at,
            )

    def _is_requeued(self) -> bool:
        return self.attempt.policy is None or policy_of(self.attempt).enabled

    def _host(self, event: AnyEvent) -> str:
        return self.attempt.hosts.get(node_of(event.source), "")


def suspended(reason: str, job_id: str | None) -> Hit:
    """That Slurm has suspended the job of an attempt. ``reason``: which says so, and since when."""
    return Hit(
        name="suspended",
        role=ROOT,
        cause=f"{reason}: its processes are stopped, and the time counts neither as training nor as a hang",
        fix=(
            f"`scontrol resume {job_id}` lets it go on where it is, if you may (Slurm allows it to operators); a job "
            "that another one has preempted goes on by itself when that one ends"
        ),
        text="",
        origin="Slurm",
    )


def _hang_fix(why: str) -> str:
    """What to do about a hang, if ``why`` says which ranks are to blame and where they are."""
    return _LOADER_FIX if LOADER_WAIT in why else _FIXES["hang"]


def _how_long_it_computed(raised: Sequence[Mapping[str, Any]]) -> str:
    """What to do if ranks computed for long before the hang; empty if they did not."""
    if not raised:
        return ""
    last = raised[-1]
    return (
        f"; its limit had been raised to {last.get('raised_s')} s, since {last.get('why')}: run.pause() gives it longer"
    )


def _hosts_of_ranks(workers: Iterable[Event[WorkersStarted]], attempt: Attempt) -> dict[int, str]:
    """Where each rank was last started."""
    hosts = {}
    for event in workers:
        each = min(event.payload.ranks_each, _MOST_RANKS)
        for number in event.payload.processes:
            host = attempt.hosts.get(node_of(event.source), "")
            first = int(number) * each if event.payload.first_rank is None else event.payload.first_rank
            hosts.update(dict.fromkeys(range(first, first + each), host))
    return hosts


def _evidence_hits(end: Event[NodeEnded], host: str) -> Iterator[Hit]:
    """What an agent saw on its node after the ranks had ended: processes killed by the kernel, GPU errors."""
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
        yield Hit(role=role, cause=cause, fix=fix, **{**attributes, "text": printable(str(error.get("line") or ""))})


def printable(line: str) -> str:
    """A line for printing: without secrets and control characters, and not too long."""
    # Logs may contain escape sequences, which could overwrite other text on the terminal.
    clean = "".join(character if character.isprintable() else " " for character in redact(line.strip()))
    return clean if len(clean) <= _SHOWN_LINE else f"{clean[:_SHOWN_LINE]}..."
