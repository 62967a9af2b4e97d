"""What becomes of a job when it is interrupted, by what real sites say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.siteconfig import QOS, site
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.interruption.outlook import (
    SEVERITIES,
    STARTERS,
    JobFacts,
    Outlook,
    SiteFinding,
    locally,
    outlook,
    worst,
)
from slurmtrain.model.interruption.preemption import Cluster, Partition, Qos, may_use
from slurmtrain.slurm.site import Site

EVENTS = ["preemption", "time limit", "node failure", "scancel"]


def look(given: Site | None = None, name: str = "spot", **job: Any) -> Outlook:
    """What becomes of a job on the captured cluster, or on one like it."""
    on = given or site()
    return outlook(on.cluster, on.partitions[name], list(on.partitions.values()), on.qos, JobFacts(**job))


def about(found: Outlook, *names: str) -> dict[str, str]:
    """Severities by what they are about."""
    return {one.about: one.severity for one in found.findings if not names or one.about in names}


def said(found: Outlook, name: str) -> SiteFinding:
    return next(one for one in found.findings if one.about == name)


# --- preemption -----------------------------------------------------------------------------------------------------


def test_a_job_that_is_requeued_after_a_grace_puts_itself_back() -> None:
    case = look(time_s=3600).case("preemption")
    assert (case.seconds, case.starts, case.delay_s) == (30, "agent", 6)
    assert "by jobs of partition ondemand" in case.text
    assert "SIGTERM comes when the grace begins" in case.text
    assert "Slurm does after the grace" in case.text


def test_a_job_that_is_cancelled_after_a_grace_puts_itself_back_too() -> None:
    case = look(name="spot-cancel").case("preemption")
    assert (case.seconds, case.starts) == (30, "agent")
    assert "`slurmtrain watch` starts it anew if not" in case.text


def test_without_a_grace_a_job_has_killwait_and_slurm_puts_it_back() -> None:
    found = look(site(partition={"GraceTime": "0"}))
    case = found.case("preemption")
    assert (case.seconds, case.starts, case.delay_s) == (5, "slurm", 6)
    assert said(found, "GraceTime").severity == "warn"
    assert "an administrator sets GraceTime of partition spot" in said(found, "GraceTime").fix


def test_a_job_that_is_cancelled_without_a_grace_needs_a_watch() -> None:
    found = look(site(partition={"GraceTime": "0"}), "spot-cancel")
    assert found.case("preemption").starts == "watch"
    assert about(found, "PreemptMode", "watch") == {"PreemptMode": "warn", "watch": "warn"}
    assert "run `slurmtrain watch`" in said(found, "watch").fix
    watched = look(site(partition={"GraceTime": "0"}), "spot-cancel", watched=True)
    assert said(watched, "watch").severity == "ok"


def test_a_job_that_is_stopped_goes_on_by_itself() -> None:
    found = look(site(partition={"PreemptMode": "GANG,SUSPEND"}))
    case = found.case("preemption")
    assert (case.seconds, case.starts, case.delay_s) == (None, "itself", None)
    assert said(found, "PreemptMode").severity == "warn"


@pytest.mark.parametrize(
    ("given", "name", "why"),
    [
        (site(PreemptType="preempt/none"), "spot", "preempts no jobs"),
        (site(PreemptType="(null)"), "spot", "preempts no jobs"),
        (site(), "ondemand", "partition ondemand has PreemptMode=OFF"),
        (site(partition={"PriorityTier": "1"}), "spot", "no partition over the nodes of spot has a higher"),
    ],
)
def test_a_job_that_nothing_preempts_is_told_why(given: Site, name: str, why: str) -> None:
    found = look(given, name)
    case = found.case("preemption")
    assert (case.seconds, case.starts) == (None, "nobody")
    assert "does not happen" in case.text
    assert why in case.text
    assert not about(found, "GraceTime", "PreemptMode")


def test_a_higher_partition_over_other_nodes_preempts_nothing() -> None:
    low, high = (
        Partition(name="low", nodes="a[1-4]", preempt_mode=frozenset({"REQUEUE"})),
        Partition(name="high", nodes="b[1-4]", tier=9),
    )
    cluster = Cluster(preempt_type="partition_prio")
    assert "does not happen" in outlook(cluster, low, [low, high], None, JobFacts()).case("preemption").text
    overlapping = Partition(name="high", nodes="a4,b[1-4]", tier=9)
    assert outlook(cluster, low, [low, overlapping], None, JobFacts()).case("preemption").starts == "slurm"


def test_nodes_that_cannot_be_read_may_be_the_same() -> None:
    low, high = Partition(name="low", nodes="a[", preempt_mode=frozenset({"REQUEUE"})), Partition(name="high", tier=9)
    found = outlook(Cluster(preempt_type="partition_prio"), low, [low, high], None, JobFacts())
    assert found.case("preemption").starts == "slurm"


BY_QOS = site(PreemptType="preempt/qos")


def test_by_qos_the_grace_and_the_mode_are_those_of_the_jobs_qos() -> None:
    case = look(BY_QOS, qos="low").case("preemption")
    assert (case.seconds, case.starts) == (60, "agent")
    assert "by jobs of QOS high, normal (PreemptMode=REQUEUE, GraceTime=60 of QOS low)" in case.text


def test_by_qos_a_mode_that_is_the_clusters_counts() -> None:
    case = look(site(PreemptType="preempt/qos", PreemptMode="CANCEL"), qos="normal").case("preemption")
    assert (case.seconds, case.starts) == (5, "watch")
    assert "by jobs of QOS high (PreemptMode=CANCEL, GraceTime=0 of QOS normal)" in case.text


def test_by_qos_nobody_preempts_the_highest() -> None:
    assert "no QOS preempts QOS high" in look(BY_QOS, qos="high").case("preemption").text


@pytest.mark.parametrize(
    ("given", "qos", "why"),
    [
        (BY_QOS, None, "its QOS is not known"),
        (BY_QOS, "gold", "QOS gold is not known"),
        (site(PreemptType="preempt/qos", qos=None), "low", "accounting does not tell of any"),
        (site(PreemptType="preempt/job_prio"), None, "preempt/job_prio is not known here"),
    ],
)
def test_what_is_not_known_is_said(given: Site, qos: str | None, why: str) -> None:
    found = look(given, qos=qos)
    assert "not known" in found.case("preemption").text
    assert why in said(found, "PreemptType").text
    assert said(found, "PreemptType").severity == "warn"


def test_the_signal_that_replaces_sigterm_is_named() -> None:
    found = look(site(PreemptParameters="send_user_signal"))
    assert "SIGUSR2 comes when the grace begins" in found.case("preemption").text
    assert "PreemptParameters=send_user_signal" in said(found, "PreemptParameters").text


def test_a_script_that_saves_by_itself_is_sent_its_signal() -> None:
    case = look(own_saves=True, signal="SIGUSR1").case("preemption")
    assert "its script is sent SIGUSR1" in case.text


def test_the_time_before_which_nothing_is_preempted_is_told() -> None:
    case = look(site(PreemptExemptTime="02:00:00")).case("preemption")
    assert "not in its first 2 h (PreemptExemptTime)" in case.text


# --- versions ---------------------------------------------------------------------------------------------------------


def test_before_24_05_slurm_does_not_put_back_a_job_that_leaves() -> None:
    assert "does not put back a job that leaves within its grace" in said(look(), "SLURM_VERSION").text


def test_from_24_05_on_each_exit_within_the_grace_counts() -> None:
    found = said(look(site(SLURM_VERSION="24.05.0", MaxBatchRequeue="7")), "SLURM_VERSION")
    assert "24.05 puts back a job that leaves within its grace, and holds it after 7 times" in found.text


# --- the other interruptions ------------------------------------------------------------------------------------------


def test_the_time_limit_is_announced_and_its_own_agent_puts_it_back() -> None:
    case = look(time_s=7200, lead_s=90).case("time limit")
    assert (case.seconds, case.starts, case.delay_s) == (90, "agent", 6)
    assert "after 2 h (resources.time)" in case.text


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ({}, "after 30 min (the default of partition spot)"),
        ({"DefaultTime": "NONE"}, "after 4 h (the limit of partition spot)"),
        ({"OverTimeLimit": "5"}, "(the default of partition spot, 300 s beyond it)"),
        ({"OverTimeLimit": "UNLIMITED"}, "(the default of partition spot)"),
    ],
)
def test_a_job_without_a_limit_has_that_of_its_partition(partition: dict[str, str], words: str) -> None:
    assert words in look(site(partition=partition)).case("time limit").text


def test_a_cluster_may_let_jobs_go_on_for_ever() -> None:
    assert "without end beyond it" in look(site(OverTimeLimit="UNLIMITED"), time_s=60).case("time limit").text


def test_a_job_that_no_limit_ends_is_told_so() -> None:
    endless = site(partition={"DefaultTime": "NONE", "MaxTime": "UNLIMITED"})
    assert "does not happen" in look(endless).case("time limit").text


def test_when_a_node_dies_slurm_puts_the_job_back() -> None:
    case = look(site(SlurmdTimeout="300 sec")).case("node failure")
    assert (case.seconds, case.starts, case.delay_s) == (0, "slurm", 6)
    assert "after 300 s (SlurmdTimeout)" in case.text


@pytest.mark.parametrize("job", [{"spares": 1}, {"nodes": (2, 4)}])
def test_a_job_with_nodes_to_spare_goes_on_without_the_dead_one(job: dict[str, Any]) -> None:
    case = look(**job).case("node failure")
    assert (case.starts, case.delay_s) == ("agent", 0)
    assert "the others go on in the same job" in case.text


def test_what_a_person_cancels_stays_cancelled() -> None:
    case = look().case("scancel")
    assert (case.seconds, case.starts) == (5, "nobody")
    assert "`slurmtrain resume`" in case.text


def test_a_spec_that_wants_no_requeue_gets_none() -> None:
    found = look(requeue=False, time_s=60)
    assert {case.starts for case in found.cases} == {"nobody"}
    assert said(found, "requeue.enabled").severity == "warn"


# --- saves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save_s", "severity", "words"),
    [
        (None, "ok", "no save has been measured"),
        (20, "ok", "fits into the 30 s"),
        (25, "warn", "may not be done in time"),
        (31, "fail", "the work since the last checkpoint is lost"),
    ],
)
def test_the_last_save_is_held_against_the_grace(save_s: float | None, severity: str, words: str) -> None:
    found = said(look(save_s=save_s), "save")
    assert (found.severity, words in found.text) == (severity, True)


def test_a_grace_that_is_too_short_is_said_to_whoever_can_change_it() -> None:
    found = look(save_s=40)
    assert worst(found.findings) == "fail"
    assert "an administrator sets GraceTime of partition spot to 60 s" in said(found, "save").fix


def test_a_save_that_does_not_fit_before_the_time_limit_is_found_too() -> None:
    texts = [one.text for one in look(name="ondemand", save_s=100, lead_s=90, time_s=3600).findings]
    assert any("a time limit leaves 90 s" in text for text in texts)


# --- sites ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "job", "name", "severity"),
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
def test_what_stands_in_the_way_is_found(given: Site, job: dict[str, Any], name: str, severity: str) -> None:
    assert about(look(given, **job), name) == {name: severity}
    assert name not in about(look())


def test_a_qos_may_let_its_jobs_run_for_longer_than_the_partition() -> None:
    lines = QOS.replace("DenyOnLimit,OverPartQOS", "DenyOnLimit,PartitionTimeLimit")
    assert "MaxTime" not in about(look(site(qos=lines), qos="low", time_s=5 * 3600))
    assert "MaxTime" in about(look(site(qos=lines), qos="normal", time_s=5 * 3600))


def test_the_gravest_finding_comes_first() -> None:
    severities = [one.severity for one in look(site(RequeueExit="1"), save_s=100).findings]
    assert severities == sorted(severities, key=SEVERITIES.index, reverse=True)
    assert severities[0] == "fail"


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
def test_partitions_of_others_are_passed_over(
    partition: Partition, groups: list[str], accounts: set[str] | None, root: bool, may: bool
) -> None:
    assert may_use(partition, groups, accounts, root=root) is may


# --- this machine -----------------------------------------------------------------------------------------------------


def test_locally_only_commands_start_a_run_again() -> None:
    found = locally(JobFacts(time_s=3600))
    assert [case.event for case in found.cases] == EVENTS
    assert (found.case("time limit").starts, found.case("time limit").seconds) == ("watch", 30)
    assert found.case("preemption").starts == "nobody"
    assert about(found)["watch"] == "warn"
    assert about(locally(JobFacts(watched=True)))["watch"] == "ok"
    assert about(locally(JobFacts(requeue=False)))["requeue.enabled"] == "warn"
    assert "nothing limits its time" in locally(JobFacts()).case("time limit").text


# --- all of them ------------------------------------------------------------------------------------------------------

SECONDS = st.floats(0, 1e6)
MODES = st.sets(st.sampled_from(["OFF", "CANCEL", "REQUEUE", "SUSPEND", "GANG"]), min_size=1).map(frozenset)


@given(
    cluster=st.builds(
        Cluster,
        version=st.none() | st.tuples(st.integers(20, 30), st.integers(0, 12)),
        preempt_type=st.sampled_from(["none", "partition_prio", "qos", "other"]),
        preempt_mode=MODES,
        kill_wait_s=SECONDS,
        over_limit_s=st.none() | SECONDS,
        accounting=st.booleans(),
    ),
    one=st.builds(Partition, name=st.just("one"), grace_s=SECONDS, preempt_mode=MODES, tier=st.integers(1, 2)),
    other=st.builds(Partition, name=st.just("other"), tier=st.integers(1, 3), max_time_s=st.none() | SECONDS),
    qos=st.none() | st.dictionaries(st.just("q"), st.builds(Qos, name=st.just("q"), preempts=st.just(frozenset("q")))),
    job=st.builds(
        JobFacts,
        time_s=st.none() | SECONDS,
        qos=st.none() | st.just("q"),
        requeue=st.booleans(),
        save_s=st.none() | SECONDS,
        watched=st.booleans(),
    ),
)
def test_every_site_has_an_answer_for_every_interruption(
    cluster: Cluster, one: Partition, other: Partition, qos: dict[str, Qos] | None, job: JobFacts
) -> None:
    found = outlook(cluster, one, [one, other], qos, job)
    assert [case.event for case in found.cases] == EVENTS
    assert {case.starts for case in found.cases} <= set(STARTERS)
    assert {finding.severity for finding in found.findings} <= set(SEVERITIES)
    assert all(finding.fix for finding in found.findings if finding.severity != "ok")
    if not job.requeue:
        assert {case.starts for case in found.cases} <= {"nobody", "itself"}
    needs_watch = any(case.starts == "watch" for case in found.cases)
    warned = any(finding.about == "watch" and finding.severity == "warn" for finding in found.findings)
    assert warned is (needs_watch and not job.watched)
