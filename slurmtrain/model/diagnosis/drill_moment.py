"""When a drill's fault may strike, and when the drill stops waiting. Pure.

A fault that strikes while the script still imports its libraries proves nothing. So it waits for evidence that the run
trains: steps, a checkpoint, or at least output. The undisturbed run has shown which of these to expect. The length of
time is no evidence: the next run may take longer to start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmtrain.model.diagnosis.drill import FAULTS, Baseline, InjectedFault, OwnCheckpoint
from slurmtrain.model.diagnosis.hang import LEAST_S, SAVE_S, TIMES
from slurmtrain.model.run.run import Run

# Where its checkpoints are late, a run that counts steps is struck after this share of them, before it might end.
_SHARE_OF_STEPS = 1 / 2
# With no other evidence, a run is struck once it has printed this share of what the undisturbed run did.
_SHARE_OF_LINES = 1 / 2
# How much longer than the undisturbed run a disturbed one may train: other runs may share its machine.
_LONGER = 3.0
_LONGER_S = 120.0
# How long to watch a hang that nothing can notice.
UNNOTICED_HANG_S = 10.0
# How long agents may take to notice the death of a rank or of another agent, and to end the others: generous.
_DEATH_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """How far a running attempt has come.

    ``first_step`` and ``last_step``: finished steps when its ranks started, and now; None if it reports none.
    ``saved``: the path or step of its newest checkpoint, as a phrase, empty without one. ``saves``: the checkpoints
    that the script itself has saved in this attempt. ``lines``: how many lines its ranks have printed.
    """

    first_step: int | None = None
    last_step: int | None = None
    total_steps: int | None = None
    saved: str = ""
    saves: Sequence[OwnCheckpoint] = ()
    lines: int = 0


def strike_moment(baseline: Baseline, sighting: Sighting) -> str | None:
    """How far the run has come, as a phrase, if a fault may strike now; None if it is too early."""
    if baseline.counts_steps:
        return _moment_by_steps(baseline, sighting)
    if baseline.saves_early and baseline.saves:
        return _moment_by_saves(baseline, sighting)
    if sighting.saves:
        return f"after its checkpoint {sighting.saves[-1].name}"
    if sighting.lines and sighting.lines >= baseline.lines * _SHARE_OF_LINES:
        return f"after line {sighting.lines} of its output"
    return None


def why_never(baseline: Baseline) -> str:
    """Why no fault can be injected into a run like the undisturbed one; empty if one can."""
    if baseline.counts_steps or baseline.saves or baseline.lines:
        return ""
    return "it reports no step, leaves no checkpoint and prints nothing, so nothing shows when it trains"


def _moment_by_steps(baseline: Baseline, sighting: Sighting) -> str | None:
    first, last = sighting.first_step, sighting.last_step
    # A rank that has not finished a step of this attempt may still be in its setup.
    if last is None or last <= (first or 0):
        return None
    if sighting.saved:
        return f"after step {last}, with {sighting.saved}"
    half = sighting.total_steps is not None and last >= _SHARE_OF_STEPS * sighting.total_steps
    if half or not baseline.saves_early:
        return f"after step {last}, before its first checkpoint"
    return None


def _moment_by_saves(baseline: Baseline, sighting: Sighting) -> str | None:
    if not sighting.saves:
        return None
    # Not after the very first one, if there will be more: a run that starts from the beginning again instead of
    # resuming gives itself away by saving an earlier step than the one that it was handed.
    steps = sorted({save.step for save in baseline.saves if save.step is not None})
    newest = max((save.step for save in sighting.saves if save.step is not None), default=None)
    if len(steps) > 2 and newest is not None and newest <= steps[0]:
        return None
    return f"after its checkpoint {sighting.saves[-1].name}"


# --- how long to wait -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a drill waits for a run before it ends the run itself. All in seconds.

    ``grace_s``: how long an announced stop may take. ``hang_after``: the spec's; None: judged by the step time.
    """

    baseline: Baseline
    grace_s: float
    hang_after: float | None = None

    @property
    def train_s(self) -> float:
        """How long one start of the run may train."""
        return max(_LONGER * self.baseline.seconds, self.baseline.seconds + _LONGER_S)

    def stop_s(self, fault: str) -> float:
        """How long the struck ranks may take to end."""
        if fault == "hang":
            return self._hang_s()
        return 2 * self.grace_s + LEAST_S if FAULTS[fault].announced else _DEATH_S

    def _hang_s(self) -> float:
        if not self.baseline.counts_steps:
            return UNNOTICED_HANG_S
        steps = self.baseline.run.step or 1
        usual = self.hang_after if self.hang_after is not None else max(LEAST_S, TIMES * self.baseline.seconds / steps)
        return 2 * usual + SAVE_S


def overdue(run: Run, injected: InjectedFault | None, patience: Patience, now: float) -> str:
    """Why the drill should end a run itself at ``now`` (seconds since 1970), without a full stop; empty: not yet.

    Time in the queue does not count: Slurm bounds it, not the run.

    Args:
        run: Its state, just read.
        injected: The fault; None if it has not been injected yet.
        patience: How long to wait.
        now: The time.
    """
    newest = run.newest
    if run.ended or newest is None or newest.started_at is None or newest.ended:
        return ""
    if injected is not None and newest.key == injected.attempt and len(newest.restarts) <= injected.restarts:
        waited, limit_s = now - injected.at, patience.stop_s(injected.fault)
        return f"nothing had ended its ranks {waited:.0f} s after the fault" if waited > limit_s else ""
    began = max([newest.started_at, *(float(restart["at"]) for restart in newest.restarts)])
    if now - began <= patience.train_s:
        return ""
    after = "it was still running" if injected else "nothing showed that it trains"
    usual_s = patience.baseline.seconds
    return f"{after} {now - began:.0f} s after it started, and the undisturbed run took {usual_s:.0f} s"
