"""Which network the nodes of a real cluster train over: names that differ, a decoy, a slow network and a fast one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.cluster import NODES, Cluster, ClusterSite
from helpers.rare import THOROUGH
from helpers.site import until

FAST = ["hsn0", "hsn0", "hsn0", "ib0"]
# A 4 MB gradient a step: more than everything else that goes over a wire.
HEAVY = {"steps": 15, "width": 1000}


def trained(site: ClusterSite, nodes: int, *overrides: str, **keys: Any) -> dict[str, Any]:
    """A run with much traffic, from its submission to its end."""
    return ended(site, site.spec("heavy", script="heavy.py", params=HEAVY, resources=on(nodes), **keys), *overrides)


def elected(site: ClusterSite, nodes: int, *overrides: str, **keys: Any) -> dict[str, Any]:
    """A run whose nodes choose a network, and whose ranks do nothing over it."""
    return ended(site, site.spec("elected", command="true", resources=on(nodes), **keys), *overrides)


def on(nodes: int) -> dict[str, Any]:
    return {"nodes": nodes, "procs_per_node": 1, "time": "00:10:00"}


def ended(site: ClusterSite, spec: Path, *overrides: str) -> dict[str, Any]:
    run_id = site.submit(spec, *overrides)
    site.call("wait", run_id, code=None)
    return site.show(run_id)


def grown(cluster: Cluster, before: list[dict[str, int]]) -> list[dict[str, int]]:
    """Bytes that each node has sent since, by interface."""
    after = [cluster.sent(node) for node in range(NODES)]
    return [{name: now[name] - then[name] for name in now} for now, then in zip(after, before, strict=True)]


# Four nodes, of which one calls its fast interface differently, prove what two do, and more.
@pytest.mark.parametrize("nodes", [2, 4] if THOROUGH else [4])
def test_training_goes_over_the_fast_network_though_nothing_can_be_looked_up(
    site: ClusterSite, cluster: Cluster, nodes: int
) -> None:
    before = [cluster.sent(node) for node in range(NODES)]
    with cluster.no_names():
        # The last nodes: one of them calls its fast interface differently.
        hosts = ",".join(f"node{i}" for i in range(NODES - nodes, NODES))
        run = trained(site, nodes, slurm={"nodelist": hosts}, preflight={"dns": "off"})
    assert run["state"] == "completed", run["reason"]
    [attempt] = run["attempts"]
    assert attempt["master_addr"].startswith("10.58.")
    assert attempt["interfaces"] == {f"node{i}": FAST[i] for i in range(NODES - nodes, NODES)}
    sent = grown(cluster, before)
    for node in range(NODES - nodes, NODES):
        fast, slow = sent[node][FAST[node]], sent[node]["eno1"]
        assert fast > HEAVY["steps"] * 4 * HEAVY["width"] ** 2 / 2
        assert fast > 10 * slow, f"node{node} sent {fast} bytes over the fast network, {slow} over the slow one"
        assert sent[node]["docker0"] < 10_000


def test_a_network_that_is_blocked_on_one_node_is_not_used_and_show_says_why(
    site: ClusterSite, cluster: Cluster
) -> None:
    with cluster.broken_network(1, "hsn0"):
        run = trained(site, 3, slurm={"nodelist": "node[0-2]"})
    assert run["state"] == "completed", run["reason"]
    [attempt] = run["attempts"]
    assert attempt["master_addr"].startswith("10.57.")
    assert set(attempt["interfaces"].values()) == {"eno1"}
    findings = {host: next(c for c in checks if c["check"] == "network") for host, checks in attempt["checks"].items()}
    assert {host: finding["status"] for host, finding in findings.items()} == {
        "node0": "pass", "node1": "warn", "node2": "pass"
    }  # fmt: skip
    assert "would be faster, but apart from node0, node2" in findings["node1"]["summary"]
    assert "would be faster" in site.call("show", run["id"]).stdout


def test_a_pinned_interface_that_one_node_lacks_is_named_with_that_node(site: ClusterSite) -> None:
    run = elected(site, 2, "network.interface=hsn0", "preflight.exclude=false", slurm={"nodelist": "node2,node3"})
    assert (run["state"], run["attempts"][0]["cause"]) == ("failed", "preflight")
    assert "node3: network: hsn0 (network.interface) does not exist" in run["reason"]
    assert "it has eno1, ib0" in run["reason"]


def test_training_goes_over_ipv6_where_there_is_nothing_else(site: ClusterSite, cluster: Cluster) -> None:
    addresses = {
        node: cluster.inside(node, "ip", "-4", "-br", "addr", "show", FAST[node]).split()[2] for node in (0, 1)
    }
    try:
        for node in addresses:
            cluster.inside(node, "ip", "addr", "flush", "dev", "hsn0", "scope", "global")
            cluster.inside(node, "ip", "addr", "add", f"fd58::{node + 1}/64", "dev", "hsn0", "nodad")
        run = trained(site, 2, "network.interface=hsn0", slurm={"nodelist": "node0,node1"})
    finally:
        for node, address in addresses.items():
            cluster.inside(node, "ip", "addr", "flush", "dev", "hsn0", "scope", "global")
            cluster.inside(node, "ip", "addr", "add", address, "dev", "hsn0")
    assert run["state"] == "completed", run["reason"]
    assert run["attempts"][0]["master_addr"] == "fd58::1"


def test_a_node_that_dies_during_the_preflight_ends_the_attempt_at_once(site: ClusterSite, cluster: Cluster) -> None:
    # The node is known beforehand: asking for it would take as long as the preflight does.
    run_id = site.submit(site.steady(resources=on(2), slurm={"nodelist": "node0,node1"}))
    journals = site.runs / run_id / "attempts"
    journal = until(lambda: next(iter(journals.glob("*/node-1.jsonl")), None), "node 1's agent")
    until(lambda: journal.read_text().endswith("\n"), "its first word")
    cluster.kill_all_of(site.person.uid, 1)
    run = site.until_state(run_id, "failed", "lost", "requeued")
    assert run["state"] == "requeued", run["reason"]
    assert not list(journals.glob("*/logs/rank-*.log"))


@pytest.fixture(scope="module")
def measured(shared_site: ClusterSite) -> dict[str, Any]:
    """A run that measures its network first, and whose nodes do not hear of each other through their environment."""
    spec = shared_site.light(
        params={"steps": 2},
        resources=on(2),
        preflight={"bandwidth": {"level": "warn", "size_mb": 8}},
        # What the batch script would export is lost: bash lets a function stand in for a builtin.
        setup=["eval() { :; }"],
    )
    return shared_site.show(shared_site.submit(spec, "--wait", code=None))


@pytest.mark.usefixtures("cluster")
def test_an_all_reduce_over_the_elected_network_is_measured_where_it_is_asked_for(measured: dict[str, Any]) -> None:
    assert measured["state"] == "completed", measured["reason"]
    for checks in measured["attempts"][0]["checks"].values():
        [bandwidth] = [finding for finding in checks if finding["check"] == "bandwidth"]
        assert bandwidth["status"] == "pass"
        assert "GB/s of bus bandwidth" in bandwidth["summary"]


@pytest.mark.usefixtures("cluster")
def test_the_nodes_find_each_other_by_a_file_where_the_batch_scripts_variables_do_not_reach_them(
    shared_site: ClusterSite, measured: dict[str, Any]
) -> None:
    assert measured["state"] == "completed", measured["reason"]
    [hand_over] = (shared_site.runs / measured["id"]).glob("attempts/*/rendezvous.json")
    assert hand_over.stat().st_mode & 0o077 == 0
