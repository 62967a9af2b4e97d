"""When a rank counts as hanging, and which ranks are to blame: pure.

Each rank says what it does and how many steps it has finished (runtime/job/heartbeat.py). One that trains and finishes
no step for much longer than steps take hangs, or waits for one that does: in a collective all ranks wait for the last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Phase(IntEnum):
    """What a rank does, as far as watching it goes."""

    NONE = 0
    """Not heard of: a script without a session, or one that has not come to it yet."""
    JOINING = 1
    """Sets up the process group."""
    READY = 2
    """In the session, but not in the loop of its steps."""
    FIRST = 3
    """In the first step since this process started: compilers and caches make it longer than others."""
    TRAINING = 4
    SAVING = 5
    """Training stands still for a save or a restore."""
    STOPPING = 6
    """Was asked to stop, and saves."""
    DONE = 7
    """Has left the session."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank said last. Times are seconds; ``at`` is of the machine's monotonic clock.

    ``step``: finished steps. ``at``: when it finished the last one or, if later, when it began what it does.
    ``step_s``: what a step takes, smoothed; 0: none was finished yet. ``own_s``: the same without waiting for other
    ranks; 0: not known. ``save_s``: the longest save so far. ``pid``: 0 if it was never heard of.
    """

    step: int = 0
    phase: Phase = Phase.NONE
    at: float = 0.0
    step_s: float = 0.0
    own_s: float = 0.0
    save_s: float = 0.0
    pid: int = 0


NEVER = Beat()

# Nothing is called a hang sooner: file servers and other people's jobs hold a step up for less than that.
LEAST_S = 60.0
# A hang is this many times what it is measured by: the median step, or what a later step, or save, may take.
TIMES = 10.0
# torch.compile, kernels that are chosen by trial and cold caches take minutes.
FIRST_S = 600.0
# What a save or restore may take: at least this; and this where none has been finished that others are measured by.
SAVE_S = 300.0
UNKNOWN_SAVE_S = 1800.0

WATCHED = (Phase.FIRST, Phase.TRAINING, Phase.SAVING)


def limit(hang_after: float | None, beat: Beat, median_step_s: float) -> float | None:
    """Seconds since ``beat.at`` after which a rank that is still at it hangs; None: it is not watched.

    ``hang_after``: what the spec says, in seconds; None: by ``median_step_s``, the median of steps on its node.
    """
    if beat.phase not in WATCHED:
        return None
    usual = hang_after if hang_after is not None else max(LEAST_S, TIMES * median_step_s)
    if beat.phase is Phase.FIRST:
        return TIMES * usual if hang_after is not None else max(FIRST_S, TIMES * usual)
    if beat.phase is Phase.SAVING:
        return usual + (max(SAVE_S, TIMES * beat.save_s) if beat.save_s else UNKNOWN_SAVE_S)
    return usual


# --- who is to blame ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankState:
    """What is known of a rank while its run hangs.

    ``idle_s``: seconds since its last beat. ``state``: its process's, by the letter of proc(5), empty if not known.
    ``stack``: where its main thread is, innermost first, each "file:line function"; empty if nobody could tell.
    """

    rank: int
    node: int
    step: int
    phase: Phase
    idle_s: float
    state: str = ""
    stack: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "rank": self.rank,
            "node": self.node,
            "step": self.step,
            "phase": self.phase.name.lower(),
            "idle_s": round(self.idle_s, 1),
            "state": self.state,
            "stack": list(self.stack),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> RankState:
        """Read what :meth:`to_dict` gave."""
        return cls(
            rank=int(plain["rank"]),
            node=int(plain["node"]),
            step=int(plain["step"]),
            phase=Phase[str(plain["phase"]).upper()],
            idle_s=float(plain["idle_s"]),
            state=str(plain["state"]),
            stack=tuple(map(str, plain["stack"])),
        )


# Where ranks wait for each other: what torch calls its collectives, and what waits for a device that is in one.
_WAITING = re.compile(
    r"torch[/.]distributed[/.]|ProcessGroup|all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|broadcast|barrier"
    r"|backward|synchroni[sz]e",
    re.IGNORECASE,
)
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen |/slurmtrain/(?:runtime|system)/")
_SHOWN = 8
_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
    "D": "waiting for a device or a file server, which nothing can interrupt",
}
_HELD = "TtZX"


def culprits(ranks: Sequence[RankState]) -> tuple[list[int], str]:
    """The ranks that all others wait for, as far as can be told, and why, in words.

    In this order: those that cannot go on by the state of their process; those that have finished fewer steps than
    others; those that have left the loop of steps that others are in; those that have not come to where others wait
    for each other. If none of these tells, all ranks: that one has been idle for longer than others says nothing.
    Ranks that were never heard of are looked at for the state of their process alone.
    """
    heard = [each for each in ranks if each.phase is not Phase.NONE]
    for found, say in (
        ([each for each in ranks if each.state and each.state in _HELD], _say_state),
        ([each for each in ranks if each.state == "D"], _say_state),
        (_behind(heard), _say_behind(heard)),
        (_outside(heard, lambda each: each.phase in WATCHED), _say_left),
        (_outside([each for each in heard if each.stack], is_waiting), _say_elsewhere),
    ):
        if found:
            first = found[0]
            return [each.rank for each in found], f"{_names(found)} {say(first, len(found) > 1)}"
    return [each.rank for each in ranks], _say_all(ranks)


def is_waiting(rank: RankState) -> bool:
    """Whether the rank's main thread is where ranks wait for each other."""
    return any(_WAITING.search(frame) for frame in rank.stack)


