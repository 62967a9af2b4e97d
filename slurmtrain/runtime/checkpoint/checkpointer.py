"""A session's checkpoints: when the state is saved, and what training continues from."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.interruption.interval import (
    Cost,
    InterruptionStats,
    IntervalChoice,
    SaveReason,
    Vote,
    choose,
)
from slurmtrain.model.run.events.checkpoint import SaveIntervalChosen
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.spec.checkpoint_every import Every, EveryAuto, EverySteps, SaveMoment
from slurmtrain.model.spec.plan import Plan
from slurmtrain.runtime.checkpoint.publisher import PublishPolicy, SaveInfo
from slurmtrain.runtime.checkpoint.restorer import Restored, Restorer
from slurmtrain.runtime.checkpoint.saver import SaveOutcome, Saver
from slurmtrain.runtime.checkpoint.state_dicts import Objects
from slurmtrain.runtime.job.metrics import as_number
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.system.files import read_json
from slurmtrain.system.journal import Journal

_log = logging.getLogger("slurmtrain")
# At so many agreements the first save is prepared only once all optimizers have made a step, whose state it includes.
_PATIENCE = 20
# How often to look for a person's request of a checkpoint: it may take a round trip to a file server.
_LOOK_S = 1.0
# An interval is journaled again when it has changed by this part of itself.
_CHANGED = 0.1


class Checkpointer:
    """All checkpoints of one attempt. Every method but :meth:`close` is called on all ranks alike."""

    def __init__(
        self,
        attempt: AttemptDir,
        objects: Objects,
        plan: Plan,
        history: InterruptionStats,
        ranks: RankGroup,
        journal: Journal | None,
    ) -> None:
        """Set up saving and restoring ``objects`` in the run directory of ``attempt``, as ``plan`` has it.

        ``history``: what is known of interruptions, on rank 0. ``ranks`` talk to each other through this group.
        ``journal`` is rank 0's; the other ranks have none.
        """
        spec = plan.spec.checkpoint
        policy = PublishPolicy(keep=spec.keep, quota=spec.quota, plan_hash=plan.hash, params=plan.spec.params)
        self._ranks = ranks
        self._objects = objects
        self._saver = Saver(attempt, objects, policy, ranks, journal)
        self._restorer = Restorer(attempt, objects, ranks, journal, hashes=spec.verify == "hashes", plan_hash=plan.hash)
        nodes = max(1, ranks.world_size // plan.spec.resources.local_world_size)
        self._schedule = Schedule(attempt.run, spec.every, history, nodes, journal)
        self._patience = _PATIENCE
        self.saved_step: int | None = None
        """The step of the newest checkpoint that was published or restored."""
        self.longest_s = 0.0
        """Seconds from the beginning of a save to its end, whether training went on or not: the most so far."""
        self._began = 0.0

    def close(self, *, failed: bool) -> None:
        """End what works in the background; when it is done, unless training has failed. On this rank alone."""
        self._saver.close(failed=failed)

    def restore(self) -> Restored | None:
        """Load the newest good checkpoint; None where there is none at all.

        Raises CheckpointError where there are some and none is good.
        """
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

    @property
    def saving_step(self) -> int | None:
        """The step that is being saved; None when nothing is."""
        return self._saver.step

    # --- between steps ------------------------------------------------------------------------------------------------

    def next_step(self, step: int) -> int | None:
        """The first step after ``step`` at which ranks have to agree, since ``checkpoint.every`` counts steps."""
        return self._schedule.next_step(step)

    def complete(self, vote: Vote, step: int) -> Vote:
        """The ``vote`` of this rank after ``step`` finished steps, with what it has to say about checkpoints."""
        writing, publication = self._saver.progress()
        save = self._schedule.due(step) if self._ranks.rank == 0 else SaveReason.NONE
        return replace(vote, save=save, writing=writing, publication=publication)

    def advance(self, step: int, agreed: Vote, metrics: Mapping[str, Any]) -> None:
        """Take a save under way further, and begin one that is due, as all ranks have ``agreed`` after ``step``.

        ``metrics``: the latest, for the manifest. Raises CheckpointError where the state can never be saved.
        """
        # First what is under way: there is one save at a time, and its cost decides when the next one pays.
        self._end(self._saver.advance(agreed))
        if agreed.save:
            self._begin_due(step, agreed.save.why, metrics)
        else:
            self._prepare()

    def _begin_due(self, step: int, why: str, metrics: Mapping[str, Any]) -> None:
        """Save this step while training continues; a save that is still under way is waited for."""
        self._end(self._saver.finish(stalls=True))
        if step == self.saved_step:
            return
        problem = self._begin(_save_info(step, why, metrics, self._schedule.take_request()))
        self._schedule.began()
        if problem:
            self._warn(step, problem)

    def _prepare(self) -> None:
        """Make the first save as short as later ones, once optimizers have a state.

        Raises CheckpointError where the state can never be saved.
        """
        if self._patience == 0 or self._saver.step is not None:
            return
        self._patience -= 1
        if self._patience and self._ranks.greatest(int(not self._objects.have_begun()))[0]:
            return
        self._patience = 0
        self._saver.prepare()

    def save(self, step: int, why: str, metrics: Mapping[str, Any]) -> str | None:
        """Save ``step``, and wait until it is published. Returns why that failed, or None.

        ``why`` and the latest ``metrics`` go into the manifest.
        """
        self._end(self._saver.finish())
        # Step 0 is what the script makes of itself: nothing is lost without a checkpoint of it.
        if step in (self.saved_step, 0):
            return None
        problem = self._begin(_save_info(step, why, metrics))
        if problem:
            self._warn(step, problem)
            return problem
        outcome = self._saver.finish()
        self._end(outcome)
        return outcome.problem or None if outcome else None

    def _begin(self, info: SaveInfo) -> str | None:
        self._patience = 0
        self._began = time.monotonic()
        return self._saver.begin(info)

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


def _save_info(step: int, why: str, metrics: Mapping[str, Any], request: str | None = None) -> SaveInfo:
    numbers = {name: float(as_number(name, value)) for name, value in metrics.items()}
    return SaveInfo(step=step, why=why, metrics=numbers, request=request)


class Schedule:
    """When rank 0 wants a checkpoint: as ``checkpoint.every`` has it, or because a person asks for one.

    On other ranks it only knows the next step of an interval of steps. Times are of the monotonic clock, in seconds.
    """

    def __init__(
        self, run: RunDir, every: Every, history: InterruptionStats, nodes: int, journal: Journal | None
    ) -> None:
        """Decide for ``run`` on ``nodes`` nodes, by ``checkpoint.every`` and the ``history`` of interruptions.

        What ``every: auto`` comes to is noted in the ``journal``, on rank 0.
        """
        self._run = run
        self._every = every
        self._history = history
        self._nodes = nodes
        self._journal = journal
        self._cost = Cost()
        self._began = self._saved_at = self._looked_at = time.monotonic()
        self._stamp = self._stamp_of_request()
        self._request: str | None = None
        self._choice: IntervalChoice | None = None

    def begin(self) -> None:
        """Training begins."""
        self._began = self._saved_at = time.monotonic()
        self._choose()

    def next_step(self, step: int) -> int | None:
        """The first step after ``step`` that is saved whatever the clock says; None: there is none."""
        return self._every.next_step(step) if isinstance(self._every, EverySteps) else None

    def due(self, step: int) -> SaveReason:
        """Why to save now, after ``step`` finished steps; NONE: nothing is due."""
        if self._is_requested():
            return SaveReason.REQUESTED
        if self._choice is None:
            return SaveReason.NONE
        since_save_s = time.monotonic() - self._saved_at
        if not self._every.is_due(SaveMoment(step=step, since_save_s=since_save_s, optimum_s=self._choice.seconds)):
            return SaveReason.NONE
        return SaveReason.STEPS if isinstance(self._every, EverySteps) else SaveReason.INTERVAL

    def began(self) -> None:
        """A save has begun, and training continues: its next interval counts from now."""
        self._saved_at = time.monotonic()

    def ended(self, outcome: SaveOutcome) -> None:
        """A save ended: what it has cost changes how often it pays."""
        if not outcome.problem:
            self._cost.add(stall_s=outcome.stall_s, save_s=outcome.seconds)
            self._choose()

    def _choose(self) -> None:
        choice = choose(
            self._history,
            nodes=self._nodes,
            uptime_s=time.monotonic() - self._began,
            stall_s=self._cost.stall_s,
            save_s=self._cost.save_s,
        )
        before, self._choice = self._choice, choice
        if self._journal is None or not isinstance(self._every, EveryAuto):
            return
        if before is None or abs(choice.seconds - before.seconds) > _CHANGED * before.seconds:
            with contextlib.suppress(OSError):
                self._journal.write(SaveIntervalChosen(**choice.to_dict()))

    def take_request(self) -> str | None:
        """The id of the request that the next save answers, once."""
        request, self._request = self._request, None
        return request

    def _is_requested(self) -> bool:
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            stamp = self._stamp_of_request()
            if stamp != self._stamp:
                self._stamp = stamp
                with contextlib.suppress(PathError):
                    self._request = (read_json(self._run.request) or {}).get("request")
        return self._request is not None

    def _stamp_of_request(self) -> tuple[int, int] | None:
        """What changes when the file of the request is replaced: its inode and time, in nanoseconds."""
        try:
            status = self._run.request.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns
