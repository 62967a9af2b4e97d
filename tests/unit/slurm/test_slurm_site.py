"""Reading what scontrol and sacctmgr say of a site."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fakeslurm import SlurmCommands
from helpers.siteconfig import ASSOCIATIONS, CONFIG, PARTITIONS, QOS, config
from helpers.siteconfig import site as site_of
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import SlurmDown
from slurmtrain.model.interruption.preemption import Qos
from slurmtrain.slurm.parse import read_partitions
from slurmtrain.slurm.scheduler import Scheduler
from slurmtrain.slurm.site import (
    Association,
    read_associations,
    read_cluster,
    read_config,
    read_partition,
    read_qos,
    read_site,
)


def test_a_real_configuration_is_read() -> None:
    cluster = read_cluster(read_config(CONFIG))
    assert (cluster.version, cluster.preempt_type, cluster.preempt_mode) == ((22, 5), "partition_prio", {"REQUEUE"})
    assert (cluster.kill_wait_s, cluster.slurmd_timeout_s, cluster.min_job_age_s) == (5, 15, 300)
    assert (cluster.cred_expire_s, cluster.requeue_delay_s, cluster.max_requeues) == (5, 6, 5)
    assert (cluster.job_requeue, cluster.accounting, cluster.gathers_usage) == (True, True, True)
    assert (cluster.user_signal, cluster.over_limit_s, cluster.exempt_s) == ("", 0, 0)
    assert (cluster.prolog_flags, cluster.requeue_exit) == (frozenset(), "")


def test_real_partitions_are_read() -> None:
    site = site_of()
    spot, paid = site.partitions["spot"], site.partitions["ondemand"]
    assert (spot.grace_s, spot.preempt_mode, spot.tier, spot.default, spot.up) == (30, {"REQUEUE"}, 1, True, True)
    assert (spot.max_time_s, spot.default_time_s, spot.over_limit_s) == (4 * 3600, 1800, None)
    assert (spot.nodes, spot.groups, spot.accounts, spot.qos, spot.root_only) == ("node[0-1]", None, None, None, False)
    assert (paid.grace_s, paid.preempt_mode, paid.tier) == (0, {"OFF"}, 100)
    assert site.partitions["spot-cancel"].preempt_mode == {"CANCEL"}


def test_real_qos_are_read() -> None:
    assert read_qos(QOS) == {
        "normal": Qos(name="normal", preempts=frozenset({"low"})),
        "low": Qos(name="low", mode=frozenset({"REQUEUE"}), grace_s=60),
        "high": Qos(name="high", preempts=frozenset({"low", "normal"}), mode=frozenset({"CANCEL"})),
    }
    assert read_associations(ASSOCIATIONS) == [Association("research", "", ("low", "normal"), "normal")]


@pytest.mark.parametrize(
    ("changes", "attribute", "value"),
    [
        ({"PreemptType": "(null)"}, "preempt_type", "none"),
        ({"PreemptType": "preempt/none"}, "preempt_type", "none"),
        ({"PreemptParameters": "youngest_first,send_user_signal"}, "user_signal", "PreemptParameters=send_user_signal"),
        (
            {"SlurmctldParameters": "preempt_send_user_signal"},
            "user_signal",
            "SlurmctldParameters=preempt_send_user_signal",
        ),
        ({"MaxBatchRequeue": "7"}, "max_requeues", 7),
        ({"AuthInfo": "(null)"}, "cred_expire_s", 120),
        ({"AuthInfo": "cred_expire=1200,ttl=300"}, "cred_expire_s", 1200),
        ({"JobRequeue": "0"}, "job_requeue", False),
        ({"OverTimeLimit": "5 min"}, "over_limit_s", 300),
        ({"OverTimeLimit": "UNLIMITED"}, "over_limit_s", None),
        ({"AccountingStorageType": "accounting_storage/none"}, "accounting", False),
        ({"AccountingStorageType": "(null)"}, "accounting", False),
        ({"JobAcctGatherType": "jobacct_gather/none"}, "gathers_usage", False),
        ({"PrologFlags": "Alloc,ForceRequeueOnFail"}, "prolog_flags", {"ALLOC", "FORCEREQUEUEONFAIL"}),
        ({"RequeueExit": "1-10,75"}, "requeue_exit", "1-10,75"),
        ({"PreemptExemptTime": "01:00:00"}, "exempt_s", 3600),
        ({"PreemptMode": "GANG,SUSPEND"}, "preempt_mode", {"GANG", "SUSPEND"}),
        ({"SLURM_VERSION": "24.05.4"}, "version", (24, 5)),
        ({"SLURM_VERSION": "unheard of"}, "version", None),
    ],
)
def test_other_sites_are_read_too(changes: dict[str, str], attribute: str, value: object) -> None:
    assert getattr(read_cluster(read_config(config(**changes))), attribute) == value


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({"State": "DOWN"}, "up", False),
        ({"GraceTime": "120"}, "grace_s", 120),
        ({"MaxTime": "UNLIMITED", "DefaultTime": "NONE"}, "max_time_s", None),
        ({"OverTimeLimit": "10"}, "over_limit_s", 600),
        ({"AllowGroups": "lab,staff"}, "groups", {"lab", "staff"}),
        ({"AllowAccounts": "a"}, "accounts", {"a"}),
        ({"AllowQos": "normal"}, "qos", {"normal"}),
        ({"RootOnly": "YES"}, "root_only", True),
        ({"PreemptMode": ""}, "preempt_mode", {"REQUEUE"}),
        ({"Nodes": "(null)"}, "nodes", ""),
    ],
)
def test_other_partitions_are_read_too(fields: dict[str, str], attribute: str, value: object) -> None:
    cluster = read_cluster(read_config(CONFIG))
    spot = read_partitions(PARTITIONS)["spot"]
    assert getattr(read_partition({**spot, **fields}, cluster), attribute) == value


@given(st.dictionaries(st.sampled_from(sorted(read_config(CONFIG))), st.text()))
def test_any_value_is_read_without_an_error(changes: dict[str, str]) -> None:
    cluster = read_cluster({**read_config(CONFIG), **changes})
    assert cluster.requeue_delay_s > 0
    assert cluster.preempt_mode


@given(st.dictionaries(st.sampled_from(sorted(read_partitions(PARTITIONS)["spot"])), st.text()))
def test_any_value_of_a_partition_is_read_without_an_error(changes: dict[str, str]) -> None:
    cluster = read_cluster(read_config(CONFIG))
    assert read_partition({**read_partitions(PARTITIONS)["spot"], **changes}, cluster).preempt_mode


# --- asking -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    fake = SlurmCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.on_path())
    fake.replies("scontrol", CONFIG + PARTITIONS)  # each reader passes over what the other reads
    return fake


def test_accounting_that_is_off_is_not_asked(slurm: SlurmCommands) -> None:
    slurm.replies("scontrol", config(AccountingStorageType="accounting_storage/none") + PARTITIONS)
    site = read_site(Scheduler(1.0, None), "me")
    assert (site.qos, site.associations) == (None, None)
    assert site.unknown == ("QOS and accounts: this cluster has no accounting",)
    assert site.partitions["spot"].grace_s == 30


def test_accounting_is_asked_for_qos_and_for_what_the_user_may_use(slurm: SlurmCommands) -> None:
    slurm.replies("sacctmgr", QOS)
    site = read_site(Scheduler(1.0, None), "me")
    assert site.qos is not None
    assert set(site.qos) == {"normal", "low", "high"}
    assert site.unknown == ()
    arguments = [call.args for call in slurm.calls("sacctmgr")]
    assert arguments[0][2:] == ["show", "qos", "format=name,preempt,preemptmode,gracetime,priority,flags"]
    assert arguments[1][2:] == ["show", "assoc", "where", "user=me", "format=account,partition,qos,defaultqos"]


def test_slurm_that_is_down_is_an_error(slurm: SlurmCommands) -> None:
    slurm.fails("scontrol", "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(SlurmDown, match="Unable to contact"):
        read_site(Scheduler(1.0, None), "me")
