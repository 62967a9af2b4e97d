"""Why a signal reached the processes of a job, and how long is left: by what Slurm says of the job just then.

Slurm sends the same SIGTERM for a preemption, a cancel, a requeue, a time limit and a node's failure. What tells them
apart is the job's record (``scontrol show job``), asked once while the signal is still new. Seen on 22.05:

* Preemption with a grace: RUNNING, PreemptTime is set, and EndTime is the end of the grace.
* Time limit: COMPLETING, Reason=TimeLimit, EndTime is now; some seconds to a minute after the limit.
* Cancel: COMPLETING (not CANCELLED, which it is afterwards), EndTime is now, no PreemptTime.
* Put back into the queue: COMPLETING, but of its next start: EndTime lies ahead by the whole limit, and PreemptTime is
  gone. Somebody may have asked for it, the grace of a preemption be over, or another node have failed.
* ``scancel --signal``, or a plain kill: RUNNING, and nothing else.

:class:`JobQuery` asks; all other functions are pure.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.interruption.exit_report import StopCause
from slurmtrain.model.interruption.interval import DEFAULT_GRACE_S
from slurmtrain.model.run.job_state import CAUSE_OF_STATE, base, describe_state

# How long an answer is waited for when there is nothing else left to do.
PATIENCE_S = 6.0
# How long a job takes from the decision to leave until it is back in the queue: asking, answering, ending the ranks.
PUT_BACK_S = 4.0
# Less than this is no use to ranks; and they are asked to stop before they are killed, however late it is.
_LEAST_S = 1.0
# No number of a job's record has as many.
_DIGITS = 20

# Slurm's times are whole seconds, and its record is a moment younger than the signal.
_NOW_S = 5.0
# PreemptTime may be announced a little ahead.
_AHEAD_S = 60.0
# Signals that a job asks for ahead of its time limit (sbatch --signal).
_WARNINGS = frozenset({"SIGUSR1", "SIGUSR2"})
_LEAVING = frozenset({"COMPLETING", "PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
# The reason of a job that Slurm ends (job_state_reason_string of 22.05 to 25.11).
_STATE_OF_REASON = {
    "TimeLimit": "TIMEOUT", "DeadLine": "DEADLINE", "NodeDown": "NODE_FAIL", "OutOfMemory": "OUT_OF_MEMORY",
}  # fmt: skip
_OVER = frozenset(CAUSE_OF_STATE) - {"REQUEUED", "COMPLETED", "FAILED"}


class JobQuery:
    """One question, in a thread of its own: whoever waits for Slurm does not keep ranks from stopping."""

    def __init__(self, read_record: Callable[[], Mapping[str, str]] | None, grace_s: float | None) -> None:
        """``read_record``: fields of the job's record; None where nobody can be asked. ``grace_s``: the site's."""
        self._read_record = read_record
        self._grace_s = grace_s
        self._thread: threading.Thread | None = None
        self._view: JobView | None = None
        self._asked_at = 0.0
        self._began: float | None = None

    def begin(self) -> float:
        """Ask, if nobody has yet. Returns when that was, by the monotonic clock: the time of the ranks counts from it.

        The signal is what starts the grace, and it has just come; Slurm may take seconds to answer.
        """
        if self._began is None:
            self._began = time.monotonic()
            if self._read_record is not None:
                self._thread = threading.Thread(target=self._ask, daemon=True)
                self._thread.start()
        return self._began

    def view(self) -> JobView | None:
        """The answer, waited for for some seconds; None where there was none."""
        self.begin()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
        return self._view

    def stop_by(self) -> float:
        """Until when ranks may take to save and leave, by the monotonic clock, as far as it is known now."""
        began = self.begin()
        view = self._view
        if view is None:
            return began + budget(None, self._grace_s)
        return began + budget(time_left(view, self._asked_at), self._grace_s)

    def _ask(self) -> None:
        assert self._read_record is not None
        began = self.begin()
        try:
            fields = self._read_record()
        except SlurmtrainError:
            return
        # The wall clock as it was when the question was asked: what is left is counted from there on.
        self._asked_at = time.time() - (time.monotonic() - began)
        self._view = read_view(fields)


# --- what the answer means ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """What Slurm says of a job at one moment. Times are seconds since 1970; None where it does not say.

    ``end_time``: when Slurm ends it, at its limit or when the grace of a preemption is over; or when it did.
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
    machine; words such as None, Unknown and UNLIMITED are no times. Raises nothing.
    """
    return JobView(
        state=base(fields.get("JobState", "")),
        preempt_time=_time(fields.get("PreemptTime", "")),
        end_time=_time(fields.get("EndTime", "")),
        start_time=_time(fields.get("StartTime", "")),
        time_limit_s=_duration(fields.get("TimeLimit", "")),
        requeue={"0": False, "1": True}.get(fields.get("Requeue", "")),
        reason="" if fields.get("Reason", "").lower() in ("none", "(null)") else fields.get("Reason", ""),
        restarts=_whole(fields.get("Restarts", "")),
    )


def cause_of_stop(signal: str, view: JobView | None, *, now: float, executor: str, deadline: bool) -> StopCause:
    """Why a node's agent got a signal.

    ``signal``: its name; empty for none. ``view``: what Slurm said just after; None if it did not answer, or there is
    no Slurm. ``now``: when, in seconds since 1970. ``executor``: ``slurm`` or ``local``. ``deadline``: the agent itself
    knows that the time limit is reached.

    What Slurm says comes before what the signal means: SIGUSR2 is for the time limit, but sent at a preemption as well
    where the site has ``PreemptParameters=send_user_signal``. In doubt it is a preemption, which is the cheapest to be
    wrong about: a job that a person cancelled cannot be put back (``scontrol requeue incomplete`` is ignored).
    """
    evidence = {} if executor == "local" else {"signal": signal, **({} if view is None else _evidence(view, now))}
    runs_on = executor == "slurm" and view is not None and view.state == "RUNNING" and view.preempt_time is None
    by_record = _cause_by_record(view, now) if executor == "slurm" and view is not None else None
    if by_record is not None:
        cause, why = by_record
        # Put back into the queue: by whom, and so why, only Slurm's accounting tells.
        sure = why != describe_state("REQUEUED")
    else:
        cause, why, sure = _cause_by_signal(signal, view, executor=executor, deadline=deadline)
    return StopCause(cause=cause, why=why, sure=sure, job_runs_on=runs_on, evidence=evidence)


def time_left(view: JobView | None, now: float) -> float | None:
    """Seconds until Slurm ends the job, at its limit or at the end of a preemption's grace; None where it is not known.

    0 where it ends now. A job that leaves already has KillWait, which its record does not tell.
    """
    if view is None or view.end_time is None or view.state in _LEAVING:
        return None
    return max(0.0, view.end_time - now)


def budget(left_s: float | None, grace_s: float | None) -> float:
    """Seconds that ranks may take to save and leave.

    ``left_s``: what Slurm leaves (:func:`time_left`); without an answer ``grace_s``, what is known of the site, or
    30 s. The job then still has to be put back into the queue, which takes some seconds of it. At least 1 s.
    """
    available = left_s if left_s is not None else grace_s if grace_s is not None else DEFAULT_GRACE_S
    return max(_LEAST_S, available - PUT_BACK_S)


def _cause_by_record(view: JobView, now: float) -> tuple[str, str] | None:
    """Cause and reason, as far as the job's record says."""
    if view.state in ("CANCELLED", "REVOKED"):
        return "cancelled", describe_state(view.state)
    if _is_preempted(view, now):
        return "preempted", describe_state("PREEMPTED")
    if view.state in _OVER:
        return CAUSE_OF_STATE[view.state], describe_state(view.state)
    ended = view.end_time is not None and view.end_time <= now + _NOW_S
    if view.state == "COMPLETING" and ended:
        # A job that ends by itself has another reason; without any, somebody has ended it.
        state = _STATE_OF_REASON.get(view.reason, "") if view.reason else "CANCELLED"
        return (CAUSE_OF_STATE[state], describe_state(state)) if state else None
    if view.state in _LEAVING:
        return "preempted", describe_state("REQUEUED")
    return ("timeout", describe_state("TIMEOUT")) if ended and _has_used_its_limit(view) else None


