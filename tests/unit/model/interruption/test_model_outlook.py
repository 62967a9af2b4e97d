"""The outlook for a job on this machine, and on any site."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.siteconfig import QOS, finding_about, outlook_on, severities, site

from slurmtrain.model.interruption.outlook import JobFacts, local_outlook, make_outlook, worst_severity
from slurmtrain.model.interruption.preemption import Cluster, Partition, may_use
from slurmtrain.slurm.site import Site

EVENTS = ["preemption", "time limit", "node failure", "scancel"]


def test_on_this_machine_only_commands_start_a_run_again() -> None:
    outlook = local_outlook(JobFacts(time_s=3600))
    assert [case.event for case in outlook.cases] == EVENTS
    assert (outlook.case("time limit").starts, outlook.case("time limit").seconds) == ("watch", 30)
    assert outlook.case("preemption").starts == "nobody"
    assert severities(outlook)["watch"] == "warn"
    assert severities(local_outlook(JobFacts(watched=True)))["watch"] == "ok"
    assert severities(local_outlook(JobFacts(requeue=False)))["requeue.enabled"] == "warn"
    assert "it has no time limit" in local_outlook(JobFacts()).case("time limit").text


# --- what a person should know of a site --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save_s", "severity", "text"),
    [
        (None, "ok", "no save has been measured"),
        (20, "ok", "fits into the 30 s"),
        (25, "warn", "may not finish in time"),
        (31, "fail", "the work since the last checkpoint is lost"),
    ],
)
def test_the_last_save_is_compared_with_the_grace(save_s: float | None, severity: str, text: str) -> None:
    finding = finding_about(outlook_on(save_s=save_s), "save")
    assert (finding.severity, text in finding.text) == (severity, True)


def test_the_fix_for_a_short_grace_names_the_setting_and_a_sufficient_value() -> None:
    outlook = outlook_on(save_s=40)
    assert worst_severity(outlook.findings) == "fail"
    assert "ask an administrator to set GraceTime of partition spot to 60 s" in finding_about(outlook, "save").fix


@pytest.mark.parametrize(
    ("cluster", "job", "name", "severity"),
    [
        (site(partition={"State": "INACTIVE"}), {}, "State", "fail"),
        (site(), {"time_s": 5 * 3600}, "MaxTime", "fail"),
        (site(partition={"AllowQos": "high"}), {"qos": "low"}, "AllowQos", "fail"),
        (site(JobRequeue="0"), {}, "JobRequeue", "ok"),
        (site(AuthInfo="cred_expire=1200"), {}, "AuthInfo", "ok"),
        (site(RequeueExit="1-100"), {}, "RequeueExit", "warn"),
        (site(AccountingStorageType="accounting_storage/none"), {}, "AccountingStorageType", "warn"),
        (site(qos=None), {}, "QOS", "warn"),
        (site(JobAcctGatherType="jobacct_gather/none"), {}, "JobAcctGatherType", "ok"),
        (site(PrologFlags="ForceRequeueOnFail"), {}, "PrologFlags", "ok"),
    ],
)
def test_what_stands_in_the_way_is_found(cluster: Site, job: dict[str, Any], name: str, severity: str) -> None:
    assert severities(outlook_on(cluster, **job), name) == {name: severity}
    assert name not in severities(outlook_on())


def test_a_qos_may_let_its_jobs_run_for_longer_than_the_partition() -> None:
    lines = QOS.replace("DenyOnLimit,OverPartQOS", "DenyOnLimit,PartitionTimeLimit")
    assert "MaxTime" not in severities(outlook_on(site(qos=lines), qos="low", time_s=5 * 3600))
    assert "MaxTime" in severities(outlook_on(site(qos=lines), qos="normal", time_s=5 * 3600))


# --- what happens to a job at each kind of interruption, by the settings of real sites ----------------------------

BY_QOS = site(PreemptType="preempt/qos")
NO_GRACE = site(partition={"GraceTime": "0"})
ENDLESS = site(partition={"DefaultTime": "NONE", "MaxTime": "UNLIMITED"})


@pytest.mark.parametrize(
    ("cluster", "partition", "job", "event", "expected", "words"),
    [
        # With a grace, a job requeues itself in it; without one, Slurm does, or a watch if Slurm cancels it.
        (site(), "spot", {}, "preemption", (30, "agent", 6), "by jobs of partition ondemand"),
        (site(), "spot", {}, "preemption", (30, "agent", 6), "SIGTERM comes when the grace begins"),
        (site(), "spot", {}, "preemption", (30, "agent", 6), "Slurm does after the grace"),
        (site(), "spot-cancel", {}, "preemption", (30, "agent", 6), "`slurmtrain watch` restarts it if not"),
        (NO_GRACE, "spot", {}, "preemption", (5, "slurm", 6), "Slurm requeues it"),
        (NO_GRACE, "spot-cancel", {}, "preemption", (5, "watch", None), "`slurmtrain watch` submits it again"),
        (site(partition={"PreemptMode": "GANG,SUSPEND"}), "spot", {}, "preemption", (None, "itself", None), "suspend"),
        (site(PreemptParameters="send_user_signal"), "spot", {}, "preemption", (30, "agent", 6), "SIGUSR2 comes"),
        (site(), "spot", {"own_saves": True, "signal": "SIGUSR1"}, "preemption", (30, "agent", 6), "is sent SIGUSR1"),
        (site(PreemptExemptTime="02:00:00"), "spot", {}, "preemption", (30, "agent", 6), "not in its first 2 h (Pre"),
        # Grace and mode are those of the job's QOS, by default the mode of the cluster.
        (BY_QOS, "spot", {"qos": "low"}, "preemption", (60, "agent", 6),
         "by jobs of QOS high, normal (PreemptMode=REQUEUE, GraceTime=60 of QOS low)"),
        (site(PreemptType="preempt/qos", PreemptMode="CANCEL"), "spot", {"qos": "normal"}, "preemption",
         (5, "watch", None), "by jobs of QOS high (PreemptMode=CANCEL, GraceTime=0 of QOS normal)"),
        # Nothing preempts a job.
        (BY_QOS, "spot", {"qos": "high"}, "preemption", (None, "nobody", None), "happen: no QOS preempts QOS high"),
        (site(PreemptType="preempt/none"), "spot", {}, "preemption", (None, "nobody", None), "not happen: this"),
        (site(PreemptType="(null)"), "spot", {}, "preemption", (None, "nobody", None), "does not preempt jobs"),
        (site(), "ondemand", {}, "preemption", (None, "nobody", None), "partition ondemand has PreemptMode=OFF"),
        (site(partition={"PriorityTier": "1"}), "spot", {}, "preemption", (None, "nobody", None),
         "no other partition with nodes of spot has a higher"),
        # The limit is the job's own, or its partition's.
        (site(), "spot", {"time_s": 7200, "lead_s": 90}, "time limit", (90, "agent", 6), "after 2 h (resources.time)"),
        (site(), "spot", {}, "time limit", (90, "agent", 6), "after 30 min (the default of partition spot)"),
        (site(partition={"DefaultTime": "NONE"}), "spot", {}, "time limit", (90, "agent", 6), "(the limit of"),
        (site(partition={"OverTimeLimit": "5"}), "spot", {}, "time limit", (90, "agent", 6), "spot, plus 300 s)"),
        (site(partition={"OverTimeLimit": "UNLIMITED"}), "spot", {}, "time limit", (90, "agent", 6), "(the default"),
        (site(OverTimeLimit="UNLIMITED"), "spot", {"time_s": 60}, "time limit", (90, "agent", 6), "is not enforced"),
        (ENDLESS, "spot", {}, "time limit", (None, "nobody", None), "does not happen"),
        # A node that dies takes the job with it, unless others can go on.
        (site(SlurmdTimeout="300 sec"), "spot", {}, "node failure", (0, "slurm", 6), "after 300 s (SlurmdTimeout)"),
        (site(), "spot", {"spares": 1}, "node failure", (0, "agent", 0), "the other nodes continue in the same"),
        (site(), "spot", {"nodes": (2, 4)}, "node failure", (0, "agent", 0), "the other nodes continue in the same"),
        (site(), "spot", {}, "scancel", (5, "nobody", None), "`slurmtrain resume`"),
    ],
)  # fmt: skip
def test_what_happens_to_a_job_at_an_interruption(
    cluster: Site, partition: str, job: dict[str, Any], event: str, expected: tuple[Any, ...], words: str
) -> None:
    case = outlook_on(cluster, partition, **job).case(event)
    assert (case.seconds, case.starts, case.delay_s) == expected
    assert words in case.text


@pytest.mark.parametrize(
    ("cluster", "partition", "job", "about", "severity", "words"),
    [
        (NO_GRACE, "spot", {}, "GraceTime", "warn", "ask an administrator to set GraceTime of partition spot"),
        (NO_GRACE, "spot-cancel", {}, "PreemptMode", "warn", "cannot requeue itself"),
        (NO_GRACE, "spot-cancel", {}, "watch", "warn", "run `slurmtrain watch`"),
        (NO_GRACE, "spot-cancel", {"watched": True}, "watch", "ok", "runs"),
        (site(partition={"PreemptMode": "GANG,SUSPEND"}), "spot", {}, "PreemptMode", "warn", "is suspended"),
        (site(PreemptParameters="send_user_signal"), "spot", {}, "PreemptParameters", "ok", "send_user_signal"),
        (BY_QOS, "spot", {}, "PreemptType", "warn", "its QOS is unknown"),
        (BY_QOS, "spot", {"qos": "gold"}, "PreemptType", "warn", "QOS gold is unknown"),
        (site(PreemptType="preempt/qos", qos=None), "spot", {"qos": "low"}, "PreemptType", "warn", "lists no QOS"),
        (site(PreemptType="preempt/job_prio"), "spot", {}, "PreemptType", "warn", "does not know Preempt"),
        # The versions of Slurm differ in what they do with a job that exits within its grace.
        (site(), "spot", {}, "SLURM_VERSION", "ok", "does not requeue a job that exits within its grace"),
        (site(SLURM_VERSION="24.05.0", MaxBatchRequeue="7"), "spot", {}, "SLURM_VERSION", "ok",
         "24.05 requeues a job that exits within its grace, and holds it after 7 times"),
        (site(), "spot", {"requeue": False, "time_s": 60}, "requeue.enabled", "warn", "does not start again"),
    ],
)  # fmt: skip
def test_what_a_person_should_know_of_interruptions_there(
    cluster: Site, partition: str, job: dict[str, Any], about: str, severity: str, words: str
) -> None:
    finding = finding_about(outlook_on(cluster, partition, **job), about)
    assert finding.severity == severity
    assert words in f"{finding.text}; {finding.fix}"


@pytest.mark.parametrize(
    ("low", "high", "starts"),
    [
        ("a[1-4]", "b[1-4]", "nobody"),
        ("a[1-4]", "a4,b[1-4]", "slurm"),
        # A host list that cannot be parsed may have any node.
        ("a[", "", "slurm"),
    ],
)
def test_a_higher_partition_preempts_jobs_on_nodes_that_both_have(low: str, high: str, starts: str) -> None:
    own = Partition(name="low", nodes=low, preempt_mode=frozenset({"REQUEUE"}))
    partitions = [own, Partition(name="high", nodes=high, tier=9)]
    outlook = make_outlook(Cluster(preempt_type="partition_prio"), own, partitions, None, JobFacts())
    assert outlook.case("preemption").starts == starts


# --- who may use a partition --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partition", "groups", "accounts", "root", "may"),
    [
        (Partition(name="p"), [], None, False, True),
        (Partition(name="p", groups=frozenset({"lab"})), ["users"], None, False, False),
        (Partition(name="p", groups=frozenset({"lab"})), ["users", "lab"], None, False, True),
        (Partition(name="p", groups=frozenset({"lab"})), [], None, True, True),
        (Partition(name="p", root_only=True), [], None, False, False),
        (Partition(name="p", accounts=frozenset({"a"})), [], {"b"}, False, False),
        (Partition(name="p", accounts=frozenset({"a"})), [], {"a", "b"}, False, True),
        (Partition(name="p", accounts=frozenset({"a"})), [], None, False, True),
    ],
)
def test_a_partition_may_be_reserved_for_groups_and_accounts(
    partition: Partition, groups: list[str], accounts: set[str] | None, root: bool, may: bool
) -> None:
    assert may_use(partition, groups, accounts, root=root) is may
