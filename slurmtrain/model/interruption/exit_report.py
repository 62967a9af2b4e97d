"""Why the ranks of a node ended: the report that its agent makes, and how it is amended afterwards. Pure.

A report never changes. :func:`report_exits` makes it from how the ranks ended and whether a stop was requested, and
:func:`amend` returns a new one for each piece of later evidence. As the attempt's report, node 0 chooses the report of
the node that caused the others to end (:func:`report_attempt`).
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

# What the evidence of an attempt calls the time at which the command of node 0 had completed, long before the others.
NODE_0_COMPLETED = "node_0_completed_time"

# The exit code of a rank that stopped on request, saved, and can be resumed: EX_TEMPFAIL of sysexits.h.
STOPPED = 75

# What a rank reports if another one died, perhaps before the agent has noticed that death.
_CASCADE = re.compile(
    r"connection (?:closed|reset) by|closed by (?:remote )?peer|caused by a remote worker|ncclRemoteError|broken pipe"
    r"|did the remote server shutdown or crash",  # of torch's store, which rank 0 serves
    re.IGNORECASE,
)
_CASCADE_LINES = 8
# What Slurm sends ahead of the time limit (sbatch --signal): submitit requests SIGUSR2, a spec may request SIGUSR1.
_TIME_LIMIT_SIGNALS = frozenset({"SIGUSR1", "SIGUSR2"})
# After a stop request, a rank killed by one of these has not failed: the signal was sent to all processes.
_STOP_CODES = frozenset(
    -number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
)

# A signal to all processes of a job reaches a rank and its agent in any order, but at most this many seconds apart: a
# rank that exits by itself this shortly before the agent hears of the stop may have heard of it already.
_SIGNAL_SKEW_S = 1.0

# Errors of the GPU hardware, after which other nodes may do better (NVIDIA's catalogue of Xid errors).
_GPU_FAULTS = frozenset({48, 63, 64, 74, 79, 92, 95, 119, 120})
# Messages of PyTorch (torch/csrc/cuda, c10/cuda), CUDA and ROCm.
_GPU_MEMORY = re.compile(
    r"(?:CUDA|HIP) out of memory|CUDA error: out of memory|OutOfMemoryError|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"
)
# Messages of Python, of errno ENOMEM, of PyTorch's CPU allocator, and of C++.
_HOST_MEMORY = re.compile(
    r"\bMemoryError\b|Cannot allocate memory|DefaultCPUAllocator: (?:can't allocate|not enough) memory|std::bad_alloc"
)
# What PyTorch's DataLoader, process pools, subprocess and shells report of a child that SIGKILL has ended.
_CHILD_KILLED = re.compile(
    r"DataLoader worker .* is killed by signal: Killed|DataLoader worker .* exited unexpectedly|terminated abruptly"
    r"|died with <Signals\.SIGKILL|terminated with signal SIGKILL|returned non-zero exit status (?:-9|137)\b"
    r"|^\S+: line \d+: +\d+ Killed\b|^Killed$",
    re.MULTILINE,
)
# What shells add to the number of the signal that has ended their program.
_SHELL_SIGNAL = 128
# The exception, or the allocator's message, is at the end of a log.
_MEMORY_LINES = 3


# --- how ranks end --------------------------------------------------------------------------------------------------


def is_cascade(message: str) -> bool:
    """Whether this ``message`` of an exception says that another rank had failed before."""
    return _CASCADE.search(message) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """One rank's end. ``code`` is negative for a signal; ``at`` is in seconds since 1970.

    ``rank``: None if a command that starts ranks itself ended for another reason than one of them; ``node``: the node
    of such a command, else None. ``raised``: when the session saw an exception, and its text. Interpreter shutdown
    makes the exit come later. ``finished``: it has journaled that its work is done (``TrainingCompleted``).
    ``limit``: the limit of processes that it has met, in words; empty if none is known. ``error``: class and message of
    the exception in its log; ``place``: the user's line that raised it (``train.py:31``). Both are empty if unknown.
    """

    rank: int | None
    pid: int
    code: int
    at: float
    node: int | None = None
    raised: tuple[float, str] | None = None
    last_lines: Sequence[str] = ()
    finished: bool = False
    limit: str = ""
    error: str = ""
    place: str = ""

    @property
    def failed(self) -> bool:
        """Whether it neither completed nor stopped on request."""
        return self.code not in (0, STOPPED)

    @property
    def failed_at(self) -> float:
        """When it failed, in seconds since 1970."""
        return self.raised[0] if self.raised else self.at

    @property
    def cascade(self) -> bool:
        """Whether it failed because another rank had failed.

        A recorded exception decides, since the rank may be killed after raising it. SIGABRT counts as the rank's own
        end: NCCL's watchdog aborts its process.
        """
        if self.raised is not None:
            return is_cascade(self.raised[1])
        ended_itself = self.code > 0 or self.code == -signal.SIGABRT
        return ended_itself and _CASCADE.search("\n".join(self.last_lines[-_CASCADE_LINES:])) is not None

    @property
    def blame(self) -> tuple[bool, float]:
        """The exit that sorts first is to blame: the earliest that did not fail because of another."""
        return (self.cascade, self.failed_at)

    def describe(self) -> str:
        """How it ended, without a full stop: first its exception, or the last line of its log, then who it was."""
        last_line = next((line for line in reversed(self.last_lines) if line.strip()), "")
        message = self.error or (first_words(self.raised[1]) if self.raised else " ".join(last_line.split()))
        place = f" ({self.place})" if self.place else ""
        subject = f"rank {self.rank}" if self.rank is not None else f"the command on node {self.node}"
        if self.code < 0:
            # What a process printed before a signal ended it does not say why.
            end = f"{subject} was killed by {signal_name(-self.code)}{place}"
            return f"{end}: {self.limit}" if self.limit else end
        by = shell_signal(self.code)
        end = f"{subject} exited with code {self.code}" + (f" ({by})" if by else "")
        return "; ".join(filter(None, (message and f"{message}{place}", end, self.limit)))

    def to_dict(self) -> dict[str, Any]:
        """This as journaled."""
        return {
            "rank": self.rank,
            "node": self.node,
            "pid": self.pid,
            "exit_code": self.code if self.code >= 0 else None,
            "signal": signal_name(-self.code) if self.code < 0 else None,
            "at": self.failed_at,
            "error": self.raised[1] if self.raised else self.error or None,
            "last_lines": list(self.last_lines),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """Why the ranks of all nodes are to stop early.

    ``cause``: one of ``model/run.CAUSES``. ``why``: a sentence without a full stop. ``at``: seconds since 1970.
    ``node``: the node where the request arose, whose report then carries the blame. ``signal``: the name of the signal
    that requested it; only the scheduler, or a person, knows the reason for it.
    """

    cause: str
    why: str
    at: float
    node: int
    signal: str | None = None

    @classmethod
    def by_signal(cls, name: str, *, at: float, node: int) -> StopRequest:
        """A request because of a signal to the agent of ``node``, with the cause that such a signal most likely has.

        ``name``: the signal's. ``at``: when it came, in seconds since 1970.
        """
        if name in _TIME_LIMIT_SIGNALS:
            return cls(cause="timeout", why=f"the time limit is near ({name})", at=at, node=node, signal=name)
        return cls(cause="preempted", why=f"stopped by {name}", at=at, node=node, signal=name)


# --- the report -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReport:
    """Why the ranks of a node, or of an attempt, ended.

    ``cause``: one of ``model/run.CAUSES``. ``reason``: a sentence without a full stop. ``failed_at``: seconds since
    1970, None unless the cause is on this node. ``cascade``: it failed because another node had failed. ``failures``:
    the ranks that failed (:meth:`Exit.to_dict`), the one to blame first. ``signal``: the name of the signal that the
    agent got. ``without``: hosts to exclude from another attempt. ``sure``: the scheduler was asked what the signal
    stands for, and its answer was unambiguous. ``evidence``: what the cause was concluded from.
    """

    cause: str
    reason: str
    failed_at: float | None = None
    cascade: bool = False
    failures: Sequence[Mapping[str, Any]] = ()
    signal: str | None = None
    without: Sequence[str] = ()
    sure: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)

    _JOURNALED: ClassVar = ("cause", "reason", "failed_at", "cascade", "signal", "sure", "failures", "evidence")

    def to_dict(self) -> dict[str, Any]:
        """This as journaled, and as sent to the other nodes."""
        return {name: getattr(self, name) for name in self._JOURNALED}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ExitReport:
        """Read the result of :meth:`to_dict`."""
        return cls(**{name: plain[name] for name in cls._JOURNALED})

    def adding(self, reason: str) -> ExitReport:
        """The report with a further ``reason``, unless that is empty or the ranks completed."""
        return self if self.cause == "completed" or not reason else replace(self, reason=f"{self.reason}; {reason}")

    @property
    def blame(self) -> tuple[bool, bool, float]:
        """Of several nodes' reports, the one that sorts first is the cause: failures come before stops by a signal."""
        return (self.cascade, self.signal is not None, self.failed_at if self.failed_at is not None else math.inf)

    @property
    def gpu_failed(self) -> bool:
        """Whether a GPU of the node is to blame."""
        return any(error.get("code") in _GPU_FAULTS for error in self.evidence.get("xids", ()))

    @property
    def slurm_ends_it(self) -> bool:
        """Whether Slurm was already ending the job, for a reason that only its accounting knows.

        Slurm has then already decided what happens to the job, and a requeue would undo that.
        """
        return self.signal is not None and not self.sure and bool(self.evidence.get("slurm", {}).get("state"))


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How an attempt ended: on this node, and as a whole, as far as this node knows."""

    node_report: ExitReport
    attempt_report: ExitReport


def report_exits(
    exits: Sequence[Exit], request: StopRequest | None, node: int, *, zero_completes: bool = False
) -> ExitReport:
    """The report of a node, from the exits of all its ranks and the stop request, if there was one.

    A rank that failed before the request is the cause. Any exit after the request follows from it, unless all ranks
    completed despite the request. Code 0 alone does not mean that: many trainers exit with 0 when they are asked to
    stop, such as Lightning, whose SIGTERMException is a SystemExit without a code. It does if the rank has journaled
    that its work is done, or exited before the request.

    ``exits``: how each rank of the node ended. ``request``: why they were to stop; None: they were not. ``node``: this
    node's number. ``zero_completes``: code 0 means that the work is done, also after a request
    (``requeue.exit_zero: completed``).
    """
    failed = sorted(
        (each for each in exits if each.failed and not _follows(each, request)), key=lambda each: each.blame
    )
    if failed:
        first = failed[0]
        return ExitReport(
            cause="crash",
            reason=first.describe(),
            failed_at=first.failed_at,
            cascade=first.cascade,
            failures=[each.to_dict() for each in failed],
        )
    if all(each.code == 0 and (zero_completes or has_completed(each, request)) for each in exits):
        return ExitReport(cause="completed", reason="")
    if request is not None:
        at = request.at if request.node == node else None
        return ExitReport(cause=request.cause, reason=request.why, failed_at=at, signal=request.signal)
    return ExitReport(cause="cancelled", reason="the workers were told to stop, saved and exited")


def has_completed(exited: Exit, request: StopRequest | None) -> bool:
    """Whether a rank that exited with code 0 is known to have done its work, although a stop may have been requested.

    ``request``: why the ranks were to stop; None: they were not.
    """
    return exited.finished or request is None or exited.at < request.at - _SIGNAL_SKEW_S


def report_signal(
    name: str, *, at: float | None, before_start: bool = False, missing: Sequence[str] = ()
) -> ExitReport:
    """The report of a node that a signal stopped while it had no ranks.

    ``name``: the signal's. ``at``: when it came, in seconds since 1970; None if another node got it. With
    ``before_start`` no ranks had been started yet. ``missing``: nodes whose agents were gone by then.
    """
    return ExitReport(
        cause="preempted",
        reason=f"stopped by {name}" + (" before it began" if before_start else ""),
        failed_at=at,
        signal=name,
        evidence={"gone": list(missing)} if missing else {},
    )


def report_standby(attempt_report: ExitReport) -> ExitReport:
    """The report of a spare node that never had ranks, made from the attempt's report: the node is not to blame."""
    return replace(attempt_report, cascade=attempt_report.cause != "completed", failed_at=None)


def report_attempt(reports: Sequence[ExitReport], hang: str | None = None, lost: LostNodes | None = None) -> ExitReport:
    """The report of the node that caused the others to end, amended with what only node 0 knows.

    ``reports``: the reports of all nodes that made one. ``hang``: which ranks block all others, as a sentence without a
    full stop. ``lost``: nodes with ranks whose agents are gone.
    """
    failed = [report for report in reports if report.cause != "completed"]
    report = min(failed, key=lambda each: each.blame) if failed else reports[0]
    if report.cause == "hang" and hang is not None:
        # The rank that blocks the others is known; nodes that fell silent meanwhile are a consequence.
        return replace(report, reason=hang)
    return report if lost is None else amend(report, lost)


# --- what amends a report -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEvidence:
    """What the kernel of a node has recorded since its ranks started.

    ``oom_kills``: processes killed for lack of memory, of the job alone or, where that is not counted, of the machine.
    ``memory_limit``: the job's, in bytes; None if there is none. ``xids``: errors of GPUs, as
    ``runtime/preflight/facts/gpus.find_xids`` returns them.
    """

    oom_kills: int = 0
    memory_limit: int | None = None
    xids: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNodes:
    """Nodes with ranks whose agents have been silent for too long.

    ``names``: what people call them. ``hosts``: the lost nodes that can be excluded from a job. ``at``: when the loss
    was noticed, in seconds since 1970.
    """

    names: Sequence[str]
    hosts: Sequence[str] = ()
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeZeroCompleted:
    """The command of node 0 had ended with code 0 long before the commands of other nodes.

    ``at``: when, in seconds since 1970. ``names``: the other nodes.
    """

    at: float
    names: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCause:
    """Why a stop was requested, according to the scheduler. ``why``: a sentence without a full stop.

    ``sure``: False if another cause is possible; ``cause`` is then the one that costs least if it is wrong, and Slurm's
    accounting may know better later. ``job_runs_on``: Slurm is neither ending nor preempting the job. ``evidence``: the
    observations behind the conclusion, to be journaled; empty without Slurm.
    """

    cause: str
    why: str
    sure: bool = True
    job_runs_on: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)


Evidence = KernelEvidence | LostNodes | NodeZeroCompleted | StopCause


def amend(report: ExitReport, evidence: Evidence) -> ExitReport:
    """The report amended with later evidence; what explains it further goes through :meth:`ExitReport.adding`.

    In the order of arrival:

    * :class:`KernelEvidence`, on each node once its ranks have ended: added to ``evidence``; a crash for lack of memory
      becomes ``oom``.
    * :class:`LostNodes`, at node 0: unless the ranks completed, a lost node is the cause (``node_fail``) and is
      excluded from the next start. After a signal, the same signal may have ended it: then it is only added to
      ``evidence``.
    * :class:`NodeZeroCompleted`, at node 0: added to ``reason`` and ``evidence`` if the time limit ended the others.
    * :class:`StopCause`, once Slurm has answered: says what the signal stood for. If the job runs on, Slurm did not end
      it; if nodes are missing as well, srun ended the other tasks because of them (``node_fail``).
    """
    match evidence:
        case KernelEvidence():
            more: dict[str, Any] = {}
            if evidence.oom_kills:
                more |= {"oom_kills": evidence.oom_kills, "memory_limit": evidence.memory_limit}
            if evidence.xids:
                more["xids"] = list(evidence.xids)
            # The other failures follow from the first one.
            failures = report.failures[:1] if report.cause == "crash" else ()
            for oom in filter(None, (oom_reason(failure, evidence) for failure in failures)):
                report = replace(report, cause="oom", reason=f"{oom}; {report.reason}")
            return replace(report, evidence={**report.evidence, **more}) if more else report
        case LostNodes(names=names) if report.signal is not None:
            # Only Slurm can tell which caused the other: the StopCause that follows decides.
            return replace(report, evidence={**report.evidence, "gone": list(names)})
        case LostNodes() if report.cause != "completed":
            return ExitReport(
                cause="node_fail",
                reason=_describe_gone(evidence.names),
                # Ranks notice a lost node before its agent counts as gone.
                failed_at=report.failed_at or evidence.at,
                without=evidence.hosts,
            )
        case NodeZeroCompleted() if report.cause == "timeout":
            still = f"the command of node 0 had completed, but {', '.join(evidence.names)} still ran"
            return replace(
                report,
                reason=f"{report.reason}; {still}",
                # Of the reports of all nodes, this one is to become the attempt's.
                failed_at=evidence.at,
                evidence={**report.evidence, NODE_0_COMPLETED: evidence.at},
            )
        case StopCause():
            slurm = {"slurm": dict(evidence.evidence)} if evidence.evidence else {}
            report = replace(report, evidence={**report.evidence, **slurm})
            missing = report.evidence.get("gone", ())
            if missing and evidence.job_runs_on:
                reason = _describe_gone(missing)
                return replace(report, cause="node_fail", reason=reason, signal=None, without=missing)
            return replace(report, cause=evidence.cause, reason=evidence.why, sure=evidence.sure)
    return report


def oom_reason(failure: Mapping[str, Any], kernel: KernelEvidence) -> str | None:
    """Why a rank ended for lack of memory, as a sentence without a full stop; None if there is no sign that it did.

    ``failure``: the rank's, as :meth:`Exit.to_dict` returns it. ``kernel``: what the kernel of its node has recorded.
    """
    rank = failure.get("rank")
    subject = "a rank" if rank is None else f"rank {rank}"
    message = _last_words(failure)
    killed = failure.get("signal") == "SIGKILL"
    by_child = "\n".join([failure.get("error") or "", *(failure.get("last_lines") or ())])
    child_killed = shell_signal(failure.get("exit_code") or 0) == "SIGKILL" or _CHILD_KILLED.search(by_child)
    most = kernel.memory_limit
    limit = "the node had no memory left" if most is None else f"its limit is {most / 2**30:.3g} GiB"
    # If the count is for the whole machine, it may be of another job's process; but that somebody else kills one of
    # this rank's meanwhile is far less likely.
    if kernel.oom_kills > 0 and (killed or child_killed):
        whose = "" if killed else "a process of "
        return f"{whose}{subject} was killed for memory: {limit}"
    if _GPU_MEMORY.search(message):
        return f"{subject} ran out of GPU memory"
    if _HOST_MEMORY.search(message):
        return f"{subject} got no more memory: {limit}"
    return None


def is_of_gpu_memory(failures: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the first of these failures is that a GPU, and not the node, had no memory left."""
    return bool(failures) and _GPU_MEMORY.search(_last_words(failures[0])) is not None


def _last_words(failure: Mapping[str, Any]) -> str:
    return "\n".join([failure.get("error") or "", *(failure.get("last_lines") or ())[-_MEMORY_LINES:]])


def _describe_gone(names: Sequence[str]) -> str:
    """A sentence without a full stop, saying that the agents of these nodes have died."""
    agents = "its agent no longer responds" if len(names) == 1 else "their agents no longer respond"
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} gone: {agents}"


def _follows(exited: Exit, request: StopRequest | None) -> bool:
    """Whether this exit follows from the request. Signals reach the agent and the ranks in any order."""
    return request is not None and (exited.failed_at >= request.at or exited.code in _STOP_CODES)


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15. ``number``: a signal's."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shell_signal(code: int) -> str:
    """The signal that ended a shell's program, by the ``code`` that the shell exits with; empty if none did."""
    number = code - _SHELL_SIGNAL
    return signal.Signals(number).name if number in set(signal.Signals) else ""


def first_words(message: str) -> str:
    """The first line of a ``message``, with the next one if the first is its title."""
    first, _, rest = message.strip().partition("\n")
    second = rest.strip().partition("\n")[0].strip() if first.rstrip().endswith(":") else ""
    return f"{first.strip()} {second}".strip()
