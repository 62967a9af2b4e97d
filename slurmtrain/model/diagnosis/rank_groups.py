"""Which ranks of a run train together: ranks without a connection, or without exchange of gradients, train apart."""

from __future__ import annotations

import re
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
    names = [f"{noun}{'s' if len(group) > 1 else ''} {_list_numbers(group)}" for group in groups[:_SHOWN]]
    if all(len(group) == 1 for group in groups):
        names = [f"{noun}s {_list_numbers([group[0] for group in groups])}"]
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
    count = (
        f"{started} of the {expected} ranks" if started else f"none of the {expected} ranks, but a process on each node"
    )
    cure = "leave out its options on numbers of processes: slurmtrain sets them"
    if launched == "accelerate launch":
        cure = "it needs --multi_gpu, also on CPUs, or a configuration file, and not --cpu"
    return f"{launched} has started {count}; {cure}"


def _list_numbers(numbers: Sequence[int]) -> str:
    shown = [str(number) for number in numbers[:_SHOWN]]
    if len(numbers) > _SHOWN:
        return f"{', '.join(shown)} and {len(numbers) - _SHOWN} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


# The formats of these libraries, by the groups ``code`` or ``signal``, and ``rank``.
_REPORTS = (
    # torch/distributed/elastic/multiprocessing/api.py, also under accelerate launch: a negative code for a signal.
    re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)"),
    # The same: torchrun itself was asked to stop.
    re.compile(r"SignalException: Process \d+ got signal: (?P<signal>\d+)"),
    # torch/multiprocessing/spawn.py.
    re.compile(r"process (?P<rank>\d+) terminated with exit code (?P<code>\d+)"),
    # subprocess.CalledProcessError, which accelerate launch raises for a single process.
    re.compile(r"CalledProcessError: .* returned non-zero exit status (?P<code>\d+)"),
)
# torch's own log lines, such as those about processes that it ends because another one failed.
_OF_TORCH = re.compile(r"[EWI]\d{4} \d\d:\d\d:\d\d\.\d+ .*torch/distributed/(?:elastic|launcher|run)\b")
# Lines of other launchers, which say no more than that a rank has ended: deepspeed/launcher/launch.py, srun.
_OF_OTHERS = (
    re.compile(r"\[launch\.py:\d+:\w+\]"),
    re.compile(
        r"srun: (?:error: .*: tasks? .*: |launch/\w+: _step_signal|Terminating|Force Terminated|Job step aborted)"
    ),
)
_TRACEBACK = "Traceback (most recent call last):"
# What launchers raise when a rank has ended.
_OF_LAUNCHERS = re.compile(
    r"(?:subprocess\.)?CalledProcessError: .* returned non-zero exit status \d+"
    r"|(?:torch\.distributed\.elastic\.multiprocessing\.errors\.)?ChildFailedError\b"
    r"|torch\.multiprocessing\.spawn\.ProcessExitedException\b"
)
# The line that ends a traceback, or the message of a program in another language.
_ERROR = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Exit)\b|[Ee]rror\b|.*: (?:error|fatal|cannot|No such)\b")


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a launcher says that one of its ranks ended: the exit code, negative for a signal, and the local rank."""

    code: int
    local_rank: int | None


def find_rank_end(lines: Sequence[str]) -> RankEnd | None:
    """The end of the rank that made its launcher end, by the launcher's last ``lines``; None if they do not name one.

    Launchers exit with 1 themselves, whatever the rank's code.
    """
    for line in reversed(lines):
        for report in _REPORTS:
            if match := report.search(line):
                fields = match.groupdict()
                code = -int(fields["signal"]) if "signal" in fields else int(fields["code"])
                return RankEnd(code, int(fields["rank"]) if fields.get("rank") else None)
    return None


def without_report(lines: Sequence[str]) -> Sequence[str]:
    """The last ``lines`` of a log up to a launcher's report on a rank that has ended, which usually ends the log."""
    ends = [index for index, line in enumerate(lines) if _OF_TORCH.match(line) and _REPORTS[0].search(line)]
    before = lines[: ends[-1]] if ends else lines
    kept = [line for line in before if not (_OF_TORCH.match(line) or any(each.search(line) for each in _OF_OTHERS))]
    return _without_traceback(kept)


def _without_traceback(lines: Sequence[str]) -> Sequence[str]:
    """Lines without the traceback of a launcher at their end, if the rank's error stands before that traceback."""
    tracebacks = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not tracebacks or not any(_OF_LAUNCHERS.match(line) for line in lines[tracebacks[-1] :]):
        return lines
    before = lines[: tracebacks[-1]]
    # If no rank's error stands before it, the traceback may belong to a program that has called another.
    return _without_traceback(before) if any(map(_ERROR.match, before)) else lines
