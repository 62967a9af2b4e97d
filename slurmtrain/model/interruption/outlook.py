"""What becomes of a job when it is interrupted, by the configuration of its site: pure.

Sources: the manual pages of slurm.conf and sbatch, 22.05 to 25.11; what a job gets at each kind of end was seen on
clusters of 22.05 and 26.05.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from slurmtrain.model.interruption.interval import GRACE_MARGIN, fits_grace
from slurmtrain.model.interruption.preemption import CRED_EXPIRE_S, Cluster, Partition, Preemption, Qos, preemption

# From best to worst.
SEVERITIES = ("ok", "warn", "fail")
# Who starts a run again: its own agent out of the job, Slurm, a command outside, itself (it was never ended), nobody.
STARTERS = ("agent", "slurm", "watch", "itself", "nobody")

# What the agent of a local run leaves its processes to save in (runtime/workers).
LOCAL_GRACE_S = 30.0
# From this version on a job that leaves within its grace is put back by Slurm itself, and each time counts.
_COUNTS_EXITS = (24, 5)
# Slurm looks for preempted jobs whose grace is over this often, and sends signals of a time limit this much early.
_COARSE_S = 30
_EARLY_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What a plan asks of Slurm, as far as it matters here, and what is known of its saves. Times are seconds.

    ``qos`` is None where neither the plan nor an association of the user's tells it. ``lead_s``: how long before the
    limit it has itself warned. ``save_s``: what its last save took; None: nobody knows. ``nodes``: the least and the
    most that train. ``own_saves``: a script saves by itself, on ``signal``. ``watched``: whether something starts runs
    again from outside.
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
        """Whether it goes on when one of its nodes is lost."""
        return self.spares > 0 or self.nodes[0] < self.nodes[1]


@dataclass(frozen=True, slots=True)
class SiteFinding:
    """Something that a person should know. ``fix``: what to do, empty where nothing need be done."""

    severity: str
    about: str
    text: str
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What happens at one kind of interruption.

    ``event``: preemption, time limit, node failure or scancel. ``seconds``: what a job has to save in; None where it
    does not happen, or is not known. ``starts``: who starts the run again, one of STARTERS, after ``delay_s`` at least.
    ``text``: the same in words.
    """

    event: str
    seconds: float | None
    starts: str
    delay_s: float | None
    text: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What becomes of a job in one partition."""

    partition: str
    cases: Sequence[Case]
    findings: Sequence[SiteFinding]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "partition": self.partition,
            "cases": [case.to_dict() for case in self.cases],
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def case(self, event: str) -> Case:
        """What happens at one kind of interruption."""
        return next(case for case in self.cases if case.event == event)


def worst(findings: Sequence[SiteFinding]) -> str:
    """The worst severity among these; ``ok`` where there are none."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")


# --- what happens -------------------------------------------------------------------------------------------------


def outlook(
    cluster: Cluster,
    partition: Partition,
    partitions: Collection[Partition],
    qos: Mapping[str, Qos] | None,
    job: JobFacts,
) -> Outlook:
    """What becomes of a job in a partition at each kind of interruption, and what stands in the way of its return."""
    by = preemption(cluster, partition, partitions, qos, job.qos)
    cases = [
        _preempted(cluster, by, job),
        _timed_out(cluster, partition, job),
        _node_failed(cluster, job),
        _cancelled(cluster),
    ]
    if not job.requeue:
        cases = [_given_up(case) for case in cases]
    findings = [
        *_of_partition(partition, qos, job),
        *_of_requeue(cluster, job),
        *_of_preemption(cluster, by),
        *_of_saves(cases, by.setting, job),
        *_of_watch(cases, job),
        *_of_records(cluster, qos),
        *_of_others(cluster),
    ]
    return Outlook(partition=partition.name, cases=cases, findings=sorted(findings, key=_gravest_first))


def locally(job: JobFacts) -> Outlook:
    """What becomes of a run of the local executor: there is no scheduler that ends it, or starts it again."""
    again = "`slurmtrain watch` and `slurmtrain wait` start it again, as a new attempt on this machine"
    limit = "nothing limits its time"
    if job.time_s is not None:
        limit = f"after {_span(job.time_s)} it is asked to stop, and has {_span(LOCAL_GRACE_S)} to save in; {again}"
    cases = [
        Case(event="preemption", seconds=None, starts="nobody", delay_s=None, text="nothing preempts it"),
        Case(
            event="time limit",
            seconds=LOCAL_GRACE_S if job.time_s is not None else None,
            starts="watch" if job.time_s is not None else "nobody",
            delay_s=None,
            text=limit,
        ),
        Case(
            event="node failure",
            seconds=0.0,
            starts="watch",
            delay_s=None,
            text=f"when this machine goes down, the work since the last checkpoint is lost; {again}",
        ),
        Case(
            event="scancel",
            seconds=None,
            starts="nobody",
            delay_s=None,
            text="`slurmtrain cancel` lets it save and leave; `slurmtrain resume` starts it again",
        ),
    ]
    if not job.requeue:
        cases = [_given_up(case) for case in cases]
    findings = [*_of_watch(cases, job), *_of_saves(cases, "", job), *([] if job.requeue else [_DISABLED])]
    return Outlook(partition="", cases=cases, findings=sorted(findings, key=_gravest_first))


