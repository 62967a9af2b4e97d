"""Which runs a run comes from and starts after, and whether they have ended as they must: pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run

RERUN, FORK, AFTER = "rerun", "fork", "after"


@dataclass(frozen=True, slots=True)
class Parent:
    """A run that another one comes from.

    ``run``: its id. ``relation``: ``rerun``, the same was submitted again; ``fork``, training begins with its
    checkpoint; or ``after``, it has to end first. ``step``: step of the checkpoint; None without one.
    """

    run: str
    relation: str
    step: int | None = None

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Parent:
        """Read the result of :meth:`to_dict`."""
        return cls(record["run"], record["relation"], record.get("step"))

    def to_dict(self) -> dict[str, Any]:
        """This as events and JSON have it."""
        return {"run": self.run, "relation": self.relation, "step": self.step}

    @property
    def phrase(self) -> str:
        """What the child is: ``rerun of RUN``, ``fork of RUN at step N``."""
        step = "" if self.step is None else f" at step {self.step}"
        return f"after {self.run}" if self.relation == AFTER else f"{self.relation} of {self.run}{step}"


# The causes of an attempt's end before its ranks were started: an upstream had not ended yet, or had not as it must.
EARLY = "early"
UPSTREAM = "upstream"


@dataclass(frozen=True, slots=True)
class Upstream:
    """A run that another one starts after.

    ``run``: its id. ``name``: what the spec calls it. ``any``: it may end in any way.
    """

    run: str
    name: str
    any: bool = False

    def __str__(self) -> str:
        """As messages name it."""
        return self.run if self.name == self.run else f"{self.run} ({self.name})"

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {"run": self.run, "name": self.name, "any": self.any}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Upstream:
        """Read what :meth:`to_dict` returned. Raises KeyError."""
        return cls(run=str(plain["run"]), name=str(plain["name"]), any=bool(plain.get("any")))


def ids_by_name(upstreams: Iterable[Upstream]) -> dict[str, list[str]]:
    """The ids of runs that a run starts after, by what its spec calls them, which may be other runs by now."""
    named: dict[str, list[str]] = {}
    for upstream in upstreams:
        named.setdefault(upstream.name, []).append(upstream.run)
    return named


@dataclass(frozen=True, slots=True)
class Standing:
    """How the upstreams of a run stand.

    ``waits``: the upstreams that have not ended. ``problem``: why the run cannot start any more, as a sentence without
    a full stop; empty while it may.
    """

    waits: Sequence[Upstream] = ()
    problem: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether the run may start."""
        return not (self.waits or self.problem)


def standing(upstreams: Sequence[Upstream], runs: Mapping[str, Run]) -> Standing:
    """How upstreams stand.

    Args:
        upstreams: The runs.
        runs: The runs among them that exist, by id, as they are now.
    """
    waits: list[Upstream] = []
    # A run that has failed decides at once, whatever others are still waited for.
    for upstream in upstreams:
        run = runs.get(upstream.run)
        if run is None:
            # Whether a deleted run had completed is unknown.
            if not upstream.any:
                return Standing(problem=f"the directory of run {upstream} was deleted")
        elif not run.ended:
            waits.append(upstream)
        elif run.state != "completed" and not upstream.any:
            return Standing(problem=describe_failure(upstream, run.state, run.reason))
    return Standing(waits)


def describe_failure(upstream: Upstream, state: str, reason: str) -> str:
    """Why a run cannot start after an ``upstream``, which has ended in this ``state`` for this ``reason``."""
    words = {"cancelled": "was cancelled", "lost": "was lost"}.get(state, state)
    more = "" if state == "cancelled" or not reason else f": {reason}"
    return f"run {upstream} {words}{more}"


def describe_wait(name: str, state: str, step: int | None) -> str:
    """What a run waits for: one that its spec calls ``name``, in this ``state``, which has finished ``step`` steps."""
    at = f", step {step}" if step is not None and state == "running" else ""
    return f"after {name} ({state}{at})"


def tree_order(above: Mapping[str, Collection[str]], first: Sequence[str]) -> dict[str, int]:
    """How deep each run of a set stands, in the order of a tree: each below the last of the runs that it starts after.

    Args:
        above: For each run of the set, the runs of the set that it starts after. Ids sort by age.
        first: Runs in the desired order of their chains; other chains come after these.
    """
    try:
        order = list(TopologicalSorter(above).static_order())
    except CycleError:
        # Nobody can submit such runs, but anything may stand in a journal.
        return dict.fromkeys([*first, *above], 0)
    depths: dict[str, int] = {}
    parents: dict[str, str] = {}
    for run_id in order:
        # A tree has one parent for each: the one that stands deepest shows the longest wait.
        upper = max(above[run_id], key=lambda each: (depths[each], each), default=None)
        depths[run_id] = 0 if upper is None else depths[upper] + 1
        if upper is not None:
            parents[run_id] = upper
    below: dict[str, list[str]] = {}
    for run_id in sorted(parents):
        below.setdefault(parents[run_id], []).append(run_id)
    ordered: dict[str, int] = {}
    for run_id in [*first, *above]:
        root = run_id
        while root in parents:
            root = parents[root]
        # Without recursion: a chain may have thousands of runs.
        stack = [root]
        while stack:
            each = stack.pop()
            if each not in ordered:
                ordered[each] = depths[each]
                stack += reversed(below.get(each, []))
    return ordered
