"""The outlook for a job in a partition: what happens if it is interrupted, and related findings. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurmtrain.model.interruption.cases import InterruptionCase, JobFacts, format_span, local_cases, slurm_cases
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
    "requeue.enabled is false: a run that was interrupted is not started again",
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
        text = f"partition {partition.name} is not up: no job starts in it"
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
        yield SiteFinding("fail", "AllowQos", text, f"use one of {', '.join(sorted(partition.qos))} in slurm.qos")


def requeue_findings(cluster: Cluster, job: JobFacts) -> Iterator[SiteFinding]:
    """What a requeue costs, and which requeues slurmtrain does not control."""
    if not job.requeue:
        yield REQUEUE_DISABLED
        return
    if not cluster.job_requeue:
        text = "JobRequeue=0: jobs are not requeued unless they ask for it; those of slurmtrain do (--requeue)"
        yield SiteFinding("ok", "JobRequeue", text)
    # An elastic job rarely needs a requeue, so the delay is not worth mentioning.
    if cluster.requeue_delay_s > CRED_EXPIRE_S and not job.elastic:
        text = f"a requeued job is held for {format_span(cluster.requeue_delay_s)} before it may start"
        fix = "an administrator may set a shorter cred_expire in AuthInfo; resources.spares avoids the requeue"
        yield SiteFinding("ok", "AuthInfo", text, fix)
    # Slurm does this without asking the agent, whose policy would end a run that keeps failing.
    if cluster.requeue_exit:
        text = f"Slurm itself requeues jobs that exit with {cluster.requeue_exit} (RequeueExit), crashed ones too"
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
        text = "a preempted job is suspended as long as the other one runs; its collectives may time out meanwhile"
        fix = "use a partition or QOS that requeues, or ask an administrator to set PreemptMode=REQUEUE"
        yield SiteFinding("warn", "PreemptMode", text, fix)
        return
    if preemption.grace_s <= 0:
        text = f"a preempted job has no grace: it is killed {format_span(cluster.kill_wait_s)} after the first signal"
        fix = f"ask an administrator to set {preemption.setting}; until then checkpoint.every should be short"
        yield SiteFinding("warn", "GraceTime", text, fix)
    if preemption.mode == "CANCEL" and preemption.grace_s <= 0:
        text = "a preempted job is cancelled, and without a grace it cannot requeue itself"
        fix = "run `slurmtrain watch`; an administrator may set PreemptMode=REQUEUE"
        yield SiteFinding("warn", "PreemptMode", text, fix)
    if cluster.user_signal:
        text = f"a preempted job gets SIGUSR2 in place of SIGTERM ({cluster.user_signal}); both are understood"
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
            text = "no save has been measured yet: whether one fits into the grace is unknown"
            yield SiteFinding("ok", "save", text, "ask again after the first checkpoint of a run of this name")
            return
        save, allowed = format_span(job.save_s), format_span(case.seconds)
        if fits_grace(job.save_s, case.seconds):
            yield SiteFinding("ok", "save", f"the last save took {save}, and fits into the {allowed} of a {case.event}")
            continue
        # Without the margin of fits_grace(): only a save that certainly does not fit is a failure.
        late = job.save_s > case.seconds
        effect = "the work since the last checkpoint is lost" if late else "it may not finish in time"
        text = f"the last save took {save}, and a {case.event} leaves {allowed}: {effect}"
        fix = "more ranks share the writing; checkpoint.every: auto saves in advance"
        if case.event == "preemption":
            enough = math.ceil(job.save_s * GRACE_MARGIN)
            fix = f"ask an administrator to set {setting} to {enough} s; {fix}"
        yield SiteFinding("fail" if late else "warn", "save", text, fix)


def watch_findings(cases: Sequence[InterruptionCase], job: JobFacts) -> Iterator[SiteFinding]:
    """Whether a ``slurmtrain watch`` is needed, and whether one runs."""
    events = [case.event for case in cases if case.starts == "watch"]
    if job.watched:
        text = "`slurmtrain watch` runs, and starts again what neither an agent nor Slurm does"
        yield SiteFinding("ok", "watch", text)
    elif events:
        text = f"after a {' or a '.join(events)} only `slurmtrain watch` starts the run again, and none is running"
        yield SiteFinding("warn", "watch", text, "run `slurmtrain watch`, or `slurmtrain sync` from cron")


def accounting_findings(cluster: Cluster, qos: Mapping[str, Qos] | None) -> Iterator[SiteFinding]:
    """What the lack of accounting hides; ``qos`` is None if it does not answer. And settings that need no action."""
    if not cluster.accounting:
        age = format_span(cluster.min_job_age_s)
        text = f"this site keeps no accounting: Slurm forgets why a job ended {age} afterwards (MinJobAge)"
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