def where(stack: Sequence[str]) -> str:
    """The innermost place of a stack in words and, if that is in a library, what called it; empty if unknown."""
    if not stack:
        return ""
    own = next((frame for frame in stack if not _LIBRARY.search(frame)), None)
    inner = _short(stack[0])
    return inner if own is None or own == stack[0] else f"{inner}, called from {_short(own)}"


def _behind(ranks: Sequence[RankState]) -> list[RankState]:
    ahead = max((each.step for each in ranks), default=0)
    return [each for each in ranks if each.step < ahead]


def _outside(ranks: Sequence[RankState], inside: Callable[[RankState], bool]) -> list[RankState]:
    """Those that are not where others are; none where all or none are."""
    found = [each for each in ranks if not inside(each)]
    return found if len(found) < len(ranks) else []


def _say_state(first: RankState, many: bool) -> str:
    said = f"{_STATES[first.state]} (process state {first.state})"
    return f"{_are(many)} {said} after step {first.step}{_at(first)}"


def _say_behind(ranks: Sequence[RankState]) -> Callable[[RankState, bool], str]:
    ahead = max((each.step for each in ranks), default=0)
    return lambda first, many: f"{_have(many)} finished {first.step} steps, others {ahead}{_at(first)}"


def _say_left(first: RankState, many: bool) -> str:
    return f"{_are(many)} not in the loop of steps that others are in, after step {first.step}{_at(first)}"


def _say_elsewhere(first: RankState, many: bool) -> str:
    return f"{_have(many)} not come to where others wait, after step {first.step}{_at(first)}"


def _say_all(ranks: Sequence[RankState]) -> str:
    step = max((each.step for each in ranks), default=0)
    places = Counter(where(each.stack) for each in ranks if each.stack)
    if not places:
        return f"no rank has finished a step after step {step}, and where they are could not be told"
    place = places.most_common(1)[0][0]
    alone = len(ranks) == 1
    if not alone and all(map(is_waiting, ranks)):
        return f"all ranks wait for each other after step {step}: {place}"
    return f"{_names(ranks)} {_have(not alone)} finished no step after step {step}: {place}"


def _names(ranks: Sequence[RankState]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} (node {ranks[0].node})"
    shown = ", ".join(f"{each.rank} (node {each.node})" for each in ranks[:_SHOWN])
    more = len(ranks) - _SHOWN
    return f"ranks {shown}" + (f" and {more} more" if more > 0 else "")


def _at(rank: RankState) -> str:
    place = where(rank.stack)
    return f": {place}" if place else ""


def _short(frame: str) -> str:
    """A frame without the directories of its file."""
    return frame.rpartition("/")[2]


def _are(many: bool) -> str:
    return "are" if many else "is"


def _have(many: bool) -> str:
    return "have" if many else "has"
