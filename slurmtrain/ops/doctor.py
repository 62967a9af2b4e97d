"""Whether runs come back here after they were interrupted: what the site's configuration makes of a spec."""

from __future__ import annotations

import getpass
import grp
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.model.interruption.outlook import JobFacts, Outlook, SiteFinding, locally, outlook, worst
from slurmtrain.model.interruption.preemption import may_use
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.model.spec.plan import Plan
    from slurmtrain.slurm.site import Site

# Stands for the id of a run that is not submitted.
_NO_RUN = "RUN-ID"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """What becomes of a run in each partition it may go to. ``name`` is empty where no spec was given.

    ``config``: what of the site's configuration matters, in its own words. ``unknown``: what could not be asked.
    """

    executor: str
    name: str = ""
    outlooks: Sequence[Outlook] = ()
    findings: Sequence[SiteFinding] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    unknown: Sequence[str] = ()

    @property
    def good(self) -> bool:
        """Whether nothing that was found prevents a run from coming back."""
        found = [*self.findings, *(finding for one in self.outlooks for finding in one.findings)]
        return worst(found) != "fail"

    def to_dict(self) -> dict[str, Any]:
        """What ``doctor --json`` prints."""
        return {
            "schema": SCHEMA,
            "executor": self.executor,
            "name": self.name or None,
            "good": self.good,
            "partitions": [one.to_dict() for one in self.outlooks],
            "findings": [finding.to_dict() for finding in self.findings],
            "config": dict(self.config),
            "unknown": list(self.unknown),
        }


def examine(workspace: Workspace, path: Path | None, overrides: Sequence[str], executor: str) -> DoctorReport:
    """What becomes of the run of a spec, of a sweep the first one, when it is interrupted; or of any run here.

    Raises what ``submit`` raises for a spec that is wrong, and SlurmDown where Slurm does not answer.
    """
    plan = _plan(path, overrides) if path is not None else None
    name = plan.spec.name if plan else ""
    if executor == "local":
        return DoctorReport(executor=executor, name=name, outlooks=[locally(_job(workspace, plan, executor, None))])
    from slurmtrain.slurm import limits
    from slurmtrain.slurm.site import read_site

    site = read_site(workspace.scheduler, _user())
    findings = []
    raw = workspace.scheduler.partitions()
    if plan is not None and (why := limits.rejection_reason(plan, raw)) is not None:
        findings.append(SiteFinding("fail", "request", f"no partition can run it: {why}", "change the spec"))
    job = _job(workspace, plan, executor, site)
    names = limits.partition_names(plan, raw).split(",") if plan is not None else _usable(site)
    everywhere = list(site.partitions.values())
    outlooks = [
        outlook(site.cluster, site.partitions[one], everywhere, site.qos, job)
        for one in names
        if one in site.partitions
    ]
    return DoctorReport(
        executor=executor,
        name=name,
        outlooks=outlooks,
        findings=findings,
        config={name: site.config[name] for name in _SHOWN if name in site.config},
        unknown=site.unknown,
    )


# What of the configuration ``doctor --json`` repeats.
_SHOWN = (
    "SLURM_VERSION", "JobRequeue", "PreemptType", "PreemptMode", "PreemptParameters", "PreemptExemptTime", "KillWait",
    "MaxBatchRequeue", "MinJobAge", "AuthInfo", "SlurmdTimeout", "SlurmctldParameters", "OverTimeLimit", "RequeueExit",
    "AccountingStorageType", "JobAcctGatherType", "PrologFlags",
)  # fmt: skip


def _plan(path: Path, overrides: Sequence[str]) -> Plan:
    from slurmtrain.ops.submit import load

    return load(path, overrides, ()).runs[0].plan


def _job(workspace: Workspace, plan: Plan | None, executor: str, site: Site | None) -> JobFacts:
    """What the plan asks for, and what its last save took; without a plan, a run that leaves all to the defaults."""
    watched = is_watched(workspace.root)
    qos = _default_qos(site, None)
    if plan is None:
        return JobFacts(watched=watched, qos=qos)
    from slurmtrain.ops.shared.interruption_stats import outlook as past

    spec, resources = plan.spec, plan.spec.resources
    named = spec.slurm.get("qos")
    return JobFacts(
        time_s=None if resources.time is None else float(resources.time),
        lead_s=_lead(workspace, plan) if executor == "slurm" else 0.0,
        qos=str(named) if named else _default_qos(site, spec.slurm.get("account")),
        requeue=spec.requeue.enabled,
        save_s=past(workspace, _NO_RUN, plan, executor).history.save_s,
        nodes=(resources.nodes.min, resources.nodes.max),
        spares=resources.spares,
        own_saves=spec.checkpoint.glob is not None,
        signal=spec.requeue.signal,
        watched=watched,
    )


def _lead(workspace: Workspace, plan: Plan) -> float:
    """How long before its time limit a job has itself warned: what its request says."""
    from slurmtrain.slurm.request import make_request

    return float(make_request(plan, workspace.root.run(_NO_RUN).submission(1)).parameters["signal_delay_s"])


def _default_qos(site: Site | None, account: object) -> str | None:
    """The QOS that a job gets which names none; None where accounting does not tell, or tells of several."""
    if site is None or not site.associations:
        return None
    own = [one for one in site.associations if account is None or one.account == account]
    defaults = {one.default_qos or (one.qos[0] if len(one.qos) == 1 else "") for one in own}
    return defaults.pop() or None if len(defaults) == 1 else None


def _user() -> str:
    """This user, as accounting knows them: by the name, where there is one."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _usable(site: Site) -> list[str]:
    """Partitions that this user may submit to."""
    groups = [_group_name(number) for number in {os.getgid(), *os.getgroups()}]
    accounts = None if site.associations is None else {one.account for one in site.associations}
    root = os.getuid() == 0
    return [name for name, one in site.partitions.items() if may_use(one, groups, accounts, root=root)]


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def is_watched(root: RunsRoot) -> bool:
    """Whether a ``watch`` starts runs of this root again; one on another machine is believed what it says."""
    from slurmtrain.ops.watch.lock import read_holder

    holder = read_holder(root.watch_lock)
    return holder is not None and (holder.process is None or holder.process.alive() is not False)
