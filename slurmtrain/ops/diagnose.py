"""Why an attempt failed, judged by known patterns in its logs, by its journals, and by its state in Slurm.

Also what can be looked up at once about a failure: files beside a missing one, modules beside a misspelt one.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError, RunNotFound
from slurmtrain.model.diagnosis.hang import LOADER_WAIT
from slurmtrain.model.diagnosis.last_words import KILLED
from slurmtrain.model.diagnosis.patterns import CASCADE, CONFIRMATION, LOCAL_FIXES, NOTE, ROOT, explain_xid
from slurmtrain.model.diagnosis.root_cause import Diagnosis, Hit, PatternMatch, diagnose_hits
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.interruption.policy import policy_of
from slurmtrain.model.query.fields import iso
from slurmtrain.model.run.events.agent_events import NodeEnded, WorkersStarted
from slurmtrain.model.run.events.base import AnyEvent, Event, P
from slurmtrain.model.run.job_state import SUSPENDED
from slurmtrain.model.run.layout import RunDir, attempt_of, node_of
from slurmtrain.model.run.run import APART, Attempt, Live, Run
from slurmtrain.ops.attempt_logs import AttemptLogs, printable_line
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.run_details import attempt_json
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.node import read_plan
from slurmtrain.system.owned_files import user_name


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDiagnosis:
    """Why an attempt failed, as far as its files show.

    ``attempt``: None if the run was never started. ``read``: the number of logs that were read. ``partly``: paths of
    logs that were read only at their beginning and end. ``problems``: logs that could not be read, and why. ``ranks``:
    how many ranks it had, as far as that is known.
    """

    run: Run
    attempt: Attempt | None
    diagnosis: Diagnosis
    failing: FailedRank | None
    read: int
    partly: Sequence[str] = ()
    problems: Sequence[str] = ()
    ranks: int = 0

    @property
    def headline(self) -> str:
        """The one sentence, without a full stop, that answers why the attempt failed; empty if nothing is known."""
        if self.diagnosis.root is not None:
            first = self.diagnosis.root.first
            host = f" on {first.host}" if first.host else ""
            return first.cause + (f" (rank {first.rank}{host})" if first.rank is not None and self.ranks > 1 else "")
        return self.attempt.reason if self.attempt is not None else self.run.reason

    def to_dict(self) -> dict[str, Any]:
        """What ``doctor RUN --json`` prints."""
        attempt, diagnosis = self.attempt, self.diagnosis
        return {
            "schema": SCHEMA,
            "run_id": self.run.id,
            "state": self.run.state,
            "headline": self.headline,
            "attempt": attempt.number if attempt else None,
            "cause": attempt.cause if attempt else None,
            "reason": attempt.reason if attempt else self.run.reason,
            "root": match_json(diagnosis.root) if diagnosis.root else None,
            "others": [match_json(match) for match in diagnosis.others],
            "laggard": asdict(diagnosis.laggard) if diagnosis.laggard else None,
            "ordered": diagnosis.ordered,
            "inherited": dict(attempt.inherited) if attempt else {},
            "failing": self.failing.to_dict() if self.failing else None,
            "logs": {"read": self.read, "partly": list(self.partly), "problems": list(self.problems)},
        }


def match_json(match: PatternMatch) -> dict[str, Any]:
    """FOUND of the JSON contract. ``at_by``: whether ``at`` is the time of the line or of its process's end."""
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


def diagnose(
    workspace: Workspace, run_id: str, number: int | None = None, live: Live | None = None
) -> AttemptDiagnosis:
    """Find out from its logs and journals why an attempt failed, or why it does not train.

    Args:
        workspace: Where the run is.
        run_id: The run.
        number: The attempt, counted from 1; None: the newest one if Slurm has suspended its job, else the last one
            that failed, else the newest one.
        live: What Slurm says of the run's job, if it is not over.

    Raises:
        RunNotFound: The run has no such attempt.
    """
    # The journals may have grown since the last sync. Slurm was already asked when the run was looked up.
    observe(workspace, [run_id], ask_slurm=False)
    run = workspace.store.load(run_id)
    assert run is not None
    is_suspended = live is not None and live.state == SUSPENDED
    # Not simply the newest: the question is not about an attempt that runs now, after a failure.
    failed = [each for each in run.attempts if each.ended and each.cause != "completed"]
    attempt = failed[-1] if failed and not is_suspended else run.newest
    if number is not None:
        attempt = next((each for each in run.attempts if each.number == number), None)
        if attempt is None:
            raise RunNotFound(f"run {run.id} has no attempt {number}; it has {len(run.attempts)}")
    if attempt is None:
        return AttemptDiagnosis(run=run, attempt=None, diagnosis=diagnose_hits(()), failing=None, read=0)
    journals = AttemptJournals(workspace, run_id, attempt)
    facts = LookedUp.of_attempt(workspace.root.run(run_id), run, attempt)
    logs = AttemptLogs(attempt, run.attempts, journals.hosts, journals.failures, facts)
    hits = [*logs.hits(workspace, run_id), *journals.hits()]
    if attempt.cause == "crash" and not any(hit.role in (ROOT, CASCADE) for hit in hits):
        # Nothing but its reason, as of a setup that failed.
        hits.append(Hit(name=OUTCOME, role=CONFIRMATION, cause=attempt.reason, fix="", text="", origin=_JOURNALS))
    if any(hit.name == "oom" and hit.role == ROOT for hit in hits):
        hits = [hit for hit in hits if hit.name != KILLED]
    if facts.is_local:
        by_name = {hit.name: attempt.cause if hit.name == OUTCOME else hit.name for hit in hits}
        hits = [replace(hit, fix=LOCAL_FIXES.get(str(by_name[hit.name]), hit.fix)) for hit in hits]
    if live is not None and is_suspended and attempt is run.newest:
        hits.append(suspended(live.reason, attempt.job_id))
    return AttemptDiagnosis(
        run=run,
        attempt=attempt,
        diagnosis=diagnose_hits(hits, sorted(logs.ranks | set(journals.hosts))),
        failing=journals.failing(),
        read=logs.read,
        ranks=len(logs.ranks | set(journals.hosts)),
        partly=logs.partly,
        problems=logs.problems,
    )


# --- its journals -----------------------------------------------------------------------------------------------------

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
        # Where each rank was last started.
        self.hosts: dict[int, str] = {}
        for event in events(WorkersStarted):
            each = min(event.payload.ranks_each, _MOST_RANKS)
            for number in event.payload.processes:
                first = int(number) * each if event.payload.first_rank is None else event.payload.first_rank
                self.hosts.update(dict.fromkeys(range(first, first + each), self._host(event)))
        self.failures: dict[int | None, Mapping[str, Any]] = {}
        for end in self._ends:
            for failure in end.payload.failures:
                # Ends are in order, so this is the first failure of the rank.
                self.failures.setdefault(failure["rank"], failure)
                if failure["rank"] is not None:
                    self.hosts.setdefault(failure["rank"], self._host(end))

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
            description += f": {printable_line(str(failure['error']))}"
        lines = [printable_line(str(line)) for line in failure.get("last_lines") or ()]
        rank = failure["rank"]
        return FailedRank(rank, self.hosts[rank] if rank is not None else self._host(first), description, lines)

    def hits(self) -> Iterator[Hit]:
        """What the journals add to the logs: evidence of the agents, hangs, and the cause of the attempt's end."""
        journaled = partial(Hit, text="", origin=_JOURNALS)
        for end in self._ends:
            yield from _evidence_hits(end, self._host(end))
        # As in ``show``: only all nodes together can name the culprits, a single one cannot.
        facts = attempt_json(self.attempt)
        raised = ""
        if facts["raised_limits"]:
            # Ranks computed for long before.
            last = facts["raised_limits"][-1]
            raised = f"; its limit had been raised to {last.get('raised_s')} s, since {last.get('why')}: "
            raised += "run.pause() gives it longer"
        for number, hang in enumerate(facts["hangs"]):
            first = next(iter(hang["culprits"]), None)
            fix = (_LOADER_FIX if LOADER_WAIT in hang["why"] else _FIXES["hang"]) + raised
            cause = f"no step was finished for too long: {hang['why']}"
            host = self.hosts.get(first, "") if first is not None else ""
            at = datetime.fromisoformat(hang["at"]).timestamp()
            # Ranks that were started again went on after it.
            role = NOTE if hang["round"] < len(facts["restarts"]) else ROOT
            hit = journaled(name="hang", role=role, cause=cause, fix=fix, at=at, exact=True, line=number)
            yield replace(hit, rank=first, host=host)
        for number, passed_over in enumerate(facts["passed_over"]):
            cause = f"its ranks did not continue from {passed_over['path']}, since {passed_over['why']}"
            at = datetime.fromisoformat(passed_over["at"]).timestamp()
            fix = _FIX_PASSED_OVER
            yield journaled(name="passed_over", role=NOTE, cause=cause, fix=fix, at=at, exact=True, line=number)
        if apart := str(self.attempt.evidence.get(APART) or ""):
            problem, _, fix = apart.partition("; ")
            yield journaled(name=APART, role=NOTE, cause=problem, fix=fix)
        ended = self.attempt.cause
        is_requeued = self.attempt.policy is None or policy_of(self.attempt).enabled
        if ended in _FIXES:
            fix = _NOT_REQUEUED if ended == "preempted" and not is_requeued else _FIXES[ended]
            cause = self.attempt.reason or ended
            yield journaled(name=OUTCOME, role=CONFIRMATION, cause=cause, fix=fix, at=self.attempt.ended_at)

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


def _evidence_hits(end: Event[NodeEnded], host: str) -> Iterator[Hit]:
    """What an agent saw on its node after the ranks had ended: processes killed by the kernel, GPU errors."""
    evidence_hit = partial(Hit, origin=end.source, host=host, at=end.payload.failed_at or end.time)
    evidence = end.payload.evidence
    if kills := evidence.get("oom_kills"):
        limit = evidence.get("memory_limit")
        share = f", whose limit is {limit / 2**30:.1f} GiB" if isinstance(limit, int | float) and limit else ""
        cause = f"memory was full: the kernel killed {kills} process{'es' * (kills > 1)} of the job{share}"
        # Whatever was killed: the rank that failed first has raised an exception of its own.
        is_aside = end.payload.cause != "oom" and any(failure.get("error") for failure in end.payload.failures[:1])
        yield evidence_hit(name="oom", role=NOTE if is_aside else ROOT, cause=cause, fix=_FIXES["oom"], text="")
    for error in evidence.get("xids") or ():
        role, cause, fix = explain_xid(int(error["code"]), str(error.get("bus") or ""))
        yield evidence_hit(
            name="evidence", role=role, cause=cause, fix=fix, text=printable_line(str(error.get("line") or ""))
        )


# Names in a directory that are looked at: some have millions.
_MOST_NAMES = 20_000


@dataclass(frozen=True)
class LookedUp:
    """The facts about an attempt, as :class:`~slurmtrain.model.diagnosis.last_words.Facts` has them."""

    is_local: bool
    folder: str
    python: str
    gpus: int
    copy: str
    """Where its command ran in the run's copy of its code, which stands for ``folder``; empty if there is none."""

    @classmethod
    def of_attempt(cls, directory: RunDir, run: Run, attempt: Attempt) -> LookedUp:
        """The facts of an ``attempt`` of ``run``, which has this ``directory``."""
        plan: Plan | None = None
        with contextlib.suppress(PathError):
            plan = read_plan(directory.submission(attempt.submission).plan) or read_plan(directory.plan)
        return cls(
            is_local=(attempt.executor or run.executor) == "local",
            folder=plan.workdir if plan is not None else "",
            python=plan.python if plan is not None else "",
            gpus=int(run.resources.get("gpus_per_node") or 0),
            copy=str(plan.working_directory(directory.code)) if plan is not None and plan.code is not None else "",
        )

    def exists(self, path: str) -> bool:
        """Whether this machine has this ``path`` now."""
        # A directory that cannot be entered is an error for Path.exists.
        return any(os.path.exists(place) for place in self._places(path))  # noqa: PTH110

    def names_in(self, folder: str) -> Sequence[str]:
        """The names in a ``folder`` of this machine."""
        return list(_names_in(folder))

    def modules(self) -> frozenset[str]:
        """The modules that its interpreter can import here, with Python's own."""
        return self._modules

    def programs(self) -> frozenset[str]:
        """The programs on this machine's PATH."""
        return frozenset(name for folder in os.get_exec_path() for name in _names_in(folder))

    def owner(self, path: str) -> str:
        """The user and the rights of a ``path``, in words."""
        for place in self._places(path):
            with contextlib.suppress(OSError):
                status = os.stat(place)  # noqa: PTH116
                return f"{user_name(status.st_uid)} ({stat.filemode(status.st_mode)})"
        return ""

    def version(self, package: str) -> str:
        """The version of this ``package``."""
        for name in self._installed:
            head, _, rest = name.partition("-")
            if head == package and rest.endswith(".dist-info"):
                return rest.removesuffix(".dist-info")
        return ""

    def _places(self, path: str) -> Iterator[str]:
        """The path, and where the run has a copy of it."""
        yield path
        if self.copy and path.startswith(f"{self.folder}/"):
            yield self.copy + path.removeprefix(self.folder)

    @cached_property
    def _modules(self) -> frozenset[str]:
        names = {name.partition(".")[0] for name in self._installed if not name.endswith((".dist-info", ".pth"))}
        return (
            frozenset(name for name in names if name.isidentifier()) | sys.stdlib_module_names if names else frozenset()
        )

    @cached_property
    def _installed(self) -> Sequence[str]:
        """The names in the folders for packages, without running the interpreter, which may be somebody else's."""
        if self.python == sys.executable:
            folders = [folder for folder in sys.path if "-packages" in folder]
        else:
            prefix = Path(self.python).parent.parent
            folders = [str(folder) for folder in prefix.glob("lib*/python3*/*-packages")] if self.python else []
        return [name for folder in folders for name in _names_in(folder)]


def _names_in(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry, _ in zip(entries, range(_MOST_NAMES), strict=False):
            yield entry.name
