"""A session's checkpoints: what is saved, when, and what is gone on from. Every method is called on all ranks alike."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from slurmtrain.model.interruption.interval import InterruptionStats
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.model.spec.plan import Plan
from slurmtrain.runtime.checkpoint.publisher import PublishPolicy, SaveInfo
from slurmtrain.runtime.checkpoint.restorer import Restored, Restorer
from slurmtrain.runtime.checkpoint.saver import SaveOutcome, Saver
from slurmtrain.runtime.checkpoint.schedule import Due, Schedule
from slurmtrain.runtime.checkpoint.state_dicts import Objects
from slurmtrain.runtime.job.metrics import as_number
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.system.journal import Journal

_log = logging.getLogger("slurmtrain")
# So many times of agreeing an optimizer is waited for that has not made a step yet.
_PATIENCE = 20


class Checkpointer:
    """All checkpoints of one attempt."""

    def __init__(
        self,
        attempt: AttemptDir,
        objects: Objects,
        plan: Plan,
        history: InterruptionStats,
        ranks: RankGroup,
        journal: Journal | None,
    ) -> None:
        """``journal`` is rank 0's; the other ranks have none."""
        spec = plan.spec.checkpoint
        policy = PublishPolicy(keep=spec.keep, quota=spec.quota, plan_hash=plan.hash, params=plan.spec.params)
        self._ranks = ranks
        self._objects = objects
        self._saver = Saver(attempt, objects, policy, ranks, journal)
        self._restorer = Restorer(attempt, objects, ranks, journal, hashes=spec.verify == "hashes", plan_hash=plan.hash)
        nodes = max(1, ranks.world_size // plan.spec.resources.local_world_size)
        self._schedule = Schedule(attempt.run, spec.every, history, nodes, journal)
        self._metrics: dict[str, Any] = {}
        self._waits = _PATIENCE
        self.saved_step: int | None = None
        """The step of the newest checkpoint that was published or restored."""
        self.longest_s = 0.0
        """Seconds from the beginning of a save to its end, whether training went on or not: the most so far."""
        self._began = 0.0

    def close(self, *, failed: bool) -> None:
        """End what works in the background; when it is done, unless training has failed. On this rank alone."""
        self._saver.close(failed=failed)

    def restore(self) -> Restored | None:
        """Go on from the newest good checkpoint. Raises CheckpointError where there are some and none is good."""
        restored = self._restorer.restore()
        if restored is not None:
            self.saved_step = restored.step
            if self._ranks.rank == 0:
                _log.info("restored the checkpoint of step %d", restored.step)
                if restored.lost_steps:
                    _log.warning("newer checkpoints are damaged: %d steps are lost", restored.lost_steps)
                for name in restored.rederived:
                    _log.warning("%s was saved by another number of ranks, and could not be carried over", name)
        return restored

    def begin_training(self) -> None:
        """Count times from now."""
        self._schedule.begin()

    def prepare(self) -> None:
        """Make the first save as short as later ones, once optimizers have a state; to be called each time.

        Raises CheckpointError where the state can never be saved.
        """
        if self._waits == 0 or self._saver.step is not None:
            return
        self._waits -= 1
        if self._waits and self._ranks.greatest(int(not self._objects.have_begun()))[0]:
            return
        self._waits = 0
        self._saver.prepare()

    @property
    def saving_step(self) -> int | None:
        """The step that is being saved; None when nothing is."""
        return self._saver.step

    # --- between steps ------------------------------------------------------------------------------------------------

    def numbers(self) -> tuple[int, int, int]:
        """What this rank has to say when ranks agree: each gets the greatest that any gives."""
        due = self._schedule.due() if self._ranks.rank == 0 else Due.NOT
        return (due, *self._saver.progress())

    def agreed(self, step: int, due: int, writing: int, news: int) -> None:
        """Go on with a save that is under way, and begin one that is due."""
        self._end(self._saver.advance(writing, news))
        if due:
            self.begin(step, Due(due).why)

    def is_due_at(self, step: int) -> bool:
        """Whether to save after this step whatever the clock says; no rank needs to ask another."""
        return self._schedule.is_due_at(step)

    def begin(self, step: int, why: str) -> None:
        """Save this step while training goes on; a save that is still under way is waited for."""
        self._end(self._saver.finish(stalls=True))
        if step == self.saved_step:
            return
        self._waits = 0
        request = self._schedule.take_request()
        problem = self._begin(self._about(step, why, request))
        self._schedule.began()
        if problem:
            self._warn(step, problem)

    def save(self, step: int, why: str) -> str | None:
        """Save this step, and wait until it is published. Returns why that failed, or None."""
        self._end(self._saver.finish())
        if step in (self.saved_step, 0):
            return None
        problem = self._begin(self._about(step, why))
        if problem:
            self._warn(step, problem)
            return problem
        outcome = self._saver.finish()
        self._end(outcome)
        return outcome.problem or None if outcome else None

    def _begin(self, about: SaveInfo) -> str | None:
        self._began = time.monotonic()
        return self._saver.begin(about)

    def note_metrics(self, metrics: Mapping[str, Any]) -> None:
        """The latest metrics, which go into manifests: numbers, or what is one once it is read."""
        self._metrics.update(metrics)

    def _about(self, step: int, why: str, request: str | None = None) -> SaveInfo:
        metrics = {name: float(as_number(name, value)) for name, value in self._metrics.items()}
        return SaveInfo(step=step, why=why, metrics=metrics, request=request)

    def _end(self, outcome: SaveOutcome | None) -> None:
        if outcome is None:
            return
        self.longest_s = max(self.longest_s, time.monotonic() - self._began)
        if outcome.problem:
            self._warn(outcome.step, outcome.problem)
        else:
            self.saved_step = outcome.step
        self._schedule.ended(outcome)

    def _warn(self, step: int, problem: str) -> None:
        if self._ranks.rank == 0:
            _log.warning("the checkpoint of step %d was not saved: %s", step, problem)
