"""The outlook for a job on this machine, and on any site."""

from __future__ import annotations

from helpers.siteconfig import severities
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.interruption.cases import STARTERS, JobFacts
from slurmtrain.model.interruption.outlook import local_outlook, make_outlook
from slurmtrain.model.interruption.preemption import Cluster, Partition, Qos
from slurmtrain.model.interruption.site_findings import SEVERITIES

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
    own=st.builds(Partition, name=st.just("own"), grace_s=SECONDS, preempt_mode=MODES, tier=st.integers(1, 2)),
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
def test_every_site_has_a_case_for_every_interruption(
    cluster: Cluster, own: Partition, other: Partition, qos: dict[str, Qos] | None, job: JobFacts
) -> None:
    outlook = make_outlook(cluster, own, [own, other], qos, job)
    assert [case.event for case in outlook.cases] == EVENTS
    assert {case.starts for case in outlook.cases} <= set(STARTERS)
    assert {finding.severity for finding in outlook.findings} <= set(SEVERITIES)
    assert all(finding.fix for finding in outlook.findings if finding.severity != "ok")
    if not job.requeue:
        assert {case.starts for case in outlook.cases} <= {"nobody", "itself"}
    needs_watch = any(case.starts == "watch" for case in outlook.cases)
    warned = any(finding.about == "watch" and finding.severity == "warn" for finding in outlook.findings)
    assert warned is (needs_watch and not job.watched)
