"""The section `resources`: components, types of GPUs, and which CPUs ranks are bound to."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.specs import mistakes_in, only_mistake, read
from helpers.specs import plan as plan_of
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.resources import BINDINGS, Cpu, bind_ranks, write_cpus
from slurmtrain.model.experiment.spec import write_spec
from slurmtrain.model.experiment.values import Nodes

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
    ({"components": []}, "components", "the list is empty"),
    ({"components": [NODE]}, "components", "there is only one component"),
    ({"components": NODE}, "components", "expected a list of components"),
    ({"components": [{}, NODE]}, "components.0.nodes", "this key is required"),
    ({"components": [{"nodes": {"min": 1, "max": 2}}, NODE]}, "components.0.nodes", "expected a whole number"),
    ({"components": [{**NODE, "gpu_per_node": 1}, NODE]}, "components.0.gpu_per_node", "did you mean 'gpus_per_node'?"),
    ({"components": [{**NODE, "slurm": {"constrain": "a"}}, NODE]}, "components.0.slurm.constrain",
     "did you mean 'constraint'?"),
    ({"components": [{**NODE, "slurm": {"mail-type": "END"}}, NODE]}, "components.0.slurm.mail-type",
     "this option belongs to the whole job: write it under 'slurm'"),
    ({"nodes": 5, "components": TWO}, "nodes", "the components already determine the number of nodes, 3"),
    ({"spares": 1, "components": TWO}, "spares", "components have no spare nodes"),
    ({"grow": True, "components": TWO}, "grow", "a fixed number of nodes cannot grow"),
    ({"components": [{**NODE, "gpus_per_node": 2, "procs_per_node": 3}, NODE]}, "components",
     "component 0: 3 processes cannot share 2 GPUs evenly"),
    ({"components": [{**NODE, "mem": "1GB"}, NODE]}, "components", "component 1 has no 'mem', but another one has"),
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


def planned(**resources: Any) -> Plan:
    return plan_of(resources=resources)


def test_a_type_before_the_number_of_gpus_is_divided_from_it_and_the_ranks_follow_the_number() -> None:
    for resources in ({"gpus_per_node": "h100:4"}, {"gpus_per_node": 4, "gpu_type": "h100"}):
        own = planned(**resources)
        read_back = Plan.from_json(own.to_json())
        for spec in (own.spec, read_back.spec):
            assert (spec.resources.gpus_per_node, spec.resources.gpu_type) == (4, "h100")
            assert (spec.resources.local_world_size, spec.resources.gpu_option()) == (4, "h100:4")
    assert planned(gpus_per_node=4).spec.resources.gpu_option() == 4
    assert planned().spec.resources.gpu_option() is None


@pytest.mark.parametrize(
    ("gpus", "message", "proposal"),
    [
        ("gpu:h100:4", "write h100:4, not 'gpu:h100:4'", "h100:4"),
        ("h100", "has no number of GPUs: write h100:1", "h100:1"),
        ("4", "expected a whole number, found text ('4'); write 4", 4),
        ("h100:2,a100:2", "several types of GPUs", "h100:2"),
        ("h 100:2", "expected a whole number, or a type and a number such as h100:4", "h100:4"),
    ],
)  # fmt: skip
def test_another_way_to_write_gpus_is_a_mistake_whose_proposal_is_accepted(
    gpus: object, message: str, proposal: object
) -> None:
    at, mistake = only_mistake(resources={"gpus_per_node": gpus})
    assert at == "resources.gpus_per_node"
    assert message in mistake
    assert mistakes_in(resources={"gpus_per_node": proposal}) == []


def test_two_types_a_type_of_no_gpus_and_more_than_all_memory_are_mistakes() -> None:
    assert only_mistake(resources={"gpus_per_node": "h100:4", "gpu_type": "a100"}) == (
        "resources.gpus_per_node", "'gpu_type' contradicts h100: leave it out, or write 4",
    )  # fmt: skip
    assert only_mistake(resources={"gpu_type": "a100"}) == (
        "resources.gpu_type", "there are no GPUs: set 'gpus_per_node', such as '1', or leave it out",
    )  # fmt: skip
    assert mistakes_in(resources={"gpus_per_node": "h100:0"})
    assert only_mistake(resources={"mem": 0}, requeue={"oom": {"at_most": "4GB"}}) == (
        "requeue", "'oom.at_most' raises 'resources.mem', which is all memory of a node already: leave it out",
    )  # fmt: skip


# Two packages, each with a NUMA node of four cores with two threads: 0-7 are the first threads, 8-15 the second.
MACHINE = {cpu: Cpu(node=cpu % 8 // 4, package=cpu % 8 // 4, core=cpu % 4) for cpu in range(16)}
FIRST, SECOND = range(0, 4), range(4, 8)


def bound(bind: str, ranks: int, near: list[set[int]] | None = None, cpus: dict[int, Cpu] = MACHINE) -> list[str]:
    return [write_cpus(each) for each in bind_ranks(bind, cpus, ranks, near or [])]


@pytest.mark.parametrize(
    ("bind", "ranks", "expected"),
    [
        ("cores", 2, ["0-3,8-11", "4-7,12-15"]),
        ("cores", 4, ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
        ("cores", 16, [f"{core},{core + 8}" for core in range(8) for _ in range(2)]),
        ("numa", 1, ["0-15"]),
        ("numa", 2, ["0-3,8-11", "4-7,12-15"]),
        ("numa", 4, ["0-3,8-11"] * 2 + ["4-7,12-15"] * 2),
    ],
)  # fmt: skip
def test_ranks_get_equal_shares_whose_cores_are_whole(bind: str, ranks: int, expected: list[str]) -> None:
    assert bound(bind, ranks) == expected


def test_ranks_near_the_same_gpus_divide_the_cpus_near_them() -> None:
    near = [set(SECOND) | {12, 13, 14, 15}] * 2 + [set(FIRST)] * 2
    assert bound("gpu", 4, near) == ["4-5,12-13", "6-7,14-15", "0-1", "2-3"]
    # Nothing is known of the GPU, or the job has none of the CPUs near it.
    assert bound("gpu", 2, [set(), {99}]) == ["0-3,8-11", "4-7,12-15"]


@given(st.sampled_from(BINDINGS), st.integers(1, 40), st.sets(st.integers(0, 15), min_size=1), st.data())
def test_each_rank_has_cpus_and_only_those_of_the_agent(
    bind: str, ranks: int, allowed: set[int], data: st.DataObject
) -> None:
    near = [data.draw(st.sets(st.integers(0, 20))) for _ in range(ranks)]
    parts = bind_ranks(bind, {cpu: MACHINE[cpu] for cpu in allowed}, ranks, near)
    assert len(parts) == ranks
    assert all(part and part <= allowed for part in parts)
