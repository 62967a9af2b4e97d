"""What happens to a job at each kind of interruption, by the configuration of its site. Pure.

Sources: the manual pages of slurm.conf and sbatch, 22.05 to 25.11; what a job gets at each kind of end was observed on
clusters of 22.05 and 26.05.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class InterruptionCase:
    """What happens at one kind of interruption.

    ``event``: preemption, time limit, node failure or scancel. ``text``: a description of all this. ``seconds``: how
    long a job has for saving; None: the interruption does not happen, or the time is unknown. ``starts``: what starts
    the run again, one of STARTERS, after at least ``delay_s`` seconds.
    """

    event: str
    text: str
    seconds: float | None = None
    starts: str = "nobody"
    delay_s: float | None = None


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
    gone = f"the node is gone without notice, and the work since the last checkpoint is lost; {after}"
    cancelled = (
        f"SIGKILL follows SIGTERM after {format_span(cluster.kill_wait_s)} (KillWait), in which it saves; only "
        "`slurmtrain resume` starts it again"
    )
    starts, delay_s = ("agent", 0.0) if job.elastic else ("slurm", cluster.requeue_delay_s)
    cases = [
        _preempted(cluster, preemption, job),
        _timed_out(cluster, partition, job),
        # Nothing can be saved, hence 0 seconds, which is not the same as None: it does happen.
        InterruptionCase("node failure", gone, 0.0, starts, delay_s),
        InterruptionCase("scancel", cancelled, cluster.kill_wait_s),
    ]
    return cases if job.requeue else [_without_requeue(case) for case in cases]


def local_cases(job: JobFacts) -> list[InterruptionCase]:
    """What happens to a run of the local executor, which no scheduler ends or starts again."""
    again = "`slurmtrain watch` and `slurmtrain wait` start it again, as a new attempt on this machine"
    at_limit = InterruptionCase("time limit", "it has no time limit")
    if job.time_s is not None:
        limit, grace = format_span(job.time_s), format_span(LOCAL_GRACE_S)
        text = f"after {limit} it is told to stop, and has {grace} to save; {again}"
        at_limit = InterruptionCase("time limit", text, LOCAL_GRACE_S, "watch")
    down = f"when this machine goes down, the work since the last checkpoint is lost; {again}"
    cancelled = "`slurmtrain cancel` lets it save and exit; `slurmtrain resume` starts it again"
    cases = [
        InterruptionCase("preemption", "nothing preempts it"),
        at_limit,
        InterruptionCase("node failure", down, 0.0, "watch"),
        InterruptionCase("scancel", cancelled),
    ]
    return cases if job.requeue else [_without_requeue(case) for case in cases]


def _preempted(cluster: Cluster, preemption: Preemption, job: JobFacts) -> InterruptionCase:
    event, why = "preemption", preemption.why
    if not preemption.possible:
        return InterruptionCase(event, f"{'unknown' if preemption.possible is None else 'does not happen'}: {why}")
    if preemption.mode == "SUSPEND":
        text = f"{why}; it is suspended without notice, and resumes when its nodes are free again"
        return InterruptionCase(event, text, starts="itself")
    exempt = f"; not in its first {format_span(cluster.exempt_s)} (PreemptExemptTime)" if cluster.exempt_s > 0 else ""
    to_script = f"; its script is sent {job.signal}" if job.own_saves else ""
    kill_wait, delay_s = format_span(cluster.kill_wait_s), cluster.requeue_delay_s
    requeues = preemption.mode == "REQUEUE"
    if preemption.grace_s > 0:
        # send_user_signal replaces SIGTERM at the beginning of the grace; the job does not get both.
        signal = "SIGUSR2" if cluster.user_signal else "SIGTERM"
        fallback = "Slurm does after the grace" if requeues else "`slurmtrain watch` restarts it if not"
        text = (
            f"{why}{exempt}; {signal} comes when the grace begins{to_script}, and it saves; after the grace, which may "
            f"last {_GRACE_CHECK_S} s longer, {kill_wait} are left until SIGKILL; its own agent requeues it within the "
            f"grace ({fallback}), and it may start {format_span(delay_s)} later"
        )
        return InterruptionCase(event, text, preemption.grace_s, "agent", delay_s)
    begin = f"{why}{exempt}; there is no grace: SIGKILL follows SIGTERM after {kill_wait}{to_script}"
    if requeues:
        text = f"{begin}; Slurm requeues it, and it may start {format_span(delay_s)} later"
        return InterruptionCase(event, text, cluster.kill_wait_s, "slurm", delay_s)
    text = f"{begin}; Slurm cancels it, and `slurmtrain watch` submits it again"
    return InterruptionCase(event, text, cluster.kill_wait_s, "watch")


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
        return InterruptionCase("time limit", text)
    # The partition's own OverTimeLimit overrides the cluster's.
    over = partition.over_limit_s if partition.over_limit_s is not None else cluster.over_limit_s
    more = ", which is not enforced" if over is None else f", plus {format_span(over)}" if over > 0 else ""
    text = (
        f"after {format_span(limit)} ({source}{more}); SIGUSR2 comes {format_span(job.lead_s)} before that, or up to "
        f"{_EARLY_S} s earlier, and it saves; its own agent requeues it before the limit, since Slurm never does after "
        f"it; it may start {format_span(cluster.requeue_delay_s)} later"
    )
    return InterruptionCase("time limit", text, job.lead_s, "agent", cluster.requeue_delay_s)


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