def _preempted(cluster: Cluster, by: Preemption, job: JobFacts) -> Case:
    if not by.possible:
        text = f"not known: {by.why}" if by.possible is None else f"does not happen: {by.why}"
        return Case(event="preemption", seconds=None, starts="nobody", delay_s=None, text=text)
    if by.mode == "SUSPEND":
        text = f"{by.why}; it is stopped where it is, and goes on when its nodes are free again, with no word to it"
        return Case(event="preemption", seconds=None, starts="itself", delay_s=None, text=text)
    exempt = f"; not in its first {_span(cluster.exempt_s)} (PreemptExemptTime)" if cluster.exempt_s > 0 else ""
    asked = "SIGUSR2" if cluster.user_signal and by.grace_s > 0 else "SIGTERM"
    told = f"; its script is sent {job.signal}" if job.own_saves else ""
    if by.grace_s > 0:
        last = f"after the grace, which may last {_COARSE_S} s longer, {_span(cluster.kill_wait_s)} are left to end in"
        said = f"{by.why}{exempt}; {asked} comes when the grace begins{told}, and it saves; {last}"
        again = "its own agent puts it back into the queue inside the grace"
        fallback = "Slurm does after the grace" if by.mode == "REQUEUE" else "`slurmtrain watch` starts it anew if not"
        return Case(
            event="preemption",
            seconds=by.grace_s,
            starts="agent",
            delay_s=cluster.requeue_delay_s,
            text=f"{said}; {again} ({fallback}), and it may start {_span(cluster.requeue_delay_s)} later",
        )
    said = f"{by.why}{exempt}; there is no grace: from SIGTERM to SIGKILL it is {_span(cluster.kill_wait_s)}{told}"
    again = (
        f"Slurm puts it back into the queue, and it may start {_span(cluster.requeue_delay_s)} later"
        if by.mode == "REQUEUE"
        else "Slurm cancels it, and `slurmtrain watch` submits it anew"
    )
    return Case(
        event="preemption",
        seconds=cluster.kill_wait_s,
        starts="slurm" if by.mode == "REQUEUE" else "watch",
        delay_s=cluster.requeue_delay_s if by.mode == "REQUEUE" else None,
        text=f"{said}; {again}",
    )


def _limit(partition: Partition, job: JobFacts) -> tuple[float | None, str]:
    """The time limit of a job, and who has set it."""
    if job.time_s is not None:
        return job.time_s, "resources.time"
    if partition.default_time_s is not None:
        return partition.default_time_s, f"the default of partition {partition.name}"
    return partition.max_time_s, f"the limit of partition {partition.name}"


def _timed_out(cluster: Cluster, partition: Partition, job: JobFacts) -> Case:
    limit, whose = _limit(partition, job)
    if limit is None:
        text = f"does not happen: partition {partition.name} has no limit, and the spec sets none"
        return Case(event="time limit", seconds=None, starts="nobody", delay_s=None, text=text)
    over = partition.over_limit_s if partition.over_limit_s is not None else cluster.over_limit_s
    more = ", without end beyond it" if over is None else f", {_span(over)} beyond it" if over > 0 else ""
    return Case(
        event="time limit",
        seconds=job.lead_s,
        starts="agent",
        delay_s=cluster.requeue_delay_s,
        text=(
            f"after {_span(limit)} ({whose}{more}); SIGUSR2 comes {_span(job.lead_s)} before, up to {_EARLY_S} s "
            "earlier, and it saves; its own agent puts it back into the queue before the limit, since Slurm never does "
            f"after it; it may start {_span(cluster.requeue_delay_s)} later"
        ),
    )


