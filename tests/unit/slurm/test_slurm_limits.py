"""Requests that no partition could ever satisfy are told before anything is created; those that one may are not.

And nodes that a request can do without are left out, but never so many that it could not be met.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from helpers.specs import plan
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.slurm.parse import NodeInfo, read_partitions
from slurmtrain.slurm.site import NodeChoice, choose_nodes, grace_s, partition_names, rejection_reason

PARTITIONS = read_partitions(
    "PartitionName=spot Default=YES MaxNodes=UNLIMITED MaxTime=04:00:00 TotalNodes=4 TRES=cpu=32,node=4,gres/gpu=8\n"
    "PartitionName=long Default=NO MaxNodes=2 MaxTime=7-00:00:00 TotalNodes=4 TRES=cpu=32,node=4\n"
    "PartitionName=free Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED TotalNodes=64 TRES=cpu=512,node=64\n"
)


TOO_LONG = "resources.time: partition spot lets a job run for 04:00:00 at most"
TOO_MANY = "resources.nodes: partition long gives a job 2 nodes at most, not 3"


@pytest.mark.parametrize(
    ("slurm", "resources", "reason"),
    [
        ({}, {}, None),
        ({}, {"nodes": 4, "gpus_per_node": 2, "time": "04:00:00"}, None),
        ({}, {"nodes": 1, "gpus_per_node": 8}, None),
        ({}, {"nodes": 5}, "resources.nodes: partition spot gives a job 4 nodes at most, not 5"),
        ({}, {"nodes": 3, "gpus_per_node": 3}, "resources.gpus_per_node: partition spot has 8 GPUs, not 9"),
        ({}, {"time": "04:00:01"}, TOO_LONG),
        # A QOS may allow more time. A partition may give a job fewer nodes than it has, or count no GPUs.
        ({"qos": "long"}, {"time": "1-0"}, None),
        ({"partition": "long"}, {"nodes": 2}, None),
        ({"partition": "long"}, {"nodes": 3}, TOO_MANY),
        ({"partition": "long"}, {"gpus_per_node": 8}, None),
        ({"partition": "free"}, {"nodes": 64, "time": "30-0"}, None),
        # One of several partitions is enough.
        ({"partition": "spot, long"}, {"time": "1-0"}, None),
        ({"partition": "spot,long"}, {"nodes": 3, "time": "1-0"}, f"{TOO_LONG}; {TOO_MANY}"),
    ],
)
def test_what_a_partition_can_never_run_is_rejected_with_a_reason(
    slurm: dict[str, Any], resources: dict[str, Any], reason: str | None
) -> None:
    assert rejection_reason(plan(slurm=slurm, resources=resources), PARTITIONS) == reason


def test_an_unknown_partition_is_rejected_with_a_suggestion() -> None:
    reason = rejection_reason(plan(slurm={"partition": "spto"}), PARTITIONS)
    assert reason is not None
    assert reason.startswith("slurm.partition: there is no partition 'spto'")
    assert "'spot'" in reason
    assert reason.endswith("there are free, long, spot")


@pytest.mark.parametrize("partitions", [{}, {"p": {"PartitionName": "p"}}, {"p": {"Default": "YES"}}])
def test_where_nothing_is_known_of_the_default_partition_anything_may_be_possible(
    partitions: dict[str, dict[str, str]],
) -> None:
    huge = plan(resources={"nodes": 1000, "gpus_per_node": 8, "time": "300-0"})
    assert rejection_reason(huge, partitions) is None


# --- nodes to leave out -------------------------------------------------------------------------------------------

NODES = [
    *(NodeInfo(name=f"n{i}", partition="spot", cpus=8, memory=16000, gpus=2) for i in range(4)),
    *(NodeInfo(name=f"n{i}", partition="long", cpus=8, memory=16000, features=frozenset({"ib"})) for i in (2, 3, 4)),
]


def choose(
    *unwanted: str, slurm: dict[str, Any] | None = None, among: Sequence[NodeInfo] = NODES, **resources: Any
) -> NodeChoice:
    return choose_nodes(plan(slurm=slurm or {}, resources=resources), PARTITIONS, among, unwanted)


def test_the_least_wanted_node_is_left_out_first_and_the_rest_only_as_long_as_enough_are_left() -> None:
    assert choose("n1", "n3") == NodeChoice(["n1", "n3"], {})
    left = {"n1": "2 nodes are needed and 1 would be left"}
    assert choose("n3", "n0", "n1", nodes=2) == NodeChoice(["n3", "n0"], left)
    # The last node is used. A partition of several must have enough nodes left.
    assert choose("n0", among=NODES[:1]) == NodeChoice([], {"n0": "1 node is needed and none would be left"})
    assert choose("n4", "n3", "n0", slurm={"partition": "spot,long"}, nodes=3).excluded == ["n4", "n3"]


@pytest.mark.parametrize(
    ("keys", "resources"),
    [({}, {"gpus_per_node": 2}), ({}, {"gpus_per_node": "h100:1"}), ({}, {"mem": "10GB"}), ({}, {"cpus_per_proc": 8}),
     ({"constraint": "fast"}, {}), ({"constraint": "fast&big"}, {}), ({"constraint": "fast|huge"}, {})],
)  # fmt: skip
def test_only_nodes_that_fit_are_counted(keys: dict[str, Any], resources: dict[str, Any]) -> None:
    small = NodeInfo(name="n1", partition="spot", cpus=4, memory=1000, gpus=1)
    rest: dict[str, Any] = {"gpus": 2, "gpus_of_types": {"h100": 2}, "features": frozenset({"fast", "big"})}
    big = NodeInfo(name="n0", partition="spot", cpus=8, memory=16000, **rest)
    choice = choose("n0", slurm=keys, among=[small, big], **resources)
    assert choice.needed == {"n0": "1 node is needed and none would be left"}


def test_nodes_of_other_partitions_are_passed_over_and_unusable_ones_left_out() -> None:
    assert choose("n4", "stranger") == NodeChoice([], {})
    assert choose("n4", slurm={"partition": "long"}).excluded == ["n4"]
    nodes = [NODES[0], NodeInfo(name="n1", partition="spot", state="drained")]
    assert [choose(name, among=nodes).excluded for name in ("n1", "n0")] == [["n1"], []]
    assert partition_names(plan(slurm={"partition": "spot, long"}), PARTITIONS) == "long,spot"


def test_what_the_user_asks_for_and_excludes_counts() -> None:
    assert choose("n1", slurm={"exclude": "n[0-1]"}).excluded == []
    left = {"n2": "2 nodes are needed and 1 would be left"}
    assert choose("n2", slurm={"exclude": "n[0,1]"}, nodes=2).needed == left
    assert choose("n1", slurm={"nodelist": "n[1-2]"}).needed == {"n1": "slurm.nodelist names it"}
    # A list that is none is left to sbatch.
    assert choose("n1", slurm={"exclude": "n[1"}).excluded == []


@pytest.mark.parametrize(
    ("keys", "why", "decidable"),
    [
        ({"reservation": "maint"}, "only Slurm knows the nodes of slurm.reservation", False),
        ({"nodefile": "/nodes"}, "only Slurm knows the nodes of slurm.nodefile", False),
        ({"nodelist": "/nodes"}, "slurm.nodelist is a file", False),
        ({"constraint": "[a*2&b]"}, "only Slurm knows the nodes of slurm.constraint", False),
        ({"constraint": "a,b"}, "only Slurm knows the nodes of slurm.constraint", False),
        ({"exclude": "/nodes"}, "slurm.exclude is a file", True),
    ],
)
def test_what_cannot_be_weighed_keeps_all_nodes(keys: dict[str, Any], why: str, decidable: bool) -> None:
    assert choose("n1", slurm=keys) == NodeChoice([], {"n1": why}, decidable)


@given(st.lists(st.sampled_from([f"n{i}" for i in range(6)])), st.integers(1, 4), st.sets(st.sampled_from("0123")))
def test_whatever_is_left_out_the_request_can_be_met_if_it_could(
    unwanted: list[str], needed: int, down: set[str]
) -> None:
    nodes = [NodeInfo(name=f"n{i}", partition="spot", state="down" if str(i) in down else "idle") for i in range(4)]
    choice = choose(*unwanted, among=nodes, nodes=needed)
    usable = {node.name for node in nodes if node.usable}
    assert len(usable - set(choice.excluded)) >= min(needed, len(usable))
    assert {*choice.excluded, *choice.needed} == set(unwanted) & {node.name for node in nodes}


# --- the grace of a preemption --------------------------------------------------------------------------------------

PREEMPTED = read_partitions(
    "PartitionName=spot Default=YES GraceTime=60 PreemptMode=REQUEUE\n"
    "PartitionName=tight Default=NO GraceTime=5 PreemptMode=CANCEL\n"
    "PartitionName=none Default=NO GraceTime=0 PreemptMode=REQUEUE\n"
    "PartitionName=paid Default=NO GraceTime=30 PreemptMode=OFF\n"
    "PartitionName=gang Default=NO GraceTime=30 PreemptMode=GANG,SUSPEND\n"
    "PartitionName=bare Default=NO PreemptMode=REQUEUE\n"
)


@pytest.mark.parametrize(
    ("slurm", "seconds"),
    [
        ({}, 60.0), ({"partition": "tight"}, 5.0), ({"partition": "none"}, 0.0), ({"partition": "spot,tight"}, 5.0),
        ({"partition": "paid,spot"}, 60.0), ({"partition": "paid"}, None), ({"partition": "gang"}, None),
        ({"partition": "bare"}, None), ({"partition": "unheard-of"}, None), ({"partition": "spot", "qos": "low"}, None),
    ],
)  # fmt: skip
def test_a_job_that_is_preempted_goes_on_for_the_shortest_grace_of_its_partitions(
    slurm: dict[str, Any], seconds: float | None
) -> None:
    assert grace_s(plan(slurm=slurm), PREEMPTED) == seconds
