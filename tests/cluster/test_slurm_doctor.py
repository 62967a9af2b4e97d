"""What ``doctor`` says of a real site, and of a run that failed there."""

from __future__ import annotations

from helpers.cluster import GRACE_S, ClusterSite


def test_a_real_site_is_read_by_an_ordinary_user(site: ClusterSite) -> None:
    report = site.json("doctor")
    assert report["unknown"] == []
    cases = {one["partition"]: {case["event"]: case for case in one["cases"]} for one in report["partitions"]}
    assert set(cases) == {"spot", "spot-cancel", "ondemand"}
    for name, starts, seconds in (
        ("spot", "agent", GRACE_S),
        ("spot-cancel", "agent", GRACE_S),
        ("ondemand", "nobody", None),
    ):
        preempted = cases[name]["preemption"]
        assert (preempted["starts"], preempted["seconds"]) == (starts, seconds), name
    assert cases["spot"]["preemption"]["delay_s"] == 6
    spec = site.light(slurm={"partition": "spot-cancel"})
    assert "partition spot-cancel\n" in site.call("doctor", str(spec)).stdout
    refused = site.call("doctor", str(spec), "slurm.partition=sopt", code=1)
    assert "fail it cannot run on any partition: slurm.partition: there is no partition 'sopt'" in refused.stdout


def test_a_run_that_failed_on_a_node_is_explained(site: ClusterSite) -> None:
    spec = site.commanding(
        "sh -c 'echo torch.OutOfMemoryError: CUDA out of memory; exit 1'", requeue={"enabled": False}
    )
    run_id = site.submit(spec, "--wait", code=1)
    report = site.json("doctor", run_id)
    root = report["root"]
    assert (root["name"], root["rank"], root["at_by"]) == ("cuda-oom", 0, "exit")
    assert root["host"] == site.show(run_id)["attempts"][0]["nodes"][0]
    assert report["logs"]["problems"] == []
    assert "root: GPU memory is full" in site.call("doctor", run_id).stdout
