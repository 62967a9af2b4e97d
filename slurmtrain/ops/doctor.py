"""Whether a run survives interruptions here, judged by its spec and the configuration of the site."""

from __future__ import annotations

import grp
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.model.interruption.outlook import (
    JobFacts,
    Outlook,
    SiteFinding,
    local_outlook,
    make_outlook,
    worst_severity,
)
from slurmtrain.model.interruption.preemption import may_use
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.job import torch_private
from slurmtrain.slurm.request import signal_lead_s
from slurmtrain.system.interpreter import NOTICES, load_plugin
from slurmtrain.system.owned_files import user_name

if TYPE_CHECKING:
    from slurmtrain.model.experiment.plan import Plan
    from slurmtrain.slurm.site import Site

# A placeholder for a run id: nothing is submitted.
_NO_RUN = "RUN-ID"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """The outlook for a run in each partition that it may go to.

    ``name``: of the run; empty if there is no spec. ``findings``: findings that are not about a single partition.
    ``config``: the relevant settings of the site, as Slurm prints them. ``unknown``: questions without an answer, and
    why.
    """

    executor: str
    name: str = ""
    outlooks: Sequence[Outlook] = ()
    findings: Sequence[SiteFinding] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    unknown: Sequence[str] = ()

    @property
    def good(self) -> bool:
        """Whether no finding prevents a run from surviving interruptions."""
        findings = [*self.findings, *(finding for outlook in self.outlooks for finding in outlook.findings)]
        return worst_severity(findings) != "fail"

    def to_dict(self) -> dict[str, Any]:
        """What ``doctor --json`` prints."""
        return {
            "schema": SCHEMA,
            "executor": self.executor,
            "name": self.name or None,
            "good": self.good,
            "partitions": [outlook.to_dict() for outlook in self.outlooks],
            "findings": [finding.to_dict() for finding in self.findings],
            "config": dict(self.config),
            "unknown": list(self.unknown),
        }


def examine(workspace: Workspace, path: Path | None, overrides: Sequence[str], executor: str) -> DoctorReport:
    """Find out what happens to a run when it is interrupted.

    Args:
        workspace: Where the run would live; its registry knows how long earlier saves took.
        path: The spec; of a sweep, only the first run counts. None: any run, in each partition that this user may use.
        overrides: ``KEY=VALUE`` overrides of the spec.
        executor: ``local`` or ``slurm``.

    Raises:
        UserError: The spec cannot be used, as in ``submit``.
        SlurmDown: Slurm does not answer.
    """
    from slurmtrain.slurm import outer_variables

    plan = None
    if path is not None:
        from slurmtrain.ops.submit import load

        plan = load(path, overrides, ()).runs[0].plan
    name = plan.spec.name if plan else ""
    reach = outer_variables.notes_on_ranks([plan]) if plan is not None else []
    findings = [*torch_findings(), *(SiteFinding("ok", "environment", note) for note in reach)]
    if workspace.config.notify:
        problems = load_plugin(NOTICES, "check_receivers")(workspace)
        fix = "`slurmtrain notify --test` tries again"
        findings += [SiteFinding("warn", "notify", problem, fix) for problem in problems]
    if executor == "local":
        outlooks = [local_outlook(_job_facts(workspace, plan, executor, None))]
        return DoctorReport(executor=executor, name=name, outlooks=outlooks, findings=findings)
    from slurmtrain.slurm.site import partition_names, read_site, rejection_reason

    # Only here: a local run needs no Slurm, and this asks it several questions.
    site = read_site(workspace.scheduler, user_name(os.getuid()))
    if plan is not None:
        findings += [SiteFinding("ok", "environment", note) for note in outer_variables.notes([plan])]
        plan = outer_variables.placed(plan)
    raw = workspace.scheduler.partitions()
    if plan is not None and (why := rejection_reason(plan, raw)) is not None:
        findings.append(SiteFinding("fail", "request", f"it cannot run on any partition: {why}", "change the spec"))
    job = _job_facts(workspace, plan, executor, site)
    # sbatch accepts a list of partitions, and the job starts in the one that can run it first.
    names = partition_names(plan, raw).split(",") if plan is not None else _partitions_of_user(site)
    all_partitions = list(site.partitions.values())
    outlooks = [
        make_outlook(site.cluster, site.partitions[name], all_partitions, site.qos, job)
        for name in names
        if name in site.partitions
    ]
    return DoctorReport(
        executor=executor,
        name=name,
        outlooks=outlooks,
        findings=findings,
        config={name: site.config[name] for name in _SHOWN if name in site.config},
        unknown=site.unknown,
    )


