"""Which ranks are connected, and what is said of those that are not."""

from __future__ import annotations

import pytest

from slurmtrain.model.diagnosis.rank_groups import describe_apart, describe_fewer, groups_of

SERVER = ("10:1", "99:443")


@pytest.mark.parametrize(
    ("connections", "groups"),
    [
        ({0: [("a:1", "b:2")], 1: [("b:2", "a:1")]}, [[0, 1]]),
        ({0: [], 1: []}, [[0], [1]]),
        # All are connected to the same server, which connects nobody.
        ({0: [SERVER], 1: [("10:2", "99:443")]}, [[0], [1]]),
        # A ring, and one beside it.
        (
            {0: [("a:1", "b:1")], 1: [("b:1", "a:1"), ("b:2", "c:1")], 2: [("c:1", "b:2")], 3: [("d:1", "x:1")]},
            [[0, 1, 2], [3]],
        ),
        ({1: [("b:1", "d:1")], 3: [("d:1", "b:1")], 0: [("a:1", "c:1")], 2: [("c:1", "a:1")]}, [[0, 2], [1, 3]]),
    ],
)
def test_ranks_with_both_ends_of_a_connection_are_a_group(
    connections: dict[int, list[tuple[str, str]]], groups: list[list[int]]
) -> None:
    assert groups_of(connections) == groups


def test_groups_are_named_and_not_all_of_very_many() -> None:
    assert describe_apart([[0], [1]], per_node=False).startswith(
        "ranks 0 and 1 have no connection to each other: the same training runs 2 times, each for itself; the script"
    )
    assert describe_apart([[0, 1], [2, 3]], per_node=True).startswith("nodes 0 and 1, and nodes 2 and 3 have no")
    many = describe_apart([[rank] for rank in range(100)], per_node=False)
    assert many.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more have no connection")


def test_a_launcher_that_has_started_too_few_is_told_what_it_needs() -> None:
    assert describe_fewer("accelerate launch", 0, 2) == (
        "accelerate launch has started none of the 2 ranks, but a process on each node; it needs --multi_gpu, also on "
        "CPUs, or a configuration file, and not --cpu"
    )
    assert describe_fewer("torchrun", 2, 4).startswith("torchrun has started 2 of the 4 ranks; leave out")
