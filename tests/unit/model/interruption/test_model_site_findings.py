"""What a person should know of a site."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.siteconfig import QOS, finding_about, outlook_on, severities, site

from slurmtrain.model.interruption.site_findings import SEVERITIES, worst_severity
from slurmtrain.slurm.site import Site


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


def test_a_save_that_does_not_fit_before_the_time_limit_is_outlook_too() -> None:
    texts = [finding.text for finding in outlook_on(partition="ondemand", save_s=100, lead_s=90, time_s=3600).findings]
    assert any("a time limit leaves 90 s" in text for text in texts)


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
def test_what_stands_in_the_way_is_outlook(cluster: Site, job: dict[str, Any], name: str, severity: str) -> None:
    assert severities(outlook_on(cluster, **job), name) == {name: severity}
    assert name not in severities(outlook_on())


def test_a_qos_may_let_its_jobs_run_for_longer_than_the_partition() -> None:
    lines = QOS.replace("DenyOnLimit,OverPartQOS", "DenyOnLimit,PartitionTimeLimit")
    assert "MaxTime" not in severities(outlook_on(site(qos=lines), qos="low", time_s=5 * 3600))
    assert "MaxTime" in severities(outlook_on(site(qos=lines), qos="normal", time_s=5 * 3600))


def test_the_most_serious_finding_comes_first() -> None:
    ordered = [finding.severity for finding in outlook_on(site(RequeueExit="1"), save_s=100).findings]
    assert ordered == sorted(ordered, key=SEVERITIES.index, reverse=True)
    assert ordered[0] == "fail"
