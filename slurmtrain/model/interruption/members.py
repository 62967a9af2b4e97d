"""Which nodes have ranks: after a restart in place, and once a run with fewer nodes than it could use gets more. Pure.

Such a run keeps its present nodes. Node 0 submits a second job for the missing ones. When it starts, its agents
announce themselves as newcomers. The ranks are then stopped at a step that all of them agree on, they save, and another
stage of the attempt begins, where the newcomers have ranks too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurmtrain.model.experiment.values import Nodes

# How long the first newcomers of a job wait for the others, whose agents may start later; then they join without them.
GATHERING_S = 60.0
# Pauses between two requests for nodes, in seconds: they double, so that a run whose new nodes are taken away at once,
# or are unfit, spends its time training.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 3600.0
# A node whose ranks have failed this often is left out if others can take its place.
_TOO_OFTEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """An agent that could join a run. ``number`` identifies it among all agents of the attempt.

    ``host``: its node. ``job_id``: the job that it belongs to, which has ``job_nodes`` nodes.
    """

    number: int
    host: str
    job_id: str
    job_nodes: int

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Newcomer:
        """Read what :meth:`to_dict` returned. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            number=int(plain["number"]),
            host=str(plain["host"]),
            job_id=str(plain["job_id"]),
            job_nodes=int(plain["job_nodes"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of an attempt with an unchanging set of agents.

    ``round``: the number of its first round. ``roster``: the numbers of its agents; the index is the agent's place.
    Agents know each other by place within the stage; node 0 has place 0. ``hosts``, ``jobs``: the node and the
    additional job of each agent, by place; jobs are empty for agents of the attempt's own job, and hosts are empty in
    the first stage, where Slurm says them. ``before``: the numbers of the agents that were there before, and that go on
    without the newcomers if these are unfit. ``restarts``: how often ranks were restarted because of failures.
    """

    round: int = 0
    roster: Sequence[int]
    hosts: Sequence[str] = ()
    jobs: Sequence[str] = ()
    before: Sequence[int] = ()
    restarts: int = 0

    @classmethod
    def first(cls, nodes: int) -> Stage:
        """The first stage of an attempt, with the agents of its own job on so many ``nodes``."""
        return cls(roster=tuple(range(nodes)))

    def place_of(self, number: int) -> int | None:
        """The place of the agent with this ``number``; None if it does not take part."""
        return self.roster.index(number) if number in self.roster else None

    def job_of(self, place: int) -> str:
        """The additional job of the agent at a ``place``; empty for one of the attempt's own job."""
        return self.jobs[place] if place < len(self.jobs) else ""

    def places_of_job(self, job_id: str) -> list[int]:
        """The places of the agents of an additional job."""
        return [place for place in range(len(self.roster)) if job_id and self.job_of(place) == job_id]

    def newcomers(self) -> dict[str, list[str]]:
        """The nodes that were not there before, by their jobs."""
        nodes: dict[str, list[str]] = {}
        for place, number in enumerate(self.roster):
            if self.job_of(place) and number not in self.before:
                nodes.setdefault(self.job_of(place), []).append(self.hosts[place])
        return nodes

    def grown(
        self, newcomers: Sequence[Newcomer], hosts: Mapping[int, str], *, round: int, lost: Collection[int]
    ) -> Stage:
        """The next stage.

        ``newcomers`` join. ``hosts``: the nodes of this stage, by place. ``round``: the number of its first round.
        ``lost``: the places of agents that are gone.
        """
        staying = [place for place in range(len(self.roster)) if place not in lost]
        numbers = tuple(self.roster[place] for place in staying)
        return Stage(
            round=round,
            roster=(*numbers, *(each.number for each in newcomers)),
            hosts=(*(hosts.get(place, "") for place in staying), *(each.host for each in newcomers)),
            jobs=(*(self.job_of(place) for place in staying), *(each.job_id for each in newcomers)),
            before=numbers,
            restarts=self.restarts,
        )

    def without_newcomers(self) -> Stage:
        """The stage that follows if this one could not begin: the agents that were there before go on alone."""
        staying = [place for place, number in enumerate(self.roster) if number in self.before]
        return Stage(
            # A number of its own, since it names the rendezvous file of the stage and the journals of its ranks.
            round=self.round + 1,
            roster=tuple(self.roster[place] for place in staying),
            hosts=tuple(self.hosts[place] for place in staying) if self.hosts else (),
            jobs=tuple(self.job_of(place) for place in staying),
            restarts=self.restarts,
        )

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Stage:
        """Read what :meth:`to_dict` returned. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            round=int(plain["round"]),
            roster=tuple(map(int, plain["roster"])),
            hosts=tuple(map(str, plain["hosts"])),
            jobs=tuple(map(str, plain["jobs"])),
            before=tuple(map(int, plain["before"])),
            restarts=int(plain["restarts"]),
        )


def choose_newcomers(waiting: Mapping[int, float], newcomers: Sequence[Newcomer], room: int) -> list[Newcomer]:
    """The newcomers that are to join now: at most ``room``, by their numbers; none if it is better to wait for others.

    Stopping the ranks once for all nodes of a job costs less than once for each of them.

    ``waiting``: how long each newcomer has been waiting, in seconds, by its number. ``newcomers``: all newcomers that
    wait.
    """
    chosen: list[Newcomer] = []
    for job_id in dict.fromkeys(each.job_id for each in newcomers):
        members = [each for each in newcomers if each.job_id == job_id]
        is_complete = len(members) >= members[0].job_nodes
        if is_complete or max(waiting.get(each.number, 0.0) for each in members) >= GATHERING_S:
            chosen += members
    return sorted(chosen, key=lambda each: each.number)[: max(0, room)]


def is_worthwhile(now: int, then: int, *, cost_s: float, left_s: float | None) -> bool:
    """Whether more nodes gain more time than stopping and starting the ranks costs.

    At best, the remaining work takes ``now / then`` of its time.

    ``now``, ``then``: how many nodes have ranks, and would have. ``cost_s``: what a restart of the ranks costs.
    ``left_s``: until the attempt's time limit; None: it has none.
    """
    return then > now and (left_s is None or left_s * (1 - now / then) > cost_s)


def pause_before_request(requests: int) -> float:
    """How many seconds to wait before requesting nodes again, after so many ``requests`` that are over."""
    # The exponent is bounded, since a large power of 2.0 raises OverflowError.
    return 0.0 if requests == 0 else min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(requests - 1, 16))


def choose_members(allocated: int, count: Nodes, *, lost: Collection[int], blamed: Sequence[int]) -> list[int] | None:
    """The nodes of the next round, out of ``allocated`` nodes numbered from 0; None if there are too few.

    ``count``: how many nodes are to have ranks. ``lost``: nodes that are gone. ``blamed``: nodes whose ranks have
    failed, a node once for each failure. Node 0 is always chosen, since it hosts the rendezvous.
    """
    often = {node for node, times in Counter(blamed).items() if times >= _TOO_OFTEN and node != 0}
    alive = [node for node in range(allocated) if node not in lost]
    if 0 not in alive or len(alive) < count.min:
        return None
    good = [node for node in alive if node not in often]
    # Nodes that fail often are still better than too few nodes.
    chosen = good if len(good) >= count.min else [*good, *(node for node in alive if node in often)][: count.min]
    return sorted(chosen[: count.max])