def _node_failed(cluster: Cluster, job: JobFacts) -> Case:
    lost = "the lost node says nothing, and the work since the last checkpoint is lost"
    noticed = f"Slurm notices after {_span(cluster.slurmd_timeout_s)} (SlurmdTimeout)"
    again = f"puts the job back; it may start {_span(cluster.requeue_delay_s)} later"
    if job.elastic:
        return Case(
            event="node failure",
            seconds=0.0,
            starts="agent",
            delay_s=0.0,
            text=f"{lost}; the others go on in the same job as long as enough of them are left, else Slurm {again}",
        )
    return Case(
        event="node failure",
        seconds=0.0,
        starts="slurm",
        delay_s=cluster.requeue_delay_s,
        text=f"{lost}; {noticed} and {again}, unless the agent of node 0 has done so before",
    )


def _cancelled(cluster: Cluster) -> Case:
    return Case(
        event="scancel",
        seconds=cluster.kill_wait_s,
        starts="nobody",
        delay_s=None,
        text=(
            f"from SIGTERM to SIGKILL it is {_span(cluster.kill_wait_s)} (KillWait), in which it saves; nothing starts "
            "it again but `slurmtrain resume`"
        ),
    )


def _given_up(case: Case) -> Case:
    if case.starts in ("nobody", "itself"):
        return case
    text = f"{case.text}; but requeue.enabled is false: only `slurmtrain resume` starts it again"
    return replace(case, starts="nobody", delay_s=None, text=text)


# --- what to know ---------------------------------------------------------------------------------------------------

_DISABLED = SiteFinding(
    "warn",
    "requeue.enabled",
    "requeue.enabled is false: a run that was interrupted stays where it is",
    "leave requeue.enabled out, or start it again with `slurmtrain resume`",
)


def _of_partition(partition: Partition, qos: Mapping[str, Qos] | None, job: JobFacts) -> list[SiteFinding]:
    found = []
    if not partition.up:
        text = f"partition {partition.name} is not up: no job starts in it"
        found.append(SiteFinding("fail", "State", text, "name another one in slurm.partition"))
    own = qos.get(job.qos or "") if qos is not None else None
    too_long = job.time_s is not None and partition.max_time_s is not None and job.time_s > partition.max_time_s
    if too_long and not (own is not None and own.own_limit):
        assert partition.max_time_s is not None
        assert job.time_s is not None
        text = f"partition {partition.name} lets a job run for {_span(partition.max_time_s)}, not {_span(job.time_s)}"
        found.append(SiteFinding("fail", "MaxTime", text, "ask for less in resources.time; it goes on where it was"))
    if job.qos is not None and partition.qos is not None and job.qos not in partition.qos:
        text = f"partition {partition.name} does not take jobs of QOS {job.qos}"
        found.append(
            SiteFinding("fail", "AllowQos", text, f"use one of {', '.join(sorted(partition.qos))} in slurm.qos")
        )
    return found


def _of_requeue(cluster: Cluster, job: JobFacts) -> list[SiteFinding]:
    if not job.requeue:
        return [_DISABLED]
    found = []
    if not cluster.job_requeue:
        text = "JobRequeue=0: jobs are not put back unless they ask for it; those of slurmtrain do (--requeue)"
        found.append(SiteFinding("ok", "JobRequeue", text))
    if cluster.requeue_delay_s > CRED_EXPIRE_S and not job.elastic:
        text = f"a job that was put back is held for {_span(cluster.requeue_delay_s)} before it may start"
        fix = "an administrator may set a shorter cred_expire in AuthInfo; resources.spares goes on without a requeue"
        found.append(SiteFinding("ok", "AuthInfo", text, fix))
    if cluster.requeue_exit:
        text = f"Slurm itself puts back jobs that exit with {cluster.requeue_exit} (RequeueExit), crashed ones too"
        fix = "an administrator should leave RequeueExit empty: requeue.max_failures does not count such starts"
        found.append(SiteFinding("warn", "RequeueExit", text, fix))
    return found


def _of_preemption(cluster: Cluster, by: Preemption) -> list[SiteFinding]:
    if by.possible is None:
        return [SiteFinding("warn", "PreemptType", by.why, "name a QOS in slurm.qos, or ask the administrators")]
    if not by.possible:
        return []
    if by.mode == "SUSPEND":
        text = "a preempted job is stopped for as long as another one takes; its collectives may time out meanwhile"
        fix = "use a partition or QOS that requeues, or an administrator sets PreemptMode=REQUEUE"
        return [SiteFinding("warn", "PreemptMode", text, fix)]
    found = []
    if by.grace_s <= 0:
        text = f"a preempted job has no grace: {_span(cluster.kill_wait_s)} after the first word it is killed"
        fix = f"an administrator sets {by.setting}; until then checkpoint.every should be short"
        found.append(SiteFinding("warn", "GraceTime", text, fix))
    if by.mode == "CANCEL" and by.grace_s <= 0:
        text = "a preempted job is cancelled, and cannot put itself back without a grace"
        fix = "run `slurmtrain watch`; an administrator may set PreemptMode=REQUEUE"
        found.append(SiteFinding("warn", "PreemptMode", text, fix))
    if cluster.user_signal:
        text = f"a preempted job gets SIGUSR2 in place of SIGTERM ({cluster.user_signal}); both are understood"
        found.append(SiteFinding("ok", "PreemptParameters", text))
    if by.grace_s > 0 and cluster.version is not None:
        found.append(_of_exits(cluster))
    return found


