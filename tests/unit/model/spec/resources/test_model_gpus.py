"""GPUs of a type, and all memory of a node: how a spec says so, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.model.spec.plan import Plan, make_plan
from slurmtrain.model.spec.spec import read_spec


def plan(**resources: Any) -> Plan:
    data = {"name": "x", "command": "python train.py", "resources": resources}
    spec = read_spec(data, lambda at, message: pytest.fail(f"{at}: {message}"))
    return make_plan(spec, workdir="/w", python="/usr/bin/python3", template=data)[0]


def mistakes(**resources: Any) -> list[str]:
    messages: list[str] = []
    data = {"command": "python train.py", "resources": resources}
    read_spec(data, lambda at, message: messages.append(f"{'.'.join(at)}: {message}"))
    return messages


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
    [mistake] = mistakes(gpus_per_node=gpus)
    assert mistake.startswith("resources.gpus_per_node: ")
    assert message in mistake
    assert mistakes(gpus_per_node=proposal) == []


def test_two_types_and_a_type_of_no_gpus_are_mistakes() -> None:
    assert mistakes(gpus_per_node="h100:4", gpu_type="a100") == [
        "resources.gpu_type: 'gpus_per_node' has another type, h100: leave this out"
    ]
    assert mistakes(gpu_type="a100") == [
        "resources.gpu_type: there are no GPUs: set 'gpus_per_node', such as '1', or leave it out"
    ]
    assert mistakes(gpus_per_node="h100:0")


@pytest.mark.parametrize("mem", [0, "0", "0GB", "0M"])
def test_no_memory_is_all_memory_of_a_node(mem: object) -> None:
    own = plan(mem=mem)
    assert own.spec.resources.mem == 0
    assert own.to_json()["spec"]["resources"]["mem"] == "0"
    assert Plan.from_json(own.to_json()).hash == own.hash != plan().hash


def test_more_than_all_memory_of_a_node_is_a_mistake() -> None:
    messages: list[str] = []
    data = {"command": "x", "resources": {"mem": 0}, "requeue": {"oom": {"at_most": "4GB"}}}
    read_spec(data, lambda _, message: messages.append(message))
    assert messages == ["'oom.at_most' lets it raise 'resources.mem', which is all memory of a node: leave it out"]
