"""The checkpoint that ranks resume from, and the newest one: slurmtrain's, or one that a script saves by itself."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.model.experiment.checkpoint import OWN, WEIGHTS
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.interruption.policy import Newest, prior_ends, suspects
from slurmtrain.model.run.events.checkpoint_events import CheckpointFound, CheckpointPassedOver
from slurmtrain.model.run.layout import AttemptDir, checkpoint_step
from slurmtrain.runtime.checkpoint.checkpoint_files import newest_published, start_point
from slurmtrain.runtime.job.run_reader import read_run
from slurmtrain.system.journal import Journal

if TYPE_CHECKING:
    from slurmtrain.runtime.checkpoint.external import ExternalCheckpoint, Search


class CheckpointFinder:
    """Finds the checkpoints of a run on behalf of its agent, and journals a script's own."""

    def __init__(self, attempt: AttemptDir, plan: Plan, journal: Journal, since: float | None) -> None:
        """For an ``attempt`` of a run with this ``plan``.

        ``journal``: its agent's. ``since``: a script's own checkpoints count only if they are newer (seconds since
        1970).
        """
        self._attempt = attempt
        self._plan = plan
        self._journal = journal
        self._since = since
        self.resumed_at: float | None = None
        """When what was chosen last was saved by the script, in seconds since 1970; None if it saved nothing."""
        # Why ranks do not resume from some: by fingerprint, and by path and time of saving.
        self._suspects: Mapping[str, str] = {}
        self._damaged: Mapping[tuple[str, float], str] = {}

    @cached_property
    def _search(self) -> Search | None:
        """Where the script's own checkpoints are: known once the run has its copy of the code. None if it has none."""
        if self._plan.spec.checkpoint.glob is None:
            return None
        # Late, here and below: a run whose scripts have no checkpoints of their own needs none of their formats.
        from slurmtrain.runtime.checkpoint.external import Search

        return Search.from_plan(self._plan, self._attempt.run, self._since)

    def choose(self) -> tuple[str | None, Newest]:
        """The checkpoint that the next ranks resume from: its path, and its description.

        The path is None for the beginning, or if the script looks itself. For a script's own checkpoints, the chosen
        one and those that are passed over are journaled.
        """
        if self._search is None:
            published = newest_published(self._attempt.run.checkpoints) or start_point(self._attempt.run)
            return str(published) if published else None, self.newest()
        if self._plan.spec.checkpoint.format == OWN:
            return None, self._note(self._select()[0])
        run = read_run(self._attempt.run)
        self._suspects = suspects(prior_ends(run.attempts, run.checkpoints))
        self._damaged = {
            (each.path, each.saved_at): "'slurmtrain verify' found it damaged"
            for each in run.checkpoints
            if each.on_disk and not each.complete
        }
        checkpoint, passed_over = self._select()
        if checkpoint is None:
            return self.choose_start()
        for each, fingerprint, why in passed_over:
            self._journal.write(
                CheckpointPassedOver(path=str(each.path), step=each.step, fingerprint=fingerprint, why=why)
            )
        return str(checkpoint.path) if checkpoint else None, self._note(checkpoint)

    def choose_start(self) -> tuple[str | None, Newest]:
        """The checkpoint of another run that the run begins with, as :meth:`choose` returns one."""
        run = self._attempt.run
        if self._search is None:
            start = start_point(run)
            return str(start) if start else None, self._at_start(start)
        from slurmtrain.runtime.checkpoint.external import newest

        pattern = str(Path(glob.escape(str(run.start))) / "*")
        start_of_script = newest(replace(self._search, pattern=pattern, since=None))
        return str(start_of_script.path) if start_of_script else None, self._note(start_of_script)

    def _at_start(self, start: Path | None) -> Newest:
        """Where training begins with another run's checkpoint."""
        spec = self._plan.spec.start_from
        if start is None or (spec is not None and spec.load == WEIGHTS):
            return Newest()
        return Newest(checkpoint_step(start.name) or 0)

    def newest(self) -> Newest:
        """The newest checkpoint that is not passed over."""
        if self._search is None:
            published = newest_published(self._attempt.run.checkpoints)
            if published is None:
                return self._at_start(start_point(self._attempt.run))
            return Newest(checkpoint_step(published.name) or 0)
        return _newest_of(self._select()[0])

    def note_newest(self) -> None:
        """Journal the newest of the script's own checkpoints, if it has any."""
        if self._search is not None:
            self._note(self._select()[0])

    def _select(self) -> tuple[ExternalCheckpoint | None, list[tuple[ExternalCheckpoint, str | None, str]]]:
        """The newest complete checkpoint to resume from, and the ones that are passed over for it, with the reasons.

        If all are suspected, the newest of them is returned, and none is passed over.
        """
        from slurmtrain.runtime.checkpoint.external import find_checkpoints

        assert self._search is not None
        complete = [each for each in find_checkpoints(self._search) if each.complete]
        passed_over: list[tuple[ExternalCheckpoint, str | None, str]] = []
        for checkpoint in complete:
            fingerprint = checkpoint.fingerprint() if self._suspects else None
            why = self._suspects.get(fingerprint or "") or self._damaged.get(
                (str(checkpoint.path), checkpoint.saved_at)
            )
            if why is None:
                return checkpoint, passed_over
            passed_over.append((checkpoint, fingerprint, why))
        return (complete[0] if complete else None), []

    def _note(self, checkpoint: ExternalCheckpoint | None) -> Newest:
        """Journal a checkpoint that was found; returns its description."""
        self.resumed_at = checkpoint.saved_at if checkpoint is not None else None
        newest = _newest_of(checkpoint)
        if checkpoint is not None:
            self._journal.write(
                CheckpointFound(
                    path=str(checkpoint.path),
                    step=checkpoint.step,
                    bytes=checkpoint.bytes,
                    saved_at=checkpoint.saved_at,
                    format=checkpoint.format,
                    fingerprint=newest.fingerprint,
                    step_from=checkpoint.step_from,
                )
            )
        return newest


def _newest_of(checkpoint: ExternalCheckpoint | None) -> Newest:
    return Newest() if checkpoint is None else Newest(checkpoint.step or 0, checkpoint.fingerprint())
