"""A session's checkpoints: when the state is saved, and what training continues from."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.experiment.checkpoint import WEIGHTS, Every, EveryAuto, EverySteps, SaveMoment
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.interruption.interval import (
    Cost,
    InterruptionStats,
    IntervalChoice,
    SaveReason,
    Vote,
    choose,
)
from slurmtrain.model.run.events.checkpoint_events import SaveIntervalChosen
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.runtime.checkpoint.publisher import PublishPolicy, Save
from slurmtrain.runtime.checkpoint.restorer import Restored, Restorer
from slurmtrain.runtime.checkpoint.saver import Saver
from slurmtrain.runtime.checkpoint.state_dicts import Objects
from slurmtrain.runtime.job.metrics import plain_number
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.system.files import read_json
from slurmtrain.system.journal import Journal

_log = logging.getLogger("slurmtrain")
# Preparing the first save waits for this many agreements at most until all optimizers have a state to include.
_PATIENCE = 20
# Seconds between checks for a user's checkpoint request: each may take a round trip to a file server.
_LOOK_S = 1.0
# An interval is journaled again when it has changed by more than this fraction.
_CHANGED = 0.1


class Checkpointer:
    """All checkpoints of one attempt. Every method except :meth:`close` must be called on all ranks."""

    def __init__(
        self,
        attempt: AttemptDir,
        objects: Objects,
        plan: Plan,
        history: InterruptionStats,
        ranks: RankGroup,
        journal: Journal | None,
    ) -> None:
        """Set up saving and restoring ``objects`` in the run directory of ``attempt``, following ``plan``.

        ``history``: what is known about interruptions, on rank 0. ``ranks``: the group through which ranks communicate.
        ``journal``: rank 0's; None on other ranks.
        """
        spec = plan.spec.checkpoint
        policy = PublishPolicy(keep=spec.keep, quota=spec.quota, plan_hash=plan.hash, params=plan.spec.params)
        self._ranks = ranks
        self._objects = objects
        self._saver = Saver(attempt, objects, policy, ranks, journal)
        start = plan.spec.start_from
        self._weights_only = start is not None and start.load == WEIGHTS
        self._restorer = Restorer(attempt, objects, ranks, journal, hashes=spec.verify == "hashes", plan_hash=plan.hash)
        nodes = plan.spec.resources.nodes_of(ranks.world_size)
        self._schedule = Schedule(self._saver.run, spec.every, history, nodes, journal)
        self._patience = _PATIENCE
        self.saved_step: int | None = None
        """The step of the newest checkpoint that was published or restored."""
        self.longest_s = 0.0
        """The longest save so far, in seconds from begin to end, whether or not training continued during it."""

    def close(self, *, failed: bool) -> None:
        """Stop the background work, waiting for it to finish unless training has ``failed``. Affects only this rank."""
        self._saver.close(failed=failed)

    def restore(self, *, from_start: bool = False) -> Restored | None:
        """Load the newest usable checkpoint; None if there are no checkpoints.

        With ``from_start``, only another run's with which this one begins counts.

        Raises CheckpointError if there are checkpoints but none is usable.
        """
        restored = self._restorer.restore(from_start=from_start, weights_only=self._weights_only)
        if restored is not None:
            self.saved_step = restored.step
            if self._ranks.rank == 0:
                _log.info("restored the checkpoint of step %d", restored.step)
                if restored.lost_steps:
                    _log.warning("newer checkpoints are damaged: %d steps are lost", restored.lost_steps)
                for name in restored.rederived:
                    _log.warning("%s was saved by a different number of ranks and could not be carried over", name)
        return restored

    def begin_training(self) -> None:
        """Start the clocks: intervals count from now."""
        self._schedule.begin()

    @property
    def saving_step(self) -> int | None:
        """The step that is being saved; None if no save is in progress."""
        return self._saver.step

    # --- between steps ------------------------------------------------------------------------------------------------

    def next_step(self, step: int) -> int | None:
        """The first step after ``step`` at which ranks must agree as ``checkpoint.every`` counts steps, or None."""
        return self._schedule.next_step(step)

    def complete(self, vote: Vote, step: int) -> Vote:
        """The ``vote`` of this rank after ``step`` finished steps, with its checkpoint fields filled in."""
        writing, publication = self._saver.progress()
        save = self._schedule.due(step) if self._ranks.rank == 0 else SaveReason.NONE
        return replace(vote, save=save, writing=writing, publication=publication)

    def advance(self, step: int, agreed: Vote, metrics: Mapping[str, Any]) -> None:
        """Advance the save in progress and begin one that is due, as all ranks have ``agreed`` after ``step``.

        ``metrics``: the latest, for the manifest. Raises CheckpointError if the state can never be saved.
        """
        # The save in progress comes first: there is one save at a time, and its cost decides when the next one pays.
        self._end(self._saver.advance(agreed))
        if agreed.save:
            self._begin_due(step, agreed.save.why, metrics)
        else:
            self._prepare()

    def _begin_due(self, step: int, why: str, metrics: Mapping[str, Any]) -> None:
        """Save this step while training continues, after waiting for any save still in progress."""
        self._end(self._saver.finish(stalls=True))
        if step == self.saved_step:
            return
        problem = self._begin(_save_info(step, why, metrics, self._schedule.take_request()))
        self._schedule.began()
        if problem:
            self._warn(step, problem)

    def _prepare(self) -> None:
        """Prepare the first save once optimizers have a state, so that it is as short as later ones.

        Raises CheckpointError if the state can never be saved.
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
        # The script itself produces the state of step 0, so nothing is lost without a checkpoint of it.
        if step in (self.saved_step, 0):
            return None
        problem = self._begin(_save_info(step, why, metrics))
        if problem:
            self._warn(step, problem)
            return problem
        outcome = self._saver.finish()
        self._end(outcome)
        return outcome.problem or None if outcome else None

    def _begin(self, save: Save) -> str | None:
        self._patience = 0
        return self._saver.begin(save)

    def _end(self, outcome: Save | None) -> None:
        if outcome is None:
            return
        self.longest_s = max(self.longest_s, time.monotonic() - outcome.began)
        if outcome.problem:
            self._warn(outcome.step, outcome.problem)
        else:
            self.saved_step = outcome.step
        self._schedule.ended(outcome)

    def _warn(self, step: int, problem: str) -> None:
        if self._ranks.rank == 0:
            _log.warning("the checkpoint of step %d was not saved: %s", step, problem)


