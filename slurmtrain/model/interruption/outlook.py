"""The outlook for a job in a partition: what happens if it is interrupted, and related findings. Pure.

Sources: the manual pages of slurm.conf and sbatch, 22.05 to 25.11; what a job gets at each kind of end was observed on
clusters of 22.05 and 26.05.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from slurmtrain.model.interruption.interval import GRACE_MARGIN, fits_grace
from slurmtrain.model.interruption.preemption import CRED_EXPIRE_S, Cluster, Partition, Preemption, Qos, find_preemption


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What happens to a job in one partition, and related findings. For local runs ``partition`` is empty."""

    partition: str
    cases: Sequence[InterruptionCase]
    findings: Sequence[SiteFinding]

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return asdict(self)

    def case(self, event: str) -> InterruptionCase:
        """What happens at one kind of interruption. Raises StopIteration for an unknown one."""
        return next(case for case in self.cases if case.event == event)


def make_outlook(
    cluster: Cluster,
    partition: Partition,
    partitions: Collection[Partition],
    qos: Mapping[str, Qos] | None,
    job: JobFacts,
) -> Outlook:
    """The outlook for a job on Slurm.

    Args:
        cluster: The configuration of the site.
        partition: Where the job goes.
        partitions: All partitions of the site: a higher tier over the same nodes may preempt the job.
        qos: All QOS of the site, by name; None if accounting does not answer.
        job: The job.
    """
    preemption = find_preemption(cluster, partition, partitions, qos, job.qos)
    cases = slurm_cases(cluster, partition, preemption, job)
    findings = [
        *partition_findings(partition, qos, job),
        *requeue_findings(cluster, job),
        *preemption_findings(cluster, preemption),
        *save_findings(cases, preemption.setting, job),
        *watch_findings(cases, job),
        *accounting_findings(cluster, qos),
    ]
    return Outlook(partition=partition.name, cases=cases, findings=sort_by_severity(findings))


def local_outlook(job: JobFacts) -> Outlook:
    """The outlook for a run of the local executor."""
    cases = local_cases(job)
    disabled = [] if job.requeue else [REQUEUE_DISABLED]
    findings = [*watch_findings(cases, job), *save_findings(cases, "", job), *disabled]
    return Outlook(partition="", cases=cases, findings=sort_by_severity(findings))


# From harmless to serious.
SEVERITIES = ("ok", "warn", "fail")
# Since this version Slurm itself requeues a job that exits within its grace, and counts how often.
_COUNTS_EXITS = (24, 5)


@dataclass(frozen=True, slots=True)
class SiteFinding:
    """Something that a person should know.

    ``severity``: one of SEVERITIES. ``about``: the setting that it is about. ``fix``: what to do; empty if no action
    is needed.
    """

    severity: str
    about: str
    text: str
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return asdict(self)


REQUEUE_DISABLED = SiteFinding(
    "warn",
    "requeue.enabled",
    "requeue.enabled is false: an interrupted run does not start again",
    "leave requeue.enabled out, or start the run again with `slurmtrain resume`",
)


