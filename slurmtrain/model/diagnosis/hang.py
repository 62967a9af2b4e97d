"""When a rank counts as hanging or as slow, and which ranks are to blame. Pure.

Each rank reports its phase and how many steps it has finished (runtime/job/heartbeat.py). If a training
rank finishes no step for much longer than steps usually take, it hangs or waits for a rank that does: in a collective,
all ranks wait for the last one. So steps take equally long on all of them, and a slow rank differs only in its own
time: what a step takes before it begins to wait for others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import median_low
from typing import Any

from slurmtrain.model.hostlist import name_some


class Phase(IntEnum):
    """What a rank is doing, as the watchdog distinguishes it. The numbers are in heartbeats; they must not change."""

    NONE = 0
    """No heartbeat yet: the script has no session, or has not opened it."""
    JOINING = 1
    """Sets up the process group."""
    READY = 2
    """In the session, but outside the loop over steps."""
    FIRST = 3
    """In the first step since this process started: compilers and caches make it longer than others."""
    TRAINING = 4
    SAVING = 5
    """Training is paused for a save or a restore."""
    STOPPING = 6
    """Was asked to stop, and saves."""
    LEFT = 7
    """Has left the session."""
    PAUSED = 8
    """The script has paused its training, for an evaluation for example."""

    @property
    def label(self) -> str:
        """Its name in journals and JSON."""
        # Journals that already exist call the last phase "done".
        return "done" if self is Phase.LEFT else self.name.lower()


_PHASES = {phase.label: phase for phase in Phase}


@dataclass(frozen=True, slots=True)
class Beat:
    """The last heartbeat of a rank. Times are in seconds; ``at`` is on the machine's monotonic clock.

    ``step``: finished steps. ``at``: when it finished the last step or, if later, when its phase began. ``step_s``: the
    smoothed duration of a step; 0: none is finished yet. ``own_s``: the same without the time spent waiting for other
    ranks; 0: unknown. ``save_s``: the longest save so far. ``pid``: 0 if there was never a heartbeat. While paused:
    ``activity``: what for; ``pause_s``: how long it may take.
    """

    step: int = 0
    phase: Phase = Phase.NONE
    at: float = 0.0
    step_s: float = 0.0
    own_s: float = 0.0
    save_s: float = 0.0
    pid: int = 0
    activity: str = ""
    pause_s: float = 0.0


NEVER = Beat()

# Nothing counts as a hang before this: file servers and other jobs on the node delay a step by less.
LEAST_S = 60.0
# A hang takes this many times its yardstick: the median step, the usual limit, or the longest save.
TIMES = 10.0
# torch.compile, autotuning of kernels and cold caches take minutes.
FIRST_S = 600.0
# How long a save or restore may take: at least this once one has been measured, and this before that.
SAVE_S = 300.0
UNKNOWN_SAVE_S = 1800.0
# A pause may take this long if the script does not say: longer than most evaluations, shorter than a night.
PAUSE_S = 2 * 3600.0
# A rank that computes gets twice the time again and again, up to this many times the limit or, if the limit was derived
# from step times, to this many seconds if that is more: an evaluation rarely takes longer, and torch gives up
# collectives of gloo after the same time.
MOST_TIMES = 8.0
MOST_S = 1800.0

# In other phases a rank may legitimately take any time: downloads before the loop, an evaluation after it.
WATCHED = (Phase.FIRST, Phase.TRAINING, Phase.SAVING, Phase.PAUSED)


def hang_limit(hang_after: float | None, beat: Beat, median_step_s: float) -> float | None:
    """Seconds since ``beat.at`` after which a rank in the phase of ``beat`` hangs; None: the phase is not watched.

    ``hang_after``: the spec's ``requeue.hang_after``, in seconds; None: derive it from ``median_step_s``, the median
    duration of a step over the ranks of its node, in seconds.
    """
    if beat.phase not in WATCHED:
        return None
    if beat.phase is Phase.PAUSED:
        return beat.pause_s or PAUSE_S
    usual = hang_after if hang_after is not None else max(LEAST_S, TIMES * median_step_s)
    # The user's limit says how long steps take, so the minimum time does not apply to it.
    if beat.phase is Phase.FIRST:
        return TIMES * usual if hang_after is not None else max(FIRST_S, TIMES * usual)
    if beat.phase is Phase.SAVING:
        return usual + (max(SAVE_S, TIMES * beat.save_s) if beat.save_s else UNKNOWN_SAVE_S)
    return usual


def longest_limit(hang_after: float | None, limit_s: float) -> float:
    """The longest limit, in seconds, that ``limit_s`` is raised to for ranks that compute.

    ``hang_after``: as for :func:`hang_limit`.
    """
    most_s = MOST_TIMES * limit_s
    return most_s if hang_after is not None else max(MOST_S, most_s)


# --- who is to blame ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankState:
    """What is known about a rank while its run hangs.

    ``idle_s``: seconds since its last heartbeat. ``state``: the state of its process as a letter of proc(5), empty if
    unknown. ``stack``: the frames of its main thread, innermost first, each "file:line function"; empty if unknown.
    ``cpu``: the part of a core that its main thread has used lately, without waiting for a GPU; None: unknown.
    """

    rank: int
    node: int
    step: int
    phase: Phase
    idle_s: float
    state: str = ""
    stack: tuple[str, ...] = ()
    cpu: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {
            "rank": self.rank,
            "node": self.node,
            "step": self.step,
            "phase": self.phase.label,
            "idle_s": round(self.idle_s, 1),
            "state": self.state,
            "stack": list(self.stack),
            **({} if self.cpu is None else {"cpu": round(self.cpu, 3)}),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> RankState:
        """Read the result of :meth:`to_dict`. Raises KeyError if something is missing."""
        values = {name: plain[name] for name in cls.__slots__ if name != "cpu"}
        values |= {"phase": _PHASES[values["phase"]], "stack": tuple(values["stack"])}
        return cls(**values, cpu=plain.get("cpu"))


# Frames of a rank that waits for others: torch's collectives, and calls that wait for a device inside a collective.
_WAITING = re.compile(
    r"torch[/.]distributed[/.]|ProcessGroup|all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|broadcast|barrier"
    r"|backward|synchroni[sz]e",
    re.IGNORECASE,
)
# The innermost frame of a rank that waits in one of torch's collectives, or for its GPU.
_COLLECTIVE = re.compile(r"torch/distributed/distributed_c10d\.py|synchroni[sz]e|barrier", re.IGNORECASE)
# A main thread that computes uses most of a core, one that waits or polls every few milliseconds hardly any. Threads
# that mostly wait for data-loader workers are in between.
_COMPUTING = 0.1
LOADER_WAIT = "waiting for a worker of its DataLoader"
# Where torch's and torchdata's data loaders wait for a worker's next batch.
_LOADER = re.compile(r"/(?:dataloader|stateful_dataloader)\.py:\d+ _try_get_data$")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen |/slurmtrain/(?:runtime|system)/")
# How many ranks a message names.
_SHOWN = 8
_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
    "D": "waiting uninterruptibly for a device or a file server",
}
_PROCESS_STATE = "{state} (process state {letter}) after step {step}"
# States of a process that cannot make progress, whatever other ranks do.
_HELD = "TtZX"


def find_culprits(ranks: Sequence[RankState]) -> tuple[list[int], str]:
    """The ranks that all others wait for, as far as can be determined, and a sentence that says why.

    The first that applies decides: ranks whose process cannot run in its state; ranks that have finished fewer steps
    than others; ranks that have left the loop over steps, or paused, while others are in it; ranks that have not
    reached the collective that others wait in. If none applies, all ranks are returned: their idle times do not
    separate culprits from victims. Ranks without a heartbeat are judged only by the state of their process.
    """
    reporting = [rank for rank in ranks if rank.phase is not Phase.NONE]
    ahead = max((rank.step for rank in reporting), default=0)
    outside = _outside(reporting, lambda rank: rank.phase in WATCHED)
    paused = _outside(reporting, lambda rank: rank.phase is not Phase.PAUSED)
    apart = _outside([rank for rank in reporting if rank.stack], is_waiting)
    # Strongest evidence first: a stopped process explains why its step count is behind, not the other way round.
    for suspects, verb, reason in (
        ([rank for rank in ranks if rank.state and rank.state in _HELD], "is", _PROCESS_STATE),
        ([rank for rank in ranks if rank.state == "D"], "is", _PROCESS_STATE),
        ([rank for rank in reporting if rank.step < ahead], "has", "finished {step} steps, others {ahead}"),
        (outside, "is", "not in the loop over steps that others are in, after step {step}"),
        (paused, "has", "been paused by the script, after step {step}"),
        (apart, "has", "not reached the point where others wait, after step {step}"),
    ):
        if suspects:
            first = suspects[0]
            words = reason.format(state=_STATES.get(first.state), letter=first.state, step=first.step, ahead=ahead)
            verb = {"is": "are", "has": "have"}[verb] if len(suspects) > 1 else verb
            return [rank.rank for rank in suspects], f"{_name_ranks(suspects)} {verb} {words}{_at(first)}"
    everybody = [rank.rank for rank in ranks]
    step = max((rank.step for rank in ranks), default=0)
    places = Counter(describe_stack(rank.stack) for rank in ranks if rank.stack)
    if not places:
        return everybody, f"no rank has finished a step after step {step}, and where they are is unknown"
    place = places.most_common(1)[0][0]
    alone = len(ranks) == 1
    if not alone and all(map(is_waiting, ranks)):
        return everybody, f"all ranks wait for each other after step {step}: {place}"
    return everybody, f"{_name_ranks(ranks)} {'has' if alone else 'have'} finished no step after step {step}: {place}"


def computing_culprits(ranks: Sequence[RankState]) -> tuple[list[int], str]:
    """The ranks that all others wait for, and a sentence that says so, if the main threads of all of them compute.

    An empty list if one of them does not, or if that is unknown: then the ranks hang.
    """
    culprits = set(find_culprits(ranks)[0])
    suspects = [rank for rank in ranks if rank.rank in culprits]
    if not suspects or not all(map(is_computing, suspects)):
        return [], ""
    many = len(suspects) > 1
    return sorted(culprits), f"{_name_ranks(suspects)} {'compute' if many else 'computes'}{_at(suspects[0])}"


def is_computing(rank: RankState) -> bool:
    """Whether the rank's main thread computes, rather than waiting for something, and has not just begun to wait."""
    if rank.cpu is None or rank.cpu < _COMPUTING or rank.state in _HELD:
        return False
    return not any(_COLLECTIVE.search(frame) for frame in rank.stack[:1])


