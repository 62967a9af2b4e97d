"""Which ranks of a run train together: ranks without a connection, or without exchange of gradients, train apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

# The ends of a TCP connection, this one's first.
Ends = tuple[str, str]
# How many numbers of a group are listed.
_SHOWN = 8
# From this distance on, ranks have learned different things. Unrelated changes are more than 1 from each other.
_UNRELATED = 0.3
WRAP = (
    "wrap the model, model = run.parallelize(model) or DistributedDataParallel(model), and start the run again with "
    "'slurmtrain resume --from-start'"
)
"""What to do about ranks that train models of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What ranks that have trained for a while have received from each other.

    ``is_comparable``: all ranks have the same parameters whole, and have changed them. ``has_exchanged``: a rank has
    started a collective meanwhile. ``distance``: the greatest distance between the changes of a rank's and of rank 0's
    weights, as a fraction of the greater change.
    """

    is_comparable: bool
    has_exchanged: bool
    distance: float


def groups_of(connections: Mapping[int, Collection[Ends]]) -> list[list[int]]:
    """The groups of ranks that are connected, directly or by way of others, in the order of their first ranks.

    Args:
        connections: of the processes of each rank, each with its own end first.
    """
    group = {rank: rank for rank in connections}

    def head(rank: int) -> int:
        while group[rank] != rank:
            rank = group[rank]
        return rank

    owners = {ends: rank for rank, own in connections.items() for ends in own}
    for (local, remote), rank in owners.items():
        other = owners.get((remote, local))
        if other is not None:
            first, second = sorted((head(rank), head(other)))
            group[second] = first
    members: dict[int, list[int]] = {}
    for rank in sorted(connections):
        members.setdefault(head(rank), []).append(rank)
    return list(members.values())


def describe_apart(groups: Sequence[Sequence[int]], *, per_node: bool) -> str:
    """A sentence without a full stop on ranks that have no connection to each other.

    Args:
        groups: of ranks, or of nodes whose command starts their ranks.
        per_node: whether it is nodes.
    """
    noun = "node" if per_node else "rank"
    names = [f"{noun}{'s' if len(group) > 1 else ''} {_list(group)}" for group in groups[:_SHOWN]]
    if all(len(group) == 1 for group in groups):
        names = [f"{noun}s {_list([group[0] for group in groups])}"]
    more = f" and {len(groups) - _SHOWN} other groups" if len(groups) > _SHOWN and len(names) > 1 else ""
    cure = (
        "the command must tell its launcher of the other nodes (SLURMTRAIN_NODES, SLURMTRAIN_MASTER_ADDR), without "
        "--standalone"
        if per_node
        else "the script must join them (torch.distributed.init_process_group, or Lightning's "
        "Trainer(devices=<resources.procs_per_node>, num_nodes=<resources.nodes>)); if the command starts ranks "
        "itself, set 'launcher: node'"
    )
    return (
        f"{', and '.join(names)}{more} have no connection to each other: the same training runs {len(groups)} times, "
        f"each for itself; {cure}"
    )


def describe_unsynchronised(exchange: Exchange, *, ranks: int, steps: int) -> str:
    """A sentence without a full stop on ranks that train models of their own; empty if they do not.

    Args:
        exchange: Facts about the exchange between them.
        ranks: how many there are.
        steps: for how many steps they have trained.
    """
    if not exchange.is_comparable:
        return ""
    during = f"in {steps} step{'s' if steps > 1 else ''}"
    if not exchange.has_exchanged:
        result = f"the same training runs {ranks} times" if not exchange.distance else "each trains a model of its own"
        return f"the {ranks} ranks have exchanged no gradients {during}, as with a forgotten DDP: {result}; {WRAP}"
    if exchange.distance > _UNRELATED:
        return (
            f"the weights of the {ranks} ranks have changed in different directions {during}, as with a forgotten DDP: "
            f"each trains a model of its own; {WRAP}"
        )
    return ""


def describe_fewer(launched: str, started: int, expected: int) -> str:
    """A sentence without a full stop on a launcher that has started fewer ranks than the run has.

    Args:
        launched: the launcher's name.
        started: how many processes it has given a rank.
        expected: how many ranks the run has.
    """
    cures = {"accelerate launch": "it needs --multi_gpu, also on CPUs, or a configuration file, and not --cpu"}
    count = (
        f"{started} of the {expected} ranks" if started else f"none of the {expected} ranks, but a process on each node"
    )
    cure = cures.get(launched, "leave out its options on numbers of processes: slurmtrain sets them")
    return f"{launched} has started {count}; {cure}"


def _list(numbers: Sequence[int]) -> str:
    shown = [str(number) for number in numbers[:_SHOWN]]
    if len(numbers) > _SHOWN:
        return f"{', '.join(shown)} and {len(numbers) - _SHOWN} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]