def worst_severity(findings: Sequence[SiteFinding]) -> str:
    """The worst severity among these findings; ``ok`` if there are none."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")


def sort_by_severity(findings: Sequence[SiteFinding]) -> list[SiteFinding]:
    """The findings, the most serious ones first."""
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))


def partition_findings(partition: Partition, qos: Mapping[str, Qos] | None, job: JobFacts) -> Iterator[SiteFinding]:
    """Why ``partition`` may refuse ``job``; ``qos``: all QOS of the site, by name; None if unknown."""
    if not partition.up:
        text = f"partition {partition.name} is not up, so no job can start in it"
        yield SiteFinding("fail", "State", text, "name another one in slurm.partition")
    # A QOS with the flag PartitionTimeLimit lifts the limit of the partition.
    own = qos.get(job.qos or "") if qos is not None else None
    is_lifted = own is not None and own.own_limit
    time_s, limit_s = job.time_s, partition.max_time_s
    if time_s is not None and limit_s is not None and time_s > limit_s and not is_lifted:
        limit, time = format_span(limit_s), format_span(time_s)
        text = f"partition {partition.name} lets a job run for {limit}, not {time}"
        fix = "ask for less in resources.time; the next attempt resumes where this one ended"
        yield SiteFinding("fail", "MaxTime", text, fix)
    if job.qos is not None and partition.qos is not None and job.qos not in partition.qos:
        text = f"partition {partition.name} does not accept jobs of QOS {job.qos}"
        yield SiteFinding("fail", "AllowQos", text, f"set slurm.qos to one of {', '.join(sorted(partition.qos))}")


def requeue_findings(cluster: Cluster, job: JobFacts) -> Iterator[SiteFinding]:
    """What a requeue costs, and which requeues slurmtrain does not control."""
    if not job.requeue:
        yield REQUEUE_DISABLED
        return
    if not cluster.job_requeue:
        text = "JobRequeue=0: jobs are not requeued unless they ask for it, as slurmtrain's do (--requeue)"
        yield SiteFinding("ok", "JobRequeue", text)
    # An elastic job rarely needs a requeue, so the delay is not worth mentioning.
    if cluster.requeue_delay_s > CRED_EXPIRE_S and not job.elastic:
        text = f"a requeued job has to wait {format_span(cluster.requeue_delay_s)} before it may start"
        fix = "an administrator may set a shorter cred_expire in AuthInfo; resources.spares avoids the requeue"
        yield SiteFinding("ok", "AuthInfo", text, fix)
    # Slurm does this without asking the agent, whose policy would end a run that keeps failing.
    if cluster.requeue_exit:
        text = f"Slurm itself requeues jobs that exit with {cluster.requeue_exit} (RequeueExit), even crashed ones"
        fix = "an administrator should leave RequeueExit empty: requeue.max_failures does not count such starts"
        yield SiteFinding("warn", "RequeueExit", text, fix)


def preemption_findings(cluster: Cluster, preemption: Preemption) -> Iterator[SiteFinding]:
    """What a preemption costs that the site could make cheaper."""
    if preemption.possible is None:
        fix = "name a QOS in slurm.qos, or ask the administrators"
        yield SiteFinding("warn", "PreemptType", preemption.why, fix)
    if not preemption.possible:
        return
    if preemption.mode == "SUSPEND":
        text = "a preempted job is suspended while the other one runs; its collectives may time out in the meantime"
        fix = "use a partition or QOS that requeues, or ask an administrator to set PreemptMode=REQUEUE"
        yield SiteFinding("warn", "PreemptMode", text, fix)
        return
    if preemption.grace_s <= 0:
        text = f"a preempted job has no grace: it is killed {format_span(cluster.kill_wait_s)} after SIGTERM"
        fix = f"ask an administrator to set {preemption.setting}; until then checkpoint.every should be short"
        yield SiteFinding("warn", "GraceTime", text, fix)
    if preemption.mode == "CANCEL" and preemption.grace_s <= 0:
        text = "a preempted job is cancelled, and without grace time it cannot requeue itself"
        fix = "run `slurmtrain watch`; an administrator may set PreemptMode=REQUEUE"
        yield SiteFinding("warn", "PreemptMode", text, fix)
    if cluster.user_signal:
        text = f"a preempted job gets SIGUSR2 instead of SIGTERM ({cluster.user_signal}); slurmtrain handles both"
        yield SiteFinding("ok", "PreemptParameters", text)
    if preemption.grace_s > 0 and cluster.version is not None:
        # Versions of Slurm have two digits behind the dot, as in 24.05.
        name = "{}.{:02}".format(*cluster.version)
        text = f"Slurm {name} does not requeue a job that exits within its grace; the agent does so before it ends"
        if cluster.version >= _COUNTS_EXITS:
            text = (
                f"Slurm {name} requeues a job that exits within its grace, and holds it after {cluster.max_requeues} "
                "times (MaxBatchRequeue); the agent requeues it before that, which does not count, and forbids "
                "requeues (Requeue=0) when the run is over"
            )
        yield SiteFinding("ok", "SLURM_VERSION", text)


def save_findings(cases: Sequence[InterruptionCase], setting: str, job: JobFacts) -> Iterator[SiteFinding]:
    """Whether the last save of ``job`` would have fit into the time that each of the ``cases`` leaves.

    ``setting``: where an administrator sets the grace of a preemption.
    """
    for case in cases:
        # Other cases do not matter: after a node failure nothing can be saved, and scancel is meant to end the run.
        if not case.seconds or case.event not in ("preemption", "time limit"):
            continue
        if job.save_s is None:
            text = "no save has been measured yet, so it is unknown whether one fits into the grace time"
            yield SiteFinding("ok", "save", text, "ask again after the first checkpoint of a run of this name")
            return
        save, allowed = format_span(job.save_s), format_span(case.seconds)
        if fits_grace(job.save_s, case.seconds):
            yield SiteFinding(
                "ok", "save", f"the last save took {save}, which fits into the {allowed} of a {case.event}"
            )
            continue
        # Without the margin of fits_grace(): only a save that certainly does not fit is a failure.
        late = job.save_s > case.seconds
        effect = "the work since the last checkpoint is lost" if late else "it may not finish in time"
        text = f"the last save took {save}, but a {case.event} leaves {allowed}: {effect}"
        fix = "use more ranks, which share the writing, or checkpoint.every: auto, which saves ahead of preemptions"
        if case.event == "preemption":
            enough = math.ceil(job.save_s * GRACE_MARGIN)
            fix = f"ask an administrator to set {setting} to {enough} s; {fix}"
        yield SiteFinding("fail" if late else "warn", "save", text, fix)


def watch_findings(cases: Sequence[InterruptionCase], job: JobFacts) -> Iterator[SiteFinding]:
    """Whether a ``slurmtrain watch`` is needed, and whether one runs."""
    events = [case.event for case in cases if case.starts == "watch"]
    if job.watched:
        text = "`slurmtrain watch` is running, and starts runs again when neither their agent nor Slurm does"
        yield SiteFinding("ok", "watch", text)
    elif events:
        text = f"after a {' or a '.join(events)} only `slurmtrain watch` starts the run again, and none is running"
        yield SiteFinding("warn", "watch", text, "run `slurmtrain watch`, or `slurmtrain sync` from cron")


def accounting_findings(cluster: Cluster, qos: Mapping[str, Qos] | None) -> Iterator[SiteFinding]:
    """What the lack of accounting hides; ``qos`` is None if it does not answer. And settings that need no action."""
    if not cluster.accounting:
        age = format_span(cluster.min_job_age_s)
        text = f"this cluster has no accounting: Slurm forgets why a job ended {age} afterwards (MinJobAge)"
        fix = "run `slurmtrain watch`, which queries Slurm in time; an administrator may set up slurmdbd"
        yield SiteFinding("warn", "AccountingStorageType", text, fix)
    elif qos is None:
        text = "accounting does not answer: limits, modes and graces of QOS are unknown"
        yield SiteFinding("warn", "QOS", text, "find out why `sacctmgr show qos` fails")
    if not cluster.gathers_usage:
        text = "JobAcctGatherType is none: Slurm cannot say how much memory a job used"
        yield SiteFinding("ok", "JobAcctGatherType", text)
    if "FORCEREQUEUEONFAIL" in cluster.prolog_flags:
        text = "Slurm itself requeues a job whose prolog fails (PrologFlags=ForceRequeueOnFail)"
        yield SiteFinding("ok", "PrologFlags", text)


# --- what happens to a job --------------------------------------------------------------------------------------------

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
        after = f"the other nodes continue in the same job as long as enough are left, else Slurm {again}"
    gone = f"the node fails without notice, and the work since the last checkpoint is lost; {after}"
    cancelled = (
        f"SIGKILL follows SIGTERM after {format_span(cluster.kill_wait_s)} (KillWait), and it saves in between; only "
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
        text = f"after {limit} it is asked to stop, and has {grace} to save; {again}"
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
        text = f"does not happen: neither partition {partition.name} nor the spec sets a limit"
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
