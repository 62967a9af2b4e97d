"""Whether the runs that a run starts after have ended as they must: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run

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
    for upstream in upstreams:
        run = runs.get(upstream.run)
        if run is None:
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
