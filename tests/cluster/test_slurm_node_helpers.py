"""What nodes run before, beside and after their ranks, on a real cluster."""

from __future__ import annotations

from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import SPOT, events, preempt
from helpers.node_helpers import check_logs, check_stopped_setup, check_torn_down, sidecars, submit
from helpers.site import until


def test_a_preempted_run_is_torn_down_on_each_node_before_it_is_requeued(site: ClusterSite, cluster: Cluster) -> None:
    command = "bash -c '[ {attempt} = 2 ] || sleep 600'"
    run_id = submit(site, "slurm", command, slurm=SPOT)
    until(lambda: len(sidecars(site)) == 2, "the sidecars")
    site.until_state(run_id, "running")
    preempt(cluster, lambda: events(site, run_id, "requeue"))
    site.until_state(run_id, "completed", patience_s=240)
    for attempt in (1, 2):
        check_logs(site, run_id, attempt)
    assert [attempt["cause"] for attempt in site.show(run_id)["attempts"]] == ["preempted", "completed"]


def test_what_was_staged_is_cleaned_up_whatever_fails_before_there_are_ranks(site: ClusterSite) -> None:
    check_torn_down(site, "slurm")


def test_a_run_that_is_cancelled_during_its_setup_is_torn_down(site: ClusterSite) -> None:
    check_stopped_setup(site, "slurm")
