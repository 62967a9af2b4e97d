"""What happens to a job at each kind of interruption, by the settings of real sites."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.siteconfig import finding_about, outlook_on, severities, site

from slurmtrain.model.interruption.cases import JobFacts
from slurmtrain.model.interruption.outlook import make_outlook
from slurmtrain.model.interruption.preemption import Cluster, Partition
from slurmtrain.slurm.site import Site

# --- preemption -------------------------------------------------------------------------------------------------------


def test_a_job_that_slurm_requeues_after_a_grace_requeues_itself_before() -> None:
    case = outlook_on(time_s=3600).case("preemption")
    assert (case.seconds, case.starts, case.delay_s) == (30, "agent", 6)
    assert "by jobs of partition ondemand" in case.text
    assert "SIGTERM comes when the grace begins" in case.text
    assert "Slurm does after the grace" in case.text


def test_a_job_that_slurm_cancels_after_a_grace_requeues_itself_too() -> None:
    case = outlook_on(partition="spot-cancel").case("preemption")
    assert (case.seconds, case.starts) == (30, "agent")
    assert "`slurmtrain watch` restarts it if not" in case.text


def test_without_a_grace_a_job_has_killwait_and_slurm_requeues_it() -> None:
    outlook = outlook_on(site(partition={"GraceTime": "0"}))
    case = outlook.case("preemption")
    assert (case.seconds, case.starts, case.delay_s) == (5, "slurm", 6)
    assert finding_about(outlook, "GraceTime").severity == "warn"
    assert "ask an administrator to set GraceTime of partition spot" in finding_about(outlook, "GraceTime").fix


def test_a_job_that_is_cancelled_without_a_grace_needs_a_watch() -> None:
    outlook = outlook_on(site(partition={"GraceTime": "0"}), "spot-cancel")
    assert outlook.case("preemption").starts == "watch"
    assert severities(outlook, "PreemptMode", "watch") == {"PreemptMode": "warn", "watch": "warn"}
    assert "run `slurmtrain watch`" in finding_about(outlook, "watch").fix
    watched = outlook_on(site(partition={"GraceTime": "0"}), "spot-cancel", watched=True)
    assert finding_about(watched, "watch").severity == "ok"


def test_a_suspended_job_resumes_by_itself() -> None:
    outlook = outlook_on(site(partition={"PreemptMode": "GANG,SUSPEND"}))
    case = outlook.case("preemption")
    assert (case.seconds, case.starts, case.delay_s) == (None, "itself", None)
    assert finding_about(outlook, "PreemptMode").severity == "warn"


@pytest.mark.parametrize(
    ("cluster", "name", "why"),
    [
        (site(PreemptType="preempt/none"), "spot", "preempts no jobs"),
        (site(PreemptType="(null)"), "spot", "preempts no jobs"),
        (site(), "ondemand", "partition ondemand has PreemptMode=OFF"),
        (site(partition={"PriorityTier": "1"}), "spot", "no partition over the nodes of spot has a higher"),
    ],
)
def test_the_case_says_why_nothing_preempts_a_job(cluster: Site, name: str, why: str) -> None:
    outlook = outlook_on(cluster, name)
    case = outlook.case("preemption")
    assert (case.seconds, case.starts) == (None, "nobody")
    assert "does not happen" in case.text
    assert why in case.text
    assert not severities(outlook, "GraceTime", "PreemptMode")


def test_a_higher_partition_over_other_nodes_preempts_nothing() -> None:
    low, high = (
        Partition(name="low", nodes="a[1-4]", preempt_mode=frozenset({"REQUEUE"})),
        Partition(name="high", nodes="b[1-4]", tier=9),
    )
    cluster = Cluster(preempt_type="partition_prio")
    assert "does not happen" in make_outlook(cluster, low, [low, high], None, JobFacts()).case("preemption").text
    overlapping = Partition(name="high", nodes="a4,b[1-4]", tier=9)
    assert make_outlook(cluster, low, [low, overlapping], None, JobFacts()).case("preemption").starts == "slurm"


def test_host_lists_that_cannot_be_parsed_may_overlap() -> None:
    low, high = Partition(name="low", nodes="a[", preempt_mode=frozenset({"REQUEUE"})), Partition(name="high", tier=9)
    outlook = make_outlook(Cluster(preempt_type="partition_prio"), low, [low, high], None, JobFacts())
    assert outlook.case("preemption").starts == "slurm"


BY_QOS = site(PreemptType="preempt/qos")


def test_with_preempt_qos_grace_and_mode_come_from_the_qos_of_the_job() -> None:
    case = outlook_on(BY_QOS, qos="low").case("preemption")
    assert (case.seconds, case.starts) == (60, "agent")
    assert "by jobs of QOS high, normal (PreemptMode=REQUEUE, GraceTime=60 of QOS low)" in case.text


def test_with_preempt_qos_the_mode_of_the_cluster_is_the_default() -> None:
    case = outlook_on(site(PreemptType="preempt/qos", PreemptMode="CANCEL"), qos="normal").case("preemption")
    assert (case.seconds, case.starts) == (5, "watch")
    assert "by jobs of QOS high (PreemptMode=CANCEL, GraceTime=0 of QOS normal)" in case.text


def test_with_preempt_qos_nothing_preempts_the_highest_qos() -> None:
    assert "no QOS preempts QOS high" in outlook_on(BY_QOS, qos="high").case("preemption").text


@pytest.mark.parametrize(
    ("cluster", "qos", "why"),
    [
        (BY_QOS, None, "its QOS is unknown"),
        (BY_QOS, "gold", "QOS gold is unknown"),
        (site(PreemptType="preempt/qos", qos=None), "low", "accounting names none"),
        (site(PreemptType="preempt/job_prio"), None, "does not know PreemptType=preempt/job_prio"),
    ],
)
def test_an_unknown_preemption_is_a_warning(cluster: Site, qos: str | None, why: str) -> None:
    outlook = outlook_on(cluster, qos=qos)
    assert "unknown" in outlook.case("preemption").text
    assert why in finding_about(outlook, "PreemptType").text
    assert finding_about(outlook, "PreemptType").severity == "warn"


def test_the_signal_that_replaces_sigterm_is_named() -> None:
    outlook = outlook_on(site(PreemptParameters="send_user_signal"))
    assert "SIGUSR2 comes when the grace begins" in outlook.case("preemption").text
    assert "PreemptParameters=send_user_signal" in finding_about(outlook, "PreemptParameters").text


def test_a_script_that_saves_by_itself_is_sent_its_signal() -> None:
    case = outlook_on(own_saves=True, signal="SIGUSR1").case("preemption")
    assert "its script is sent SIGUSR1" in case.text


def test_the_time_in_which_a_job_is_exempt_is_mentioned() -> None:
    case = outlook_on(site(PreemptExemptTime="02:00:00")).case("preemption")
    assert "not in its first 2 h (PreemptExemptTime)" in case.text


# --- versions ---------------------------------------------------------------------------------------------------------


def test_before_24_05_slurm_does_not_requeue_a_job_that_exits() -> None:
    assert "does not requeue a job that exits within its grace" in finding_about(outlook_on(), "SLURM_VERSION").text


def test_from_24_05_on_each_exit_within_the_grace_counts() -> None:
    finding = finding_about(outlook_on(site(SLURM_VERSION="24.05.0", MaxBatchRequeue="7")), "SLURM_VERSION")
    assert "24.05 requeues a job that exits within its grace, and holds it after 7 times" in finding.text


# --- the other interruptions ------------------------------------------------------------------------------------------


def test_a_job_is_warned_of_its_time_limit_and_requeues_itself() -> None:
    case = outlook_on(time_s=7200, lead_s=90).case("time limit")
    assert (case.seconds, case.starts, case.delay_s) == (90, "agent", 6)
    assert "after 2 h (resources.time)" in case.text


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ({}, "after 30 min (the default of partition spot)"),
        ({"DefaultTime": "NONE"}, "after 4 h (the limit of partition spot)"),
        ({"OverTimeLimit": "5"}, "(the default of partition spot, plus 300 s)"),
        ({"OverTimeLimit": "UNLIMITED"}, "(the default of partition spot)"),
    ],
)
def test_a_job_without_a_limit_has_that_of_its_partition(partition: dict[str, str], words: str) -> None:
    assert words in outlook_on(site(partition=partition)).case("time limit").text


def test_a_cluster_may_not_enforce_time_limits() -> None:
    assert "which is not enforced" in outlook_on(site(OverTimeLimit="UNLIMITED"), time_s=60).case("time limit").text


def test_without_any_limit_no_time_limit_happens() -> None:
    endless = site(partition={"DefaultTime": "NONE", "MaxTime": "UNLIMITED"})
    assert "does not happen" in outlook_on(endless).case("time limit").text


def test_when_a_node_dies_slurm_requeues_the_job() -> None:
    case = outlook_on(site(SlurmdTimeout="300 sec")).case("node failure")
    assert (case.seconds, case.starts, case.delay_s) == (0, "slurm", 6)
    assert "after 300 s (SlurmdTimeout)" in case.text


@pytest.mark.parametrize("job", [{"spares": 1}, {"nodes": (2, 4)}])
def test_an_elastic_job_continues_without_the_dead_node(job: dict[str, Any]) -> None:
    case = outlook_on(**job).case("node failure")
    assert (case.starts, case.delay_s) == ("agent", 0)
    assert "the others continue in the same job" in case.text


def test_a_cancelled_job_is_not_started_again() -> None:
    case = outlook_on().case("scancel")
    assert (case.seconds, case.starts) == (5, "nobody")
    assert "`slurmtrain resume`" in case.text


def test_without_requeue_nothing_starts_a_run_again() -> None:
    outlook = outlook_on(requeue=False, time_s=60)
    assert {case.starts for case in outlook.cases} == {"nobody"}
    assert finding_about(outlook, "requeue.enabled").severity == "warn"
