"""The outlook for a job in a partition: what happens if it is interrupted, and related findings. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.interruption import site_findings
from slurmtrain.model.interruption.cases import InterruptionCase, JobFacts, local_cases, slurm_cases
from slurmtrain.model.interruption.preemption import Cluster, Partition, Qos, find_preemption
from slurmtrain.model.interruption.site_findings import SiteFinding, sort_by_severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What happens to a job in one partition, and related findings. For local runs ``partition`` is empty."""

    partition: str
    cases: Sequence[InterruptionCase]
    findings: Sequence[SiteFinding]

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {
            "partition": self.partition,
            "cases": [case.to_dict() for case in self.cases],
            "findings": [finding.to_dict() for finding in self.findings],
        }

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
        *site_findings.partition_findings(partition, qos, job),
        *site_findings.requeue_findings(cluster, job),
        *site_findings.preemption_findings(cluster, preemption),
        *site_findings.save_findings(cases, preemption.setting, job),
        *site_findings.watch_findings(cases, job),
        *site_findings.accounting_findings(cluster, qos),
        *site_findings.other_findings(cluster),
    ]
    return Outlook(partition=partition.name, cases=cases, findings=sort_by_severity(findings))


def local_outlook(job: JobFacts) -> Outlook:
    """The outlook for a run of the local executor."""
    cases = local_cases(job)
    findings = [
        *site_findings.watch_findings(cases, job),
        *site_findings.save_findings(cases, "", job),
        *([] if job.requeue else [site_findings.REQUEUE_DISABLED]),
    ]
    return Outlook(partition="", cases=cases, findings=sort_by_severity(findings))