# The settings that ``doctor --json`` includes.
_SHOWN = (
    "SLURM_VERSION", "JobRequeue", "PreemptType", "PreemptMode", "PreemptParameters", "PreemptExemptTime", "KillWait",
    "MaxBatchRequeue", "MinJobAge", "AuthInfo", "SlurmdTimeout", "SlurmctldParameters", "OverTimeLimit", "RequeueExit",
    "AccountingStorageType", "JobAcctGatherType", "PrologFlags",
)  # fmt: skip


def torch_findings() -> list[SiteFinding]:
    """Whether the installed torch is a version that slurmtrain knows; nothing if none is installed here."""
    version = torch_private.installed_version()
    release = torch_private.release_of(version) if version is not None else None
    oldest, newest = (".".join(map(str, known)) for known in (torch_private.OLDEST, torch_private.NEWEST))
    if release is not None and release < torch_private.OLDEST:
        text = f"torch {version} is older than {oldest}, the oldest version that runs can use"
        return [SiteFinding("fail", "torch", text, "upgrade torch in this environment")]
    if release is not None and release > torch_private.NEWEST:
        text = f"torch {version} is newer than {newest}, the newest version that this slurmtrain was tested with"
        fix = "upgrade slurmtrain; if there is no newer version, `slurmtrain drill` shows whether runs survive"
        return [SiteFinding("warn", "torch", text, fix)]
    return []


def _job_facts(workspace: Workspace, plan: Plan | None, executor: str, site: Site | None) -> JobFacts:
    """What the plan requests, and how long its last save took; without a plan, the defaults of a spec."""
    watched = is_watched(workspace.root)
    qos = _default_qos(site, None)
    if plan is None:
        return JobFacts(watched=watched, qos=qos)
    from slurmtrain.ops.shared.next_attempts import outlook as past

    spec, resources = plan.spec, plan.spec.resources
    from slurmtrain.model.experiment.slurm_options import named_options

    options = named_options(spec.slurm)
    named = options.get("qos")
    return JobFacts(
        time_s=None if resources.time is None else float(resources.time),
        lead_s=float(signal_lead_s(plan)) if executor == "slurm" else 0.0,
        qos=str(named) if named else _default_qos(site, options.get("account")),
        requeue=spec.requeue.enabled,
        save_s=past(workspace, _NO_RUN, plan, executor).history.save_s,
        nodes=(resources.nodes.min, resources.nodes.max),
        spares=resources.spares,
        own_saves=spec.checkpoint.glob is not None,
        signal=spec.requeue.signal,
        watched=watched,
    )


def _default_qos(site: Site | None, account: object) -> str | None:
    """The QOS of a job that names none; None if accounting does not answer or lists several."""
    if site is None or not site.associations:
        return None
    own = [each for each in site.associations if account is None or each.account == account]
    defaults = {each.default_qos or (each.qos[0] if len(each.qos) == 1 else "") for each in own}
    return defaults.pop() or None if len(defaults) == 1 else None


def _partitions_of_user(site: Site) -> list[str]:
    """Partitions that this user may submit to."""
    groups = []
    for number in {os.getgid(), *os.getgroups()}:
        try:
            groups.append(grp.getgrgid(number).gr_name)
        except KeyError:
            # AllowGroups has names, so a group without one, as in a container, allows nothing.
            groups.append(str(number))
    accounts = None if site.associations is None else {association.account for association in site.associations}
    # Slurm lets root use any partition.
    root = os.getuid() == 0
    return [name for name, part in site.partitions.items() if may_use(part, groups, accounts, root=root)]


def is_watched(root: RunsRoot) -> bool:
    """Whether a ``watch`` restarts runs of this root. One on another machine counts, as it cannot be checked."""
    from slurmtrain.ops.watch import read_holder

    holder = read_holder(root.watch_lock)
    # None: its process is on another machine, where nothing can be checked.
    return holder is not None and (holder.process is None or holder.process.alive() is not False)
