"""Traces of a few steps by torch's profiler, for Chrome and Perfetto: of rank 0 and of the slowest rank, once in a run.

What is traced is not changed: steps compute the same bits. The ranks learn from each other, before the first of these
steps, which of them is the slowest, by the time of its own that each has in a step, and whether the run has a trace
already. A rank that stops within these steps leaves none, and the attempt that trains them again traces them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from slurmtrain.errors import PathError
from slurmtrain.model.run.events.rank_events import StepsTraced
from slurmtrain.runtime.job.torch_private import is_profiled
from slurmtrain.system.files import FILE_MODE, describe_os_error, make_directory

if TYPE_CHECKING:
    from slurmtrain.model.run.layout import AttemptDir
    from slurmtrain.runtime.job.process_group import RankGroup

_NAME = re.compile(r"rank-[0-9]{1,9}\.steps-([0-9]{1,18})-([0-9]{1,18})\.json\.gz")
_UNKNOWN = "the slowest rank is unknown, since no rank's own time was measured before: only rank 0 is traced"


class StepTracer:
    """Traces steps of this rank, if it is one of those that are to be traced; all ranks make the same calls."""

    def __init__(self, steps: tuple[int, int], attempt: AttemptDir, ranks: RankGroup) -> None:
        """Trace from the first to the last of ``steps``, as numbers of finished ones.

        ``attempt``: where the trace goes. ``ranks``: the ranks of the run.
        """
        self._first, self._last = steps
        self._attempt = attempt
        self._ranks = ranks
        self._why = ""
        self._is_chosen: bool | None = None
        self._profile: Any = None
        self._mark: Any = None
        self._begun_at = 0

    def is_due(self, step: int) -> bool:
        """Whether the step after so many finished ones is to be traced."""
        return self._first <= step < self._last and self._is_chosen is not False

    def is_over(self, step: int) -> bool:
        """Whether nothing is to be traced any more after so many finished steps."""
        return step >= self._last or self._is_chosen is False

    def begin(self, step: int, own_s: float) -> None:
        """A step that :meth:`is_due` begins. ``step``: how many have finished. ``own_s``: this rank's own time in one.

        Only the first call communicates.
        """
        if self._is_chosen is None:
            has_trace = any(map(self._is_of_these, self._attempt.run.attempts.glob("*/profiles/*.json.gz")))
            answers = self._ranks.gather((has_trace, own_s))
            traced, self._why = choose_ranks([own for _, own in answers])
            self._is_chosen = self._ranks.rank in traced and not any(has for has, _ in answers)
        if self._is_chosen and self._profile is None:
            self._start(step)
        if self._profile is not None:
            self._mark = record_function(f"step {step}")
            self._mark.__enter__()

    def end_step(self) -> bool:
        """The step has ended; returns whether it was traced, which takes time."""
        if self._mark is None:
            return False
        self._mark.__exit__(None, None, None)
        self._mark = None
        return True

    def write(self, step: int) -> StepsTraced | None:
        """Write the trace, which ends after so many finished steps; returns what to journal, if anything."""
        if not self._is_chosen:
            return None
        ended, self._profile, self._is_chosen = self._profile, None, False
        facts = StepsTraced(
            rank=self._ranks.rank, first=self._first if ended is None else self._begun_at, last=step, why=self._why
        )
        if ended is None:
            return replace(facts, problem="another profiler was active in these steps")
        path = self._attempt.profiles / f"rank-{facts.rank}.steps-{facts.first}-{facts.last}.json.gz"
        try:
            self._wait()
            ended.stop()
            size = _export(ended, path)
        except (OSError, PathError, RuntimeError) as error:
            return replace(facts, problem=describe_os_error(error) if isinstance(error, OSError) else str(error))
        return replace(facts, path=str(path.relative_to(self._attempt.run.path)), bytes=size)

    def close(self) -> None:
        """Steps are interrupted: there will be no trace of these."""
        self.end_step()
        ended, self._profile = self._profile, None
        if ended is not None:
            ended.stop()

    def _is_of_these(self, path: Path) -> bool:
        """Whether a file is a trace of these steps, or of the part that an attempt has trained."""
        match = _NAME.fullmatch(path.name)
        return match is not None and self._first <= int(match[1]) and int(match[2]) <= self._last

    def _start(self, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if self._ranks.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # There can be only one profiler, and a second one would end it: perhaps with the next step.
        if is_profiled():
            return
        self._wait()
        started = profile(activities=activities)
        started.start()
        self._profile, self._begun_at = started, step

    def _wait(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)


def _export(profiled: Any, path: Path) -> int:
    """Write a trace, which only its owner can read: it has names of files and functions. Returns its size in bytes."""
    make_directory(path.parent, private=True)
    partial = path.with_name(f".{path.name}")
    try:
        profiled.export_chrome_trace(str(partial))
        partial.chmod(FILE_MODE)
        size = partial.stat().st_size
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return size


def choose_ranks(own_s: Sequence[float]) -> tuple[set[int], str]:
    """The ranks that are traced, and why, as a phrase.

    Args:
        own_s: The time of its own that each rank has in a step, in seconds; 0: unknown.
    """
    if len(own_s) == 1:
        return {0}, "the only rank"
    slowest = max(range(len(own_s)), key=lambda rank: own_s[rank])
    if not own_s[slowest]:
        return {0}, _UNKNOWN
    return {0, slowest}, f"rank {slowest} is the slowest: {1000 * own_s[slowest]:.3g} ms of its own in a step"
