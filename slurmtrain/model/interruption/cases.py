"""What happens to a job at each kind of interruption, by the configuration of its site. Pure.

Sources: the manual pages of slurm.conf and sbatch, 22.05 to 25.11; what a job gets at each kind of end was observed on
clusters of 22.05 and 26.05.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from slurmtrain.model.interruption.preemption import Cluster, Partition, Preemption

# What starts a run again: its own agent from inside the job, Slurm, a command outside; "itself": it never ended.
STARTERS = ("agent", "slurm", "watch", "itself", "nobody")

# How long the agent of a local run lets its processes save (runtime/agent/workers).
LOCAL_GRACE_S = 30.0
# How often Slurm checks for preempted jobs whose grace is over, and how early it may send the time limit's warning.
_GRACE_CHECK_S = 30
_EARLY_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What matters about a job when it is interrupted: its requests to Slurm, and its saves. Times are in seconds.

    ``time_s``: its own time limit. ``lead_s``: how long before the limit it is warned. ``qos``: None if neither the
    plan nor an association of the user names it. ``requeue``: whether it is started again at all. ``save_s``: how long
    its last save took; None: unknown. ``nodes``: the minimum and maximum that train. ``own_saves``: its script saves by
    itself, when it gets ``signal``. ``watched``: whether a ``slurmtrain watch`` is running.
    """

    time_s: float | None = None
    lead_s: float = 90.0
    qos: str | None = None
    requeue: bool = True
    save_s: float | None = None
    nodes: tuple[int, int] = (1, 1)
    spares: int = 0
    own_saves: bool = False
    signal: str = "SIGTERM"
    watched: bool = False

    @property
    def elastic(self) -> bool:
        """Whether it continues when one of its nodes is lost."""
        return self.spares > 0 or self.nodes[0] < self.nodes[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionCase:
    """What happens at one kind of interruption.

    ``event``: preemption, time limit, node failure or scancel. ``seconds``: how long a job has for saving; None: the
    interruption does not happen, or the time is unknown. ``starts``: what starts the run again, one of STARTERS, after
    at least ``delay_s`` seconds. ``text``: a description of all this.
    """

    event: str
    seconds: float | None
    starts: str
    delay_s: float | None
    text: str

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return asdict(self)


def slurm_cases(
    cluster: Cluster, partition: Partition, preemption: Preemption, job: JobFacts
) -> list[InterruptionCase]:
    """What happens to ``job`` in ``partition`` of ``cluster``; ``preemption``: how its jobs are preempted."""
    again = f"requeues the job, which may start {format_span(cluster.requeue_delay_s)} later"
    after = (
        f"Slurm notices after {format_span(cluster.slurmd_timeout_s)} (SlurmdTimeout) and {again}, unless the agent of "
        "node 0 has requeued it before"
    )
    if job.elastic:
        after = f"the others continue in the same job as long as enough of them are left, else Slurm {again}"
    node_failure = InterruptionCase(
        event="node failure",
        # Nothing can be saved, hence 0 seconds, which is not the same as None: it does happen.
        seconds=0.0,
        starts="agent" if job.elastic else "slurm",
        delay_s=0.0 if job.elastic else cluster.requeue_delay_s,
        text=f"the node is gone without notice, and the work since the last checkpoint is lost; {after}",
    )
    cases = [
        _preempted(cluster, preemption, job),
        _timed_out(cluster, partition, job),
        node_failure,
        InterruptionCase(
            event="scancel",
            seconds=cluster.kill_wait_s,
            starts="nobody",
            delay_s=None,
            text=(
                f"SIGKILL follows SIGTERM after {format_span(cluster.kill_wait_s)} (KillWait), in which it saves; only "
                "`slurmtrain resume` starts it again"
            ),
        ),
    ]
    return cases if job.requeue else [_without_requeue(case) for case in cases]


def local_cases(job: JobFacts) -> list[InterruptionCase]:
    """What happens to a run of the local executor, which no scheduler ends or starts again."""
    again = "`slurmtrain watch` and `slurmtrain wait` start it again, as a new attempt on this machine"
    at_limit = "it has no time limit"
    if job.time_s is not None:
        limit, grace = format_span(job.time_s), format_span(LOCAL_GRACE_S)
        at_limit = f"after {limit} it is told to stop, and has {grace} to save; {again}"
    cases = [
        InterruptionCase(event="preemption", seconds=None, starts="nobody", delay_s=None, text="nothing preempts it"),
        InterruptionCase(
            event="time limit",
            seconds=LOCAL_GRACE_S if job.time_s is not None else None,
            starts="watch" if job.time_s is not None else "nobody",
            delay_s=None,
            text=at_limit,
        ),
        InterruptionCase(
            event="node failure",
            seconds=0.0,
            starts="watch",
            delay_s=None,
            text=f"when this machine goes down, the work since the last checkpoint is lost; {again}",
        ),
        InterruptionCase(
            event="scancel",
            seconds=None,
            starts="nobody",
            delay_s=None,
            text="`slurmtrain cancel` lets it save and exit; `slurmtrain resume` starts it again",
        ),
    ]
    return cases if job.requeue else [_without_requeue(case) for case in cases]


# --- preemption -----------------------------------------------------------------------------------------------------


def _preempted(cluster: Cluster, preemption: Preemption, job: JobFacts) -> InterruptionCase:
    if not preemption.possible:
        text = f"unknown: {preemption.why}" if preemption.possible is None else f"does not happen: {preemption.why}"
        return InterruptionCase(event="preemption", seconds=None, starts="nobody", delay_s=None, text=text)
    if preemption.mode == "SUSPEND":
        text = f"{preemption.why}; it is suspended without notice, and resumes when its nodes are free again"
        return InterruptionCase(event="preemption", seconds=None, starts="itself", delay_s=None, text=text)
    exempt = f"; not in its first {format_span(cluster.exempt_s)} (PreemptExemptTime)" if cluster.exempt_s > 0 else ""
    to_script = f"; its script is sent {job.signal}" if job.own_saves else ""
    begin = f"{preemption.why}{exempt}"
    kill_wait, delay_s = format_span(cluster.kill_wait_s), cluster.requeue_delay_s
    requeues = preemption.mode == "REQUEUE"
    if preemption.grace_s > 0:
        # send_user_signal replaces SIGTERM at the beginning of the grace; the job does not get both.
        signal = "SIGUSR2" if cluster.user_signal else "SIGTERM"
        fallback = "Slurm does after the grace" if requeues else "`slurmtrain watch` restarts it if not"
        text = (
            f"{begin}; {signal} comes when the grace begins{to_script}, and it saves; after the grace, which may last "
            f"{_GRACE_CHECK_S} s longer, {kill_wait} are left until SIGKILL; its own agent requeues it within the "
            f"grace ({fallback}), and it may start {format_span(delay_s)} later"
        )
        return InterruptionCase(
            event="preemption", seconds=preemption.grace_s, starts="agent", delay_s=delay_s, text=text
        )
    again = "Slurm cancels it, and `slurmtrain watch` submits it again"
    if requeues:
        again = f"Slurm requeues it, and it may start {format_span(delay_s)} later"
    return InterruptionCase(
        event="preemption",
        seconds=cluster.kill_wait_s,
        starts="slurm" if requeues else "watch",
        delay_s=delay_s if requeues else None,
        text=f"{begin}; there is no grace: SIGKILL follows SIGTERM after {kill_wait}{to_script}; {again}",
    )


# --- the others -----------------------------------------------------------------------------------------------------


def _timed_out(cluster: Cluster, partition: Partition, job: JobFacts) -> InterruptionCase:
    # In Slurm's order: the job's own limit, the partition's default, the partition's maximum.
    limits = (
        (job.time_s, "resources.time"),
        (partition.default_time_s, f"the default of partition {partition.name}"),
        (partition.max_time_s, f"the limit of partition {partition.name}"),
    )
    limit, source = next(((time_s, source) for time_s, source in limits if time_s is not None), (None, ""))
    if limit is None:
        text = f"does not happen: partition {partition.name} has no limit, and the spec sets none"
        return InterruptionCase(event="time limit", seconds=None, starts="nobody", delay_s=None, text=text)
    # The partition's own OverTimeLimit overrides the cluster's.
    over = partition.over_limit_s if partition.over_limit_s is not None else cluster.over_limit_s
    more = ", which is not enforced" if over is None else f", plus {format_span(over)}" if over > 0 else ""
    lead = format_span(job.lead_s)
    return InterruptionCase(
        event="time limit",
        seconds=job.lead_s,
        starts="agent",
        delay_s=cluster.requeue_delay_s,
        text=(
            f"after {format_span(limit)} ({source}{more}); SIGUSR2 comes {lead} before that, or up to {_EARLY_S} s "
            "earlier, and it saves; its own agent requeues it before the limit, since Slurm never does after it; it "
            f"may start {format_span(cluster.requeue_delay_s)} later"
        ),
    )


def _without_requeue(case: InterruptionCase) -> InterruptionCase:
    # A suspended job was never ended, so it resumes without a requeue.
    if case.starts in ("nobody", "itself"):
        return case
    text = f"{case.text}; but requeue.enabled is false: only `slurmtrain resume` starts it again"
    return replace(case, starts="nobody", delay_s=None, text=text)


def format_span(seconds: float) -> str:
    """A duration as text: in seconds up to five minutes, in minutes and hours beyond that."""
    if seconds < 10 and seconds != int(seconds):
        return f"{seconds:.1f} s"
    if seconds <= 300:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h" + (f" {minutes} min" if minutes else "")