def _save_info(step: int, why: str, metrics: Mapping[str, Any], request: str | None = None) -> Save:
    numbers = {name: float(plain_number(name, value)) for name, value in metrics.items()}
    return Save(step=step, why=why, metrics=numbers, request=request)


class Schedule:
    """When rank 0 wants a checkpoint: according to ``checkpoint.every``, or because a user requests one.

    Other ranks use it only for the next step of an interval in steps. Times are seconds of the monotonic clock.
    """

    def __init__(
        self, run: RunDir, every: Every, history: InterruptionStats, nodes: int, journal: Journal | None
    ) -> None:
        """Decide for ``run`` on ``nodes`` nodes, from ``every`` in the spec and the ``history`` of interruptions.

        The intervals that ``every: auto`` chooses are recorded in the ``journal``, on rank 0.
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
        """Note that training begins now."""
        self._began = self._saved_at = time.monotonic()
        self._choose()

    def next_step(self, step: int) -> int | None:
        """The first step after ``step`` that is saved regardless of the clock; None if there is none."""
        return self._every.next_step(step) if isinstance(self._every, EverySteps) else None

    def due(self, step: int) -> SaveReason:
        """Why to save now, after ``step`` finished steps; NONE if nothing is due."""
        if self._is_requested():
            return SaveReason.REQUESTED
        if self._choice is None:
            return SaveReason.NONE
        since_save_s = time.monotonic() - self._saved_at
        if not self._every.is_due(SaveMoment(step=step, since_save_s=since_save_s, optimum_s=self._choice.seconds)):
            return SaveReason.NONE
        return SaveReason.STEPS if isinstance(self._every, EverySteps) else SaveReason.INTERVAL

    def began(self) -> None:
        """Note that a save has begun and training continues: the next interval counts from now."""
        self._saved_at = time.monotonic()

    def ended(self, outcome: Save) -> None:
        """Note how a save ended: its cost changes how often saving pays."""
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
        """The id of the request that the next save answers, returned only once."""
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
        """The request file's inode and modification time (ns), which change when the file is replaced."""
        try:
            status = self._run.request.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns
