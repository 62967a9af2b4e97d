"""Why a signal reached the processes of a job, and how much time is left, from what Slurm then says about the job.

Slurm sends the same SIGTERM for a preemption, a cancel, a requeue, a time limit and a node's failure. The job's record
(``scontrol show job``) distinguishes them. It is queried once, just after the signal. Seen on 22.05:

* Preemption with a grace period: RUNNING, PreemptTime is set, and EndTime is the end of the grace period.
* Time limit: COMPLETING, Reason=TimeLimit, EndTime is now; some seconds to a minute after the limit.
* Cancel: COMPLETING (not CANCELLED, which it is afterwards), EndTime is now, no PreemptTime.
* Requeue: COMPLETING, but the fields are for the next start: EndTime lies a whole time limit ahead, and
  PreemptTime is gone. A user may have requested it, a preemption's grace period may be over, or another node may have
  failed.
* ``scancel --signal``, or a plain kill: RUNNING, and nothing else.

:class:`JobQuery` asks; all other functions are pure.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.interruption.exit_report import StopCause
from slurmtrain.model.interruption.interval import DEFAULT_GRACE_S
from slurmtrain.model.run.job_state import CAUSE_OF_STATE, base, describe_state
from slurmtrain.runtime.agent.exits import unsigned_number

# How long to wait for the answer when there is nothing else left to do.
PATIENCE_S = 6.0
# How long a job needs to be requeued once it has decided to stop: asking Slurm, its answer, ending the ranks.
PUT_BACK_S = 4.0
# Ranks get at least this long: less is of no use, and they are asked to stop before they are killed, however late it
# is.
_LEAST_S = 1.0
# How far from now a time may be and still count as now: Slurm's times are whole seconds, and its record is slightly
# newer than the signal.
_NOW_S = 5.0
# PreemptTime may lie this far in the future.
_AHEAD_S = 60.0
_LIMIT = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9}):([0-9]{1,9}):([0-9]{1,9})")
# Signals that a job requests ahead of its time limit (sbatch --signal).
_WARNINGS = frozenset({"SIGUSR1", "SIGUSR2"})
_LEAVING = frozenset({"COMPLETING", "PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
# Job states by the reason of a job that Slurm ends (job_state_reason_string of 22.05 to 25.11).
_STATE_OF_REASON = {
    "TimeLimit": "TIMEOUT", "DeadLine": "DEADLINE", "NodeDown": "NODE_FAIL", "OutOfMemory": "OUT_OF_MEMORY",
}  # fmt: skip
_OVER = frozenset(CAUSE_OF_STATE) - {"REQUEUED", "COMPLETED", "FAILED"}


class JobQuery:
    """A single query to Slurm, in its own thread, so that waiting for the answer does not delay stopping the ranks."""

    def __init__(self, read_record: Callable[[], Mapping[str, str]] | None, grace_s: float | None) -> None:
        """``read_record``: returns the job's record; None if there is no Slurm to ask. ``grace_s``: the site's."""
        self._read_record = read_record
        self._grace_s = grace_s
        self._thread: threading.Thread | None = None
        self._view: JobView | None = None
        self._asked_at = 0.0
        self._began: float | None = None
        self._began_for_others: float | None = None

    def begin(self) -> float:
        """Ask, unless already asked. Returns when that was, by the monotonic clock: the ranks' time counts from then.

        The grace period starts with the signal, which has just arrived, not with the answer, which may take Slurm
        seconds.
        """
        if self._began is None:
            self._began = time.monotonic()
            if self._read_record is not None:
                self._thread = threading.Thread(target=self._ask, daemon=True)
                self._thread.start()
        return self._began

    def view(self) -> JobView | None:
        """Slurm's answer, waiting some seconds for it if necessary; None if there was none."""
        self.begin()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
        return self._view

    def stop_by(self) -> float:
        """The time by which ranks must have saved and exited, by the monotonic clock, judged by what is known now."""
        began = self.begin()
        view = self._view
        if view is None:
            return began + budget(None, self._grace_s)
        return began + budget(time_left(view, self._asked_at), self._grace_s)

    def stop_by_of_others(self) -> float:
        """The same if the signal was for nodes of another job, about which nothing is asked: the site's grace."""
        if self._began_for_others is None:
            self._began_for_others = time.monotonic()
        return self._began_for_others + budget(None, self._grace_s)

    def forget_others(self) -> None:
        """The other job's nodes take no part any more: the next such signal has a time of its own."""
        self._began_for_others = None

    def _ask(self) -> None:
        assert self._read_record is not None
        began = self.begin()
        try:
            fields = self._read_record()
        except SlurmtrainError:
            return
        # The wall-clock time at which Slurm was asked: the time left counts from then.
        self._asked_at = time.time() - (time.monotonic() - began)
        self._view = read_view(fields)


