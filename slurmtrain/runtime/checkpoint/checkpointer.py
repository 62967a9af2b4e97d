"""A session's checkpoints: when the state is saved, and what training continues from.

Restoring takes the newest checkpoint whose files are as they were written, on all ranks together. Each rank verifies
its share of the files. Once an older checkpoint has been restored, newer ones that could not be used are renamed to
``damaged-``. Names and shapes are compared before anything is loaded into the model.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from torch.distributed.checkpoint.api import CheckpointException

from slurmtrain.errors import CheckpointError, PathError
from slurmtrain.model.experiment.checkpoint import WEIGHTS, Every
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.interruption.interval import (
    Cost,
    InterruptionStats,
    IntervalChoice,
    SaveReason,
    Vote,
    choose_interval,
)
from slurmtrain.model.run.events.checkpoint_events import (
    CheckpointRejected,
    CheckpointRestored,
    SaveIntervalChosen,
    WeightsLoaded,
)
from slurmtrain.model.run.layout import AttemptDir, RunDir, checkpoint_step
from slurmtrain.runtime.checkpoint import checkpoint_files, rng
from slurmtrain.runtime.checkpoint.saver import PublishPolicy, Save, Saver
from slurmtrain.runtime.checkpoint.shard_plan import (
    MISSING,
    SPLIT,
    OwnStates,
    equal,
    is_split,
    own_name,
    read_own,
    read_shared,
)
from slurmtrain.runtime.checkpoint.state_dicts import Objects, differences
from slurmtrain.runtime.checkpoint.torch_index import Index
from slurmtrain.runtime.job.metrics import plain_number
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.system.files import describe_os_error, read_json
from slurmtrain.system.journal import Journal

# At most this many differences between a model and a checkpoint are listed, to keep the message readable.
_LISTED = 10
RNG = "rng"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Restored:
    """What a run continues from: the step, and this rank's generator states (None if they were derived anew).

    ``rederived``: state that was saved by a different number of ranks and could not be carried over unchanged.
    """

    step: int
    rng: dict[str, Any] | None
    lost_steps: int = 0
    rederived: tuple[str, ...] = ()


class Restorer:
    """Restores checkpoints of a run. Every public method must be called on all ranks."""

    def __init__(
        self,
        attempt: AttemptDir,
        objects: Objects,
        ranks: RankGroup,
        journal: Journal | None,
        *,
        hashes: bool,
        plan_hash: str | None,
    ) -> None:
        """Restore ``objects`` from checkpoints of the run of ``attempt``, on these ``ranks``.

        ``journal``: rank 0's; None on other ranks. ``hashes``: whether verifying reads the files to hash them.
        ``plan_hash``: part of the seed of random numbers if a rank's generator states were not saved.
        """
        self._attempt = attempt
        self._run = attempt.run
        self._objects = objects
        self._ranks = ranks
        self._journal = journal
        self._hashes = hashes
        self._plan_hash = plan_hash

    def restore(self, *, from_start: bool = False, weights_only: bool = False) -> Restored | None:
        """Load the newest checkpoint whose files are as they were written; None if none was ever published.

        If the run has none of its own, or with ``from_start``, it loads the checkpoint of another run that the run
        begins with; with ``weights_only``, only modules are loaded from that one.

        Newer ones that cannot be used are renamed, or a later attempt might continue from one of them. Raises
        CheckpointError if there are checkpoints but none can be used, and leaves all of them in place: silently
        starting again would hide the problem. Also raises it if the newest good one does not fit what the script
        registered.
        """
        began = time.monotonic()
        # Rank 0's listing counts: nodes may see different states of a directory on a file server.
        own = [] if from_start else checkpoint_files.published(self._run.checkpoints)
        # The other run's counts only until this run has a checkpoint of its own: what was trained since would be lost.
        listed = own or checkpoint_files.published(self._run.start)[:1]
        checkpoints = [Path(path) for path in self._ranks.broadcast(list(map(str, listed)))]
        of_another_run = bool(checkpoints) and checkpoints[0].parent == self._run.start
        if weights_only and of_another_run:
            return self._load_weights(checkpoints[0], began)
        problems: dict[Path, str] = {}
        for directory in checkpoints:
            problem, manifest = self._check(directory)
            if manifest is not None and not problem:
                try:
                    index, unfit = self._load_shared(directory, manifest)
                except _Unreadable as error:
                    problem = str(error)
                else:
                    work = partial(self._load_own, index, manifest)
                    rng_states, rederived = self._together(work, CheckpointError, unfit)
                    self._reject(problems)
                    lost_steps = _saved_step(checkpoints[0]) - manifest.step
                    restored = Restored(manifest.step, rng_states, lost_steps, rederived)
                    self._note(directory, manifest, restored, began)
                    return restored
            problems[directory] = problem
        if problems and of_another_run:
            raise CheckpointError(f"the checkpoint that the run begins with cannot be used: {problem}")
        if problems:
            raise CheckpointError(
                "no checkpoint can be restored, and starting over would lose all of them: "
                + "; ".join(f"{directory.name}: {problem}" for directory, problem in problems.items())
                + f"; to start over anyway: 'slurmtrain resume --from-start {self._run.id}'"
            )
        return None

    # --- verifying ----------------------------------------------------------------------------------------------------

    def _check(self, directory: Path) -> tuple[str, checkpoint_files.Manifest | None]:
        """Verify a checkpoint, each rank its share of the files: why it cannot be used, and its manifest."""
        problem, manifest = "", None
        try:
            manifest = checkpoint_files.read_manifest(directory)
            # Reading takes most of the time: each rank checks some of the files, and then all share their problems.
            share = sorted(manifest.files)[self._ranks.rank :: self._ranks.world_size]
            checkpoint_files.verify_files(directory, manifest, share, hashes=self._hashes)
        except CheckpointError as error:
            problem = str(error)
        problems = [text for text in self._ranks.gather(problem) if text]
        return (problems[0] if problems else ""), manifest

    def _reject(self, problems: Mapping[Path, str]) -> None:
        if self._journal is None:
            return
        for directory, problem in problems.items():
            # One that cannot be renamed stays where it is: the next attempt verifies it again, and rejects it again.
            aside = None
            with contextlib.suppress(OSError):
                aside = checkpoint_files.relative_path(checkpoint_files.set_aside(directory))
            path = checkpoint_files.relative_path(directory)
            self._journal.write(CheckpointRejected(step=_saved_step(directory), path=path, reason=problem, aside=aside))

    # --- loading ------------------------------------------------------------------------------------------------------

    def _load_weights(self, directory: Path, began: float) -> Restored:
        """Load the modules of another run's checkpoint, to begin at step 0. Raises CheckpointError."""
        problem, manifest = self._check(directory)
        if manifest is None or problem:
            raise CheckpointError(f"the weights to begin with cannot be used: {problem}")
        modules = self._objects.modules()
        if not any(True for _ in modules):
            raise CheckpointError("'start_from.load: weights' needs a module registered with run.checkpoint()")
        # It only loads: it neither notes a restore in a journal nor derives generators from a plan's hash.
        loader = Restorer(self._attempt, modules, self._ranks, None, hashes=self._hashes, plan_hash=None)
        loader._load_shared(directory, manifest)
        if self._journal is not None:
            took_s = round(time.monotonic() - began, 6)
            self._journal.write(
                WeightsLoaded(path=checkpoint_files.relative_path(directory), step=manifest.step, took_s=took_s)
            )
        return Restored(0, None)

    def _load_shared(self, directory: Path, manifest: checkpoint_files.Manifest) -> tuple[Index, str]:
        """Load what ranks share; returns the index, and what to say if the rest does not fit."""
        index = self._together(lambda: Index(directory), _Unreadable, "its index cannot be read")
        unfit = f"{directory} does not match the objects that the script registered"
        split = is_split(manifest)
        # Small values of all ranks: rank 0 reads them for the others.
        reads = self._ranks.rank == 0 or not split
        work = partial(read_shared, index, manifest) if reads else dict[str, Any]
        shared: dict[str, Any] = self._together(work, _Unreadable, "its values cannot be read")
        shared = self._ranks.broadcast(shared) if split else shared
        targets = self._together(lambda: self._targets(index, manifest, shared), CheckpointError, unfit)
        tensors = self._together(self._comparison(index, targets), CheckpointError, unfit)
        try:
            # Not in _together(): all ranks get torch's exception, which has the errors of each.
            index.read(tensors, self._ranks.group)
        except CheckpointException as error:
            raise _Unreadable(f"it cannot be read: {_failure_in_words(error)}") from error
        own_names = self._own_names(manifest)
        self._together(lambda: self._objects.load(tensors, shared, own_names), CheckpointError, unfit)
        return index, unfit

    def _together(self, work: Callable[[], T], failure: type[CheckpointError], problem: str) -> T:
        """Do ``work`` on all ranks; if it raises on any, all raise ``failure``, saying ``problem`` and why."""
        result: list[T] = []
        error = ""
        try:
            result.append(work())
        except Exception as raised:  # noqa: BLE001 (a state may raise anything, and the other ranks are waiting)
            error = _failure_in_words(raised)
        errors = [text for text in self._ranks.gather(error) if text]
        if errors:
            raise failure(f"{problem}: {errors[0]}")
        return result[0]

    def _targets(self, index: Index, manifest: checkpoint_files.Manifest, shared: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of this rank. Raises CheckpointError if its objects differ from the checkpoint's."""
        for name, kind in self._objects.kinds().items():
            if name not in manifest.objects:
                if name in self._objects.additions:
                    continue
                raise CheckpointError(f"it has no {name!r}")
            saved = {key: value for key, value in manifest.objects[name].items() if key != SPLIT}
            if saved != kind:
                raise CheckpointError(f"its {name!r} has another type: {saved}, not {kind}")
        return self._objects.template(shared, index)

    def _comparison(self, index: Index, targets: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """A function that returns this rank's ``targets`` that are in the checkpoint.

        It raises CheckpointError if the tensors of all ranks together differ from the checkpoint's.
        """
        shapes = {name: tuple(value.shape) for name, value in targets.items()}
        optional = self._objects.optional()
        # A hash first: ranks usually have the same tensors, and need not send each other all names and shapes then.
        names = xxhash.xxh64_intdigest(repr(sorted(shapes.items())).encode())
        if len(set(self._ranks.gather(names))) > 1:
            # Ranks have different parts of a model, or of the state of an optimizer.
            gathered = self._ranks.gather((shapes, optional, list(self._objects)))
        else:
            gathered = [(shapes, optional, list(self._objects))]
        everywhere = {name: shape for own, _, _ in gathered for name, shape in own.items()}
        registered = {name for _, _, own in gathered for name in own}
        anywhere = tuple({prefix for _, own, _ in gathered for prefix in own})
        # What the script does not register, as everything but modules with weights alone, is no difference.
        saved = {name: shape for name, shape in index.shapes().items() if name.partition(".")[0] in registered}

        def compare() -> dict[str, Any]:
            problems = differences({**everywhere, **shapes}, saved, anywhere)
            if problems:
                more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
                raise CheckpointError("; ".join(problems[:_LISTED]) + more)
            return {name: value for name, value in targets.items() if name in saved}

        return compare

    def _load_own(
        self, index: Index, manifest: checkpoint_files.Manifest
    ) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """Load this rank's own state, resharded if the number of ranks has changed.

        Returns its generator states, and the names of what had to be derived anew.
        """
        names = self._own_names(manifest)
        if manifest.world_size == self._ranks.world_size:
            for name in names:
                state = read_own(index, self._ranks.rank, name)
                if state is MISSING:
                    raise CheckpointError(f"rank {self._ranks.rank} had no {name!r}")
                self._objects[name].load_state_dict(state)
            rng_states: dict[str, Any] = index.value(own_name(self._ranks.rank))["rng"]
            return rng_states, ()
        rederived = [RNG]
        for name in names:
            if name in self._objects.additions:
                # All ranks have it, and its states may be too large to have them all in memory.
                self._reshard(name, OwnStates(index, name, manifest.world_size))
                continue
            # Not all ranks need have registered it.
            states = [read_own(index, rank, name) for rank in range(manifest.world_size)]
            if not self._reshard(name, [state for state in states if state is not MISSING]):
                rederived.append(name)
        return None, tuple(rederived)

    def _own_names(self, manifest: checkpoint_files.Manifest) -> list[str]:
        """The objects whose state is restored to each rank separately."""
        return [
            name
            for name in self._objects
            if name in manifest.objects
            and (self._objects.is_own(name) or (self._objects.is_plain(name) and manifest.objects[name].get(SPLIT)))
        ]

    def _reshard(self, name: str, states: Sequence[Any]) -> bool:
        """Carry an object's ``states`` over to a different number of ranks. Returns whether that was exact.

        An object can do so itself with a method ``reshard_state_dict(states, rank, world_size)``. Otherwise, a state
        that was the same on all ranks is used on any number; any other object stays as the script made it.
        """
        obj = self._objects[name]
        reshard = getattr(obj, "reshard_state_dict", None)
        if reshard is not None:
            reshard(states, self._ranks.rank, self._ranks.world_size)
            return True
        if all(equal(state, states[0]) for state in states[1:]):
            obj.load_state_dict(states[0])
            return True
        return False

    def _note(self, directory: Path, manifest: checkpoint_files.Manifest, restored: Restored, began: float) -> None:
        """Journal what training continues from."""
        if RNG in restored.rederived:
            rng.reseed(self._plan_hash, manifest.step, self._ranks.rank)
        if self._journal is not None:
            self._journal.write(
                CheckpointRestored(
                    **manifest.describe(directory),
                    world_size=manifest.world_size,
                    hashed=self._hashes,
                    lost_steps=restored.lost_steps,
                    rederived=restored.rederived,
                    took_s=round(time.monotonic() - began, 6),
                )
            )


class _Unreadable(CheckpointError):
    """The content of a checkpoint's files cannot be read."""


def _saved_step(directory: Path) -> int:
    step = checkpoint_step(directory.name)
    assert step is not None
    return step


def _failure_in_words(problem: BaseException) -> str:
    if isinstance(problem, CheckpointError):
        return str(problem)
    if isinstance(problem, OSError):
        return describe_os_error(problem)
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:500]}"


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
        if not agreed.save:
            self._prepare()
            return
        self._end(self._saver.finish(stalls=True))
        if step == self.saved_step:
            return
        problem = self._begin(_save_info(step, agreed.save.why, metrics, self._schedule.take_request()))
        # Even if it could not begin: it would be due again at once, at every agreement.
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
        # All ranks count down alike, so that none is alone in this all-reduce.
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
        # The save plans and allocates itself: nothing is left to prepare.
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
        return self._every.next_step(step)

    def due(self, step: int) -> SaveReason:
        """Why to save now, after ``step`` finished steps; NONE if nothing is due."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            stamp = self._stamp_of_request()
            if stamp != self._stamp:
                # Noted before the file is read, so that a damaged one is not read again every second.
                self._stamp = stamp
                with contextlib.suppress(PathError):
                    self._request = (read_json(self._run.request) or {}).get("request")
        if self._request is not None:
            return SaveReason.REQUESTED
        if self._choice is None:
            return SaveReason.NONE
        if not self._every.is_due(step, since_save_s=now - self._saved_at, optimum_s=self._choice.seconds):
            return SaveReason.NONE
        return SaveReason.INTERVAL if self._every.steps is None else SaveReason.STEPS

    def began(self) -> None:
        """Note that a save has begun and training continues: the next interval counts from now."""
        self._saved_at = time.monotonic()

    def ended(self, outcome: Save) -> None:
        """Note how a save ended: its cost changes how often saving pays."""
        if not outcome.problem:
            self._cost.add(stall_s=outcome.stall_s, save_s=outcome.seconds)
            self._choose()

    def _choose(self) -> None:
        choice = choose_interval(
            self._history,
            nodes=self._nodes,
            uptime_s=time.monotonic() - self._began,
            stall_s=self._cost.stall_s,
            save_s=self._cost.save_s,
        )
        before, self._choice = self._choice, choice
        if self._journal is None or not self._every.is_auto:
            return
        if before is None or abs(choice.seconds - before.seconds) > _CHANGED * before.seconds:
            with contextlib.suppress(OSError):
                self._journal.write(SaveIntervalChosen(**choice.to_dict()))

    def take_request(self) -> str | None:
        """The id of the request that the next save answers, returned only once."""
        request, self._request = self._request, None
        return request

    def _stamp_of_request(self) -> tuple[int, int] | None:
        """The request file's inode and modification time (ns), which change when the file is replaced."""
        try:
            status = self._run.request.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns
