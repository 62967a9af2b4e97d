"""GPUs of a type, and all memory of a node: how a spec says so, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.specs import mistakes_in, only_mistake
from helpers.specs import plan as plan_of

from slurmtrain.model.spec.plan import Plan


def plan(**resources: Any) -> Plan:
    return plan_of(resources=resources)


def test_a_type_before_the_number_of_gpus_is_divided_from_it_and_the_ranks_follow_the_number() -> None:
    for resources in ({"gpus_per_node": "h100:4"}, {"gpus_per_node": 4, "gpu_type": "h100"}):
        own = plan(**resources)
        read_back = Plan.from_json(own.to_json())
        for spec in (own.spec, read_back.spec):
            assert (spec.resources.gpus_per_node, spec.resources.gpu_type) == (4, "h100")
            assert (spec.resources.local_world_size, spec.resources.gpu_option()) == (4, "h100:4")
    assert plan(gpus_per_node=4).spec.resources.gpu_option() == 4
    assert plan().spec.resources.gpu_option() is None


def test_without_a_type_a_spec_has_the_hash_that_it_had_before_there_were_types() -> None:
    own = plan(nodes=3, components=[{"nodes": 1, "gpus_per_node": 2}, {"nodes": 2}])
    content = own.to_json()["spec"]["resources"]
    assert content.pop("gpu_type") is None
    assert all("gpu_type" not in component for component in content["components"])
    assert own.hash != plan(nodes=3, components=[{"nodes": 1, "gpus_per_node": "a:2"}, {"nodes": 2}]).hash
    assert plan(gpus_per_node=4).hash != plan(gpus_per_node="h100:4").hash


def test_a_component_has_the_type_of_all_unless_it_has_gpus_of_its_own() -> None:
    components = [{"nodes": 1}, {"nodes": 1, "gpus_per_node": 2}, {"nodes": 1, "gpus_per_node": "a100:8"}]
    resources = plan(gpus_per_node="h100:4", components=components).spec.resources
    assert [own.gpu_option() for _, own in resources.by_component()] == ["h100:4", 2, "a100:8"]
    assert [resources.of_node(node).local_world_size for node in range(3)] == [4, 2, 8]


@pytest.mark.parametrize(
    ("gpus", "message", "proposal"),
    [
        ("gpu:h100:4", "write h100:4, not 'gpu:h100:4'", "h100:4"),
        ("h100", "has no number of GPUs: write h100:1", "h100:1"),
        ("4", "expected a whole number, found text ('4'); write 4", 4),
        ("h100:2,a100:2", "several types of GPUs", "h100:2"),
        ("h 100:2", "expected a whole number, or a type and a number such as h100:4", "h100:4"),
        ("h100:", "expected a whole number, or a type and a number such as h100:4", "h100:4"),
    ],
)
def test_another_way_to_write_gpus_is_a_mistake_whose_proposal_is_accepted(
    gpus: object, message: str, proposal: object
) -> None:
    at, mistake = only_mistake(resources={"gpus_per_node": gpus})
    assert at == "resources.gpus_per_node"
    assert message in mistake
    assert mistakes_in(resources={"gpus_per_node": proposal}) == []


def test_two_types_a_type_of_no_gpus_and_more_than_all_memory_are_mistakes() -> None:
    assert only_mistake(resources={"gpus_per_node": "h100:4", "gpu_type": "a100"}) == (
        "resources.gpus_per_node", "'gpu_type' is another type than h100: leave it out, or write 4",
    )  # fmt: skip
    assert only_mistake(resources={"gpu_type": "a100"}) == (
        "resources.gpu_type", "there are no GPUs: set 'gpus_per_node', such as '1', or leave it out",
    )  # fmt: skip
    assert mistakes_in(resources={"gpus_per_node": "h100:0"})
    assert only_mistake(resources={"mem": 0}, requeue={"oom": {"at_most": "4GB"}}) == (
        "requeue", "'oom.at_most' lets it raise 'resources.mem', which is all memory of a node: leave it out",
    )  # fmt: skip


@pytest.mark.parametrize("mem", [0, "0", "0GB", "0M"])
def test_no_memory_is_all_memory_of_a_node(mem: object) -> None:
    own = plan(mem=mem)
    assert own.spec.resources.mem == 0
    assert own.to_json()["spec"]["resources"]["mem"] == "0"
    assert Plan.from_json(own.to_json()).hash == own.hash != plan().hash
