"""The components of a heterogeneous job in a spec."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.specs import mistakes_in, read
from helpers.specs import plan as plan_of
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.query.tally import mean_gpus
from slurmtrain.model.spec.launcher import NodeRanks
from slurmtrain.model.spec.plan import Plan
from slurmtrain.model.spec.spec import write_spec
from slurmtrain.model.spec.sweep import cost_of
from slurmtrain.model.spec.values import Nodes

TWO = [{"nodes": 2, "gpus_per_node": 4}, {"nodes": 1, "gpus_per_node": 8, "procs_per_node": 8}]


def wrong(resources: dict[str, Any], **more: Any) -> dict[str, str]:
    """The mistakes in a spec with these resources, by key."""
    return dict(mistakes_in(resources=resources, **more))


def plan(resources: dict[str, Any], **more: Any) -> Plan:
    return plan_of(resources=resources, **more)


def test_nodes_are_counted_component_by_component_with_what_each_has() -> None:
    resources = plan({"procs_per_node": 4, "cpus_per_proc": 2, "components": TWO}).spec.resources
    assert resources.nodes == Nodes(3, 3)
    assert [resources.of_node(node).gpus_per_node for node in range(3)] == [4, 4, 8]
    assert [resources.of_node(node).cpus_per_node for node in range(3)] == [8, 8, 16]
    assert (resources.most_ranks.counts, resources.most_gpus) == ((4, 4, 8), 16)
    assert [resources.nodes_of(16), resources.allocated.max] == [3, 3]
    # A component has one process per GPU of its own. The GPUs of a job are those of all its nodes.
    components = [{"nodes": 1, "gpus_per_node": 2}, {"nodes": 1, "gpus_per_node": 3}]
    assert plan({"components": components}).spec.resources.most_ranks.counts == (2, 3)
    assert plan({"nodes": {"min": 1, "max": 3}, "spares": 2, "gpus_per_node": 4}).spec.resources.most_gpus == 20


def test_what_a_plan_says_of_components_is_read_back_and_what_it_leaves_out_keeps_its_hash() -> None:
    made = plan({"procs_per_node": 4, "components": TWO})
    assert read(write_spec(made.spec)) == (made.spec, [])
    assert made.content["resources"]["components"][1]["procs_per_node"] == 8
    without = plan({"nodes": 3})
    assert without.content["resources"]["components"] is None


def test_the_plan_of_a_node_has_its_resources_and_the_hash_of_the_run() -> None:
    made = plan({"procs_per_node": 4, "components": TWO})
    own = made.for_node(2)
    assert (own.spec.resources.local_world_size, own.spec.resources.gpus_per_node) == (8, 8)
    assert own.spec.resources.most_ranks == made.spec.resources.most_ranks
    assert (own.hash, own.content) == (made.hash, made.content)
    alike = plan({"nodes": 2})
    assert alike.for_node(1) is alike


def test_each_component_requests_its_own_nodes_with_the_options_of_the_job_and_its_own() -> None:
    components = [{"nodes": 2, "slurm": {"partition": "a100"}}, {"nodes": 1, "slurm": {"exclusive": False}}]
    options = {"partition": "rtx", "exclusive": True, "account": "team", "srun": ["--quiet"]}
    parts = plan({"components": components}, slurm=options).spec.components
    assert [part.resources.nodes for part in parts] == [Nodes(2, 2), Nodes(1, 1)]
    assert [part.slurm["partition"] for part in parts] == ["a100", "rtx"]
    assert [part.slurm["srun"] for part in parts] == [("--quiet",)] * 2
    assert "exclusive" in parts[0].slurm


NODE: dict[str, Any] = {"nodes": 1}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"components": []}, "components", "there are no components"),
    ({"components": [NODE]}, "components", "there is only one component"),
    ({"components": NODE}, "components", "expected a list of components"),
    ({"components": [{}, NODE]}, "components.0.nodes", "this key is required"),
    ({"components": [{"nodes": {"min": 1, "max": 2}}, NODE]}, "components.0.nodes", "expected a whole number"),
    ({"components": [{**NODE, "gpu_per_node": 1}, NODE]}, "components.0.gpu_per_node", "did you mean 'gpus_per_node'?"),
    ({"components": [{**NODE, "slurm": {"constrain": "a"}}, NODE]}, "components.0.slurm.constrain",
     "did you mean 'constraint'?"),
    ({"components": [{**NODE, "slurm": {"mail-type": "END"}}, NODE]}, "components.0.slurm.mail-type",
     "it is one of the whole job: write it under 'slurm'"),
    ({"nodes": 5, "components": TWO}, "nodes", "components say how many nodes there are, 3"),
    ({"spares": 1, "components": TWO}, "spares", "components have no spare nodes"),
    ({"grow": True, "components": TWO}, "grow", "it has nothing to grow to"),
    ({"components": [{**NODE, "gpus_per_node": 2, "procs_per_node": 3}, NODE]}, "components",
     "component 0: 3 processes cannot share 2 GPUs evenly"),
    ({"components": [{**NODE, "mem": "1GB"}, NODE]}, "components", "component 1 has no 'mem', and another one has"),
    # More nodes than any cluster has.
    ({"nodes": 10**400}, "nodes", "expected at most 1000000"),
    ({"nodes": {"min": 1, "max": 1_000_001}}, "nodes", "expected at most 1000000"),
]  # fmt: skip


@pytest.mark.parametrize(("resources", "key", "message"), BAD)
def test_mistakes_in_components_are_reported_at_their_keys(resources: dict[str, Any], key: str, message: str) -> None:
    assert message in wrong(resources)[f"resources.{key}"]


def test_strategies_and_policies_that_need_equal_nodes_are_refused() -> None:
    unequal = {"components": [{"nodes": 1, "procs_per_node": 1}, {"nodes": 1, "procs_per_node": 2}]}
    assert "different numbers of processes" in wrong(unequal, strategy="hsdp")["strategy"]
    equal = {"procs_per_node": 2, "components": [{"nodes": 1}, {"nodes": 1}]}
    assert wrong(equal, strategy="hsdp") == {}
    assert "'mesh': " in wrong(unequal, strategy={"name": "fsdp", "mesh": {"dp": 2, "tp": 2}})["strategy"]
    hierarchical = {"name": "ddp", "hook": "hierarchical"}
    assert "the same number of processes on each node" in wrong(unequal, strategy=hierarchical)["strategy"]
    oom = {"mem": "1GB", "components": [{"nodes": 1}, {"nodes": 1}]}
    assert "each component has its own" in wrong(oom, requeue={"oom": {"at_most": "4GB"}})["requeue"]
    assert "expected a whole number" in wrong({"nodes": "two"}, strategy="hsdp")["resources.nodes"]


def test_costs_and_sums_count_the_gpus_of_each_node() -> None:
    made = plan({"time": "01:00:00", "components": TWO})
    cost = cost_of([made.spec.resources])
    assert (cost.node_hours, cost.gpu_hours) == (3, 16)
    # All nodes run for the same time: what a sum weights with the mean is what all have.
    assert 3 * mean_gpus(made.content["resources"]) == 16


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_ranks_are_counted_node_by_node(counts: list[int]) -> None:
    ranks = NodeRanks(tuple(counts))
    placed = [rank for place in range(len(counts)) for rank in ranks.ranks_of(place)]
    assert placed == list(range(ranks.world_size))
    assert all(ranks.place_of(rank) == place for place in range(len(counts)) for rank in ranks.ranks_of(place))
    assert ranks.are_equal == (len(set(counts)) == 1)
