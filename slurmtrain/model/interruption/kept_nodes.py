"""Whether and how long a job keeps its nodes after a failure (``requeue.keep_nodes``): pure."""

from __future__ import annotations

from datetime import UTC, datetime

from slurmtrain.model.interruption.exit_report import ExitReport

# What a person may want to look at: not what was announced, nor what a signal has ended.
_FAILURES = frozenset({"crash", "hang", "oom", "node_fail", "preflight"})
# The job needs this long to end by itself before Slurm ends it.
_BEFORE_LIMIT_S = 30.0


def kept_s(report: ExitReport, keep_s: int | None, left_s: float | None) -> float:
    """For how many seconds the nodes are kept; 0: not at all.

    Args:
        report: how the attempt ended.
        keep_s: how long to keep them, in seconds, by the spec; None: not at all.
        left_s: the seconds until the job's time limit; None if it has none.
    """
    if keep_s is None or report.cause not in _FAILURES or report.signal is not None:
        return 0.0
    return max(0.0, keep_s if left_s is None else min(keep_s, left_s - _BEFORE_LIMIT_S))


def describe_kept(report: ExitReport, job_id: str, until: float) -> str:
    """Why the attempt has not ended yet, as a sentence without a full stop.

    Args:
        report: how the attempt ended.
        job_id: its job's id, as Slurm's commands take it.
        until: when the nodes are let go, in seconds since 1970.
    """
    at = datetime.fromtimestamp(until, UTC).strftime("%H:%M:%S UTC")
    return (
        f"{report.reason}; its nodes are kept until {at}: 'srun --jobid={job_id} --overlap --pty bash' enters the "
        f"first, 'scancel --signal=USR2 {job_id}' lets them go"
    )