def is_waiting(rank: RankState) -> bool:
    """Whether the rank's main thread is in a collective, or in a call that waits for one."""
    return any(_WAITING.search(frame) for frame in rank.stack)


def describe_stack(stack: Sequence[str]) -> str:
    """The innermost frame of a stack and, if that is in a library, the user's frame behind it; empty if unknown.

    That a rank waits for a worker of its data loader is said instead of the innermost frame, which is a system call's.
    """
    if not stack:
        return ""
    own = next((frame for frame in stack if not _LIBRARY.search(frame)), None)
    loading = any(_LOADER.search(frame) for frame in stack)
    inner = LOADER_WAIT if loading else _without_directory(stack[0])
    return inner if own is None or own == stack[0] else f"{inner}, called from {_without_directory(own)}"


def _outside(ranks: Sequence[RankState], inside: Callable[[RankState], bool]) -> list[RankState]:
    """The ranks that are not inside while others are; an empty list if all or none are."""
    outside = [rank for rank in ranks if not inside(rank)]
    return outside if len(outside) < len(ranks) else []


def _name_ranks(ranks: Sequence[RankState]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} (node {ranks[0].node})"
    return f"ranks {name_some([f'{rank.rank} (node {rank.node})' for rank in ranks], _SHOWN)}"


def _at(rank: RankState) -> str:
    place = describe_stack(rank.stack)
    return f": {place}" if place else ""


def _without_directory(frame: str) -> str:
    """A frame without the directories of its file."""
    return frame.rpartition("/")[2]


# --- who is slow ------------------------------------------------------------------------------------------------

# A rank is slow if its own time is this many times the median.
RATIO = 1.5
# How many consecutive looks it must be slow for, at about one look in ten seconds: shorter disturbances pass.
LOOKS = 5
# The interpreter and the kernel's scheduler alone make two ranks of one node differ by up to this.
LEAST_SLOWNESS_S = 0.005


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank whose own time per step is ``ratio`` times the median rank's. Times are in seconds."""

    rank: int
    own_s: float
    median_s: float
    ratio: float


def is_slow(own_s: float, median_s: float) -> bool:
    """Whether a rank is slow.

    Args:
        own_s: Its own time in a step, in seconds.
        median_s: The median over all ranks.
    """
    return own_s > RATIO * median_s and own_s > median_s + LEAST_SLOWNESS_S


class Stragglers:
    """Detects ranks that have become slower than others: each is reported once, and again if it recovers in between."""

    def __init__(self) -> None:
        # By rank: for how many consecutive looks its state has differed from that in ``_slow``.
        self._changed: dict[int, int] = {}
        self._slow: set[int] = set()

    def look(self, own_s: Mapping[int, float]) -> list[Straggler]:
        """Record each rank's own time per step, in seconds (0: unknown), and return the ranks that became slow."""
        measured = {rank: seconds for rank, seconds in own_s.items() if seconds > 0}
        if len(measured) < 2:
            return []
        # The lower median: with two ranks, the slow one must not be its own yardstick.
        median = median_low(measured.values())
        stragglers = []
        for rank, seconds in sorted(measured.items()):
            slow = is_slow(seconds, median)
            if slow == (rank in self._slow):
                self._changed.pop(rank, None)
                continue
            # With this look the rank may start, or stop, counting as slow.
            self._changed[rank] = self._changed.get(rank, 0) + 1
            if self._changed[rank] == LOOKS:
                del self._changed[rank]
                self._slow ^= {rank}
                if slow:
                    stragglers.append(Straggler(rank, seconds, median, seconds / median))
        return stragglers