# --- what the answer means ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """What Slurm says about a job at one moment. Times are seconds since 1970, None if it gives none.

    ``end_time``: when Slurm ends or ended the job, at its time limit or at the end of a preemption's grace period.
    """

    state: str = ""
    preempt_time: float | None = None
    end_time: float | None = None
    start_time: float | None = None
    time_limit_s: float | None = None
    requeue: bool | None = None
    reason: str = ""
    restarts: int | None = None


def read_view(fields: Mapping[str, str]) -> JobView:
    """The view from the fields of ``scontrol show job``.

    Times may be seconds since 1970 (SLURM_TIME_FORMAT=%s) or, as Slurm prints them otherwise, local time of this
    machine; words such as None, Unknown and UNLIMITED count as no time. Never raises.
    """
    # A job's record always has it as [days-]hours:minutes:seconds, or as a word.
    limit = _LIMIT.fullmatch(fields.get("TimeLimit", ""))
    days, hours, minutes, seconds = (int(part or 0) for part in limit.groups()) if limit else (0, 0, 0, 0)
    limit_s = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds) if limit else None
    return JobView(
        state=base(fields.get("JobState", "")),
        preempt_time=_read_time(fields.get("PreemptTime", "")),
        end_time=_read_time(fields.get("EndTime", "")),
        start_time=_read_time(fields.get("StartTime", "")),
        time_limit_s=limit_s,
        requeue={"0": False, "1": True}.get(fields.get("Requeue", "")),
        reason="" if fields.get("Reason", "").lower() in ("none", "(null)") else fields.get("Reason", ""),
        restarts=unsigned_number(fields.get("Restarts", "")),
    )


def cause_of_stop(signal: str, view: JobView | None, *, now: float, executor: str, deadline: bool) -> StopCause:
    """Why a node's agent got a signal.

    ``signal``: its name; empty for none. ``view``: what Slurm said just after it; None if it did not answer or there is
    no Slurm. ``now``: the current time, in seconds since 1970. ``executor``: ``slurm`` or ``local``. ``deadline``:
    whether the agent itself knows that the time limit has been reached.

    What Slurm says takes precedence over what the signal usually means: SIGUSR2 is for the time limit, but with
    ``PreemptParameters=send_user_signal`` Slurm sends it at a preemption too. In doubt it counts as a preemption, the
    cheapest mistake: a job that a person cancelled cannot be requeued (``scontrol requeue incomplete`` is ignored).
    """
    fields = {} if view is None else {**asdict(view), "time_left_s": time_left(view, now)}
    evidence = {} if executor == "local" else {"signal": signal, **fields}
    runs_on = executor == "slurm" and view is not None and view.state == "RUNNING" and view.preempt_time is None
    by_record = _cause_by_record(view, now) if executor == "slurm" and view is not None else None
    if by_record is not None:
        cause, why = by_record
        # Requeued: only Slurm's accounting says by whom, and so why.
        sure = why != describe_state("REQUEUED")
    elif deadline:
        cause, why, sure = "timeout", describe_state("TIMEOUT"), True
    elif signal in _WARNINGS:
        cause, why, sure = "timeout", f"the time limit is near ({signal})", executor == "local" or view is not None
    elif executor == "local" and signal == "SIGINT":
        cause, why, sure = "cancelled", "stopped by SIGINT", True
    elif executor == "local":
        cause, why, sure = "preempted", f"stopped by {signal}", True
    elif view is None:
        cause, why, sure = "preempted", f"stopped by {signal}; Slurm does not say why", False
    else:
        why = f"stopped by {signal}, although Slurm neither preempts nor ends its job"
        cause, sure = "preempted", True
    return StopCause(cause=cause, why=why, sure=sure, job_runs_on=runs_on, evidence=evidence)


def time_left(view: JobView | None, now: float) -> float | None:
    """Seconds until Slurm ends the job, at its limit or at the end of a preemption's grace period; None if unknown.

    0 if it ends now. A job that is already completing has KillWait left, which its record does not show.
    """
    if view is None or view.end_time is None or view.state in _LEAVING:
        return None
    return max(0.0, view.end_time - now)


def budget(left_s: float | None, grace_s: float | None) -> float:
    """Seconds that ranks may take to save and leave.

    ``left_s``: what Slurm leaves (:func:`time_left`). If it is None, ``grace_s`` counts, the site's known grace period,
    or else 30 s. Some seconds of that are kept for requeuing the job. The result is at least 1 s.
    """
    available = left_s if left_s is not None else grace_s if grace_s is not None else DEFAULT_GRACE_S
    return max(_LEAST_S, available - PUT_BACK_S)


def _cause_by_record(view: JobView, now: float) -> tuple[str, str] | None:
    """Cause and reason, if the job's record says."""
    if view.state in ("CANCELLED", "REVOKED"):
        return "cancelled", describe_state(view.state)
    since = view.start_time if view.start_time is not None else -math.inf
    # Otherwise, it refers to an earlier start of the job, or to a later one.
    if view.preempt_time is not None and since <= view.preempt_time <= now + _AHEAD_S:
        return "preempted", describe_state("PREEMPTED")
    if view.state in _OVER:
        return CAUSE_OF_STATE[view.state], describe_state(view.state)
    ended = view.end_time is not None and view.end_time <= now + _NOW_S
    if view.state == "COMPLETING" and ended:
        # A job that ends by itself has another reason; without any reason, a user has cancelled it.
        state = _STATE_OF_REASON.get(view.reason, "") if view.reason else "CANCELLED"
        return (CAUSE_OF_STATE[state], describe_state(state)) if state else None
    if view.state in _LEAVING:
        return "preempted", describe_state("REQUEUED")
    if not ended or view.end_time is None or view.start_time is None or view.time_limit_s is None:
        return None
    has_used_its_limit = view.end_time - view.start_time >= view.time_limit_s - _NOW_S
    return ("timeout", describe_state("TIMEOUT")) if has_used_its_limit else None


def _read_time(text: str) -> float | None:
    """A time as Slurm prints it, in seconds since 1970; None for 0 and for words."""
    with contextlib.suppress(ValueError):
        seconds = float(text)
        return seconds if math.isfinite(seconds) and seconds > 0 else None
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromisoformat(text).timestamp()
    return None