def _of_exits(cluster: Cluster) -> SiteFinding:
    assert cluster.version is not None
    version = "{}.{:02}".format(*cluster.version)
    if cluster.version < _COUNTS_EXITS:
        text = f"Slurm {version} does not put back a job that leaves within its grace; the agent does so before it ends"
        return SiteFinding("ok", "SLURM_VERSION", text)
    text = (
        f"Slurm {version} puts back a job that leaves within its grace, and holds it after {cluster.max_requeues} "
        "times (MaxBatchRequeue); the agent puts it back before that, which does not count"
    )
    return SiteFinding("ok", "SLURM_VERSION", text)


def _of_saves(cases: Sequence[Case], setting: str, job: JobFacts) -> list[SiteFinding]:
    """Whether the last save would have fitted into each time that there is for one."""
    chances = [case for case in cases if case.seconds and case.event in ("preemption", "time limit")]
    if not chances:
        return []
    if job.save_s is None:
        text = "no save has been measured yet: whether one fits into the grace is not known"
        return [SiteFinding("ok", "save", text, "ask again after the first checkpoint of a run of this name")]
    found = []
    for case in chances:
        assert case.seconds is not None
        if fits_grace(job.save_s, case.seconds):
            text = f"the last save took {_span(job.save_s)}, and fits into the {_span(case.seconds)} of a {case.event}"
            found.append(SiteFinding("ok", "save", text))
            continue
        wanted = math.ceil(job.save_s * GRACE_MARGIN)
        late = job.save_s > case.seconds
        text = (
            f"the last save took {_span(job.save_s)}, and a {case.event} leaves {_span(case.seconds)}: "
            f"{'the work since the last checkpoint is lost' if late else 'it may not be done in time'}"
        )
        fix = "more ranks share the writing; checkpoint.every: auto saves ahead"
        if case.event == "preemption":
            fix = f"an administrator sets {setting} to {wanted} s; {fix}"
        found.append(SiteFinding("fail" if late else "warn", "save", text, fix))
    return found


def _of_watch(cases: Sequence[Case], job: JobFacts) -> list[SiteFinding]:
    events = [case.event for case in cases if case.starts == "watch"]
    if job.watched:
        return [SiteFinding("ok", "watch", "`slurmtrain watch` runs, and starts again what no agent and no Slurm does")]
    if events:
        text = f"after a {' or a '.join(events)} only `slurmtrain watch` starts the run again, and none runs here"
        return [SiteFinding("warn", "watch", text, "run `slurmtrain watch`, or `slurmtrain sync` from cron")]
    return []


def _of_records(cluster: Cluster, qos: Mapping[str, Qos] | None) -> list[SiteFinding]:
    found = []
    if not cluster.accounting:
        text = (
            f"this site keeps no accounting: {_span(cluster.min_job_age_s)} after a job has ended (MinJobAge) Slurm no "
            "longer says why"
        )
        fix = "run `slurmtrain watch`, which asks in time; an administrator may set up slurmdbd"
        found.append(SiteFinding("warn", "AccountingStorageType", text, fix))
    elif qos is None:
        text = "accounting does not answer: limits, modes and graces of QOS are not known"
        found.append(SiteFinding("warn", "QOS", text, "see why `sacctmgr show qos` fails"))
    return found


def _of_others(cluster: Cluster) -> list[SiteFinding]:
    found = []
    if not cluster.gathers_usage:
        text = "JobAcctGatherType is none: nobody can say how much memory a job had used"
        found.append(SiteFinding("ok", "JobAcctGatherType", text))
    if "FORCEREQUEUEONFAIL" in cluster.prolog_flags:
        text = "a job whose prolog fails is put back by Slurm itself (PrologFlags=ForceRequeueOnFail)"
        found.append(SiteFinding("ok", "PrologFlags", text))
    return found


def _gravest_first(finding: SiteFinding) -> int:
    return -SEVERITIES.index(finding.severity)


def _span(seconds: float) -> str:
    """A length of time in words: seconds up to five minutes, hours and minutes beyond."""
    if seconds < 10 and seconds != int(seconds):
        return f"{seconds:.1f} s"
    if seconds <= 300:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h" + (f" {minutes} min" if minutes else "")