def _cause_by_signal(signal: str, view: JobView | None, *, executor: str, deadline: bool) -> tuple[str, str, bool]:
    """Cause and reason by the signal, and whether that is certain."""
    if deadline:
        return "timeout", describe_state("TIMEOUT"), True
    if signal in _WARNINGS:
        return "timeout", f"the time limit is near ({signal})", executor == "local" or view is not None
    if executor == "local":
        if signal == "SIGINT":
            return "cancelled", "stopped by SIGINT", True
        return "preempted", f"stopped by {signal}", True
    if view is None:
        return "preempted", f"stopped by {signal}, and Slurm does not say why", False
    return "preempted", f"stopped by {signal}, though Slurm neither preempts nor ends its job", True


def _is_preempted(view: JobView, now: float) -> bool:
    """Whether PreemptTime speaks of this start of the job: not of an earlier one, nor of one to come."""
    since = view.start_time if view.start_time is not None else -math.inf
    return view.preempt_time is not None and since <= view.preempt_time <= now + _AHEAD_S


def _has_used_its_limit(view: JobView) -> bool:
    if view.end_time is None or view.start_time is None or view.time_limit_s is None:
        return False
    return view.end_time - view.start_time >= view.time_limit_s - _NOW_S


def _evidence(view: JobView, now: float) -> dict[str, Any]:
    return {**asdict(view), "time_left_s": time_left(view, now)}


def _time(text: str) -> float | None:
    """A time of Slurm's; 0 and words stand for none."""
    with contextlib.suppress(ValueError):
        seconds = float(text)
        return seconds if math.isfinite(seconds) and seconds > 0 else None
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromisoformat(text).timestamp()
    return None


def _duration(text: str) -> float | None:
    """Seconds of ``days-hours:minutes:seconds``, the form that a job's record always has; None for words."""
    days, _, rest = text.rpartition("-")
    parts = [_whole(part) for part in (days or "0", *rest.split(":"))]
    if len(parts) != 4:
        return None
    whole_days, hours, minutes, seconds = parts
    if whole_days is None or hours is None or minutes is None or seconds is None:
        return None
    return float(((whole_days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < _DIGITS else None
