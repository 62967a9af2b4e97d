"""Restoring, on all ranks together, the newest checkpoint whose files are as they were written.

Each rank verifies its share of the files. Once an older checkpoint has been restored, newer ones that could not be used
are renamed to ``damaged-``. Names and shapes are compared before anything is loaded into the model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from torch.distributed.checkpoint.api import CheckpointException

from slurmtrain.errors import CheckpointError
from slurmtrain.model.run.events.checkpoint_events import CheckpointRejected, CheckpointRestored, WeightsLoaded
from slurmtrain.model.run.file_names import checkpoint_step
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.runtime.checkpoint import checkpoint_files, rng
from slurmtrain.runtime.checkpoint.rank_parts import (
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
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.system.files import describe_os_error
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
                    lost_steps = _step(checkpoints[0]) - manifest.step
                    restored = Restored(manifest.step, rng_states, lost_steps, rederived)
                    self._note(directory, manifest, restored, began)
                    return restored
            problems[directory] = problem
        if problems and of_another_run:
            raise CheckpointError(f"the checkpoint that the run begins with cannot be used: {problem}")
        if problems:
            raise CheckpointError(
                "no checkpoint can be restored, and starting again would lose them all: "
                + "; ".join(f"{directory.name}: {problem}" for directory, problem in problems.items())
                + f"; 'slurmtrain resume --from-start {self._run.id}' starts again on purpose"
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
            checkpoint_files.verify(directory, manifest, share, hashes=self._hashes)
        except CheckpointError as error:
            problem = str(error)
        problems = [text for text in self._ranks.gather(problem) if text]
        return (problems[0] if problems else ""), manifest

    def _reject(self, problems: Mapping[Path, str]) -> None:
        if self._journal is None:
            return
        for directory, problem in problems.items():
            aside = None
            with contextlib.suppress(OSError):
                aside = checkpoint_files.relative_path(checkpoint_files.set_aside(directory))
            path = checkpoint_files.relative_path(directory)
            self._journal.write(CheckpointRejected(step=_step(directory), path=path, reason=problem, aside=aside))

    # --- loading ------------------------------------------------------------------------------------------------------

    def _load_weights(self, directory: Path, began: float) -> Restored:
        """Load the modules of another run's checkpoint, to begin at step 0. Raises CheckpointError."""
        problem, manifest = self._check(directory)
        if manifest is None or problem:
            raise CheckpointError(f"the weights to begin with cannot be used: {problem}")
        modules = self._objects.modules()
        if not any(True for _ in modules):
            raise CheckpointError("'start_from.load: weights' needs a module that the script registers")
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
        unfit = f"{directory} does not fit what the script registered"
        shared = self._read_shared(index, manifest)
        targets = self._together(lambda: self._targets(index, manifest, shared), CheckpointError, unfit)
        tensors = self._together(self._comparison(index, targets), CheckpointError, unfit)
        try:
            index.read(tensors, self._ranks.group)
        except CheckpointException as error:
            raise _Unreadable(f"it cannot be read: {_describe(error)}") from error
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
            error = _describe(raised)
        errors = [text for text in self._ranks.gather(error) if text]
        if errors:
            raise failure(f"{problem}: {errors[0]}")
        return result[0]

    def _read_shared(self, index: Index, manifest: checkpoint_files.Manifest) -> dict[str, Any]:
        """The state that all ranks share; of objects that were split over ranks, all parts."""
        split = is_split(manifest)
        # Small values of all ranks: rank 0 reads them for the others.
        reads = self._ranks.rank == 0 or not split
        work = partial(read_shared, index, manifest) if reads else dict[str, Any]
        shared: dict[str, Any] = self._together(work, _Unreadable, "its values cannot be read")
        return self._ranks.broadcast(shared) if split else shared

    def _targets(self, index: Index, manifest: checkpoint_files.Manifest, shared: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of this rank. Raises CheckpointError if its objects differ from the checkpoint's."""
        for name, kind in self._objects.kinds().items():
            if name not in manifest.objects:
                if name in self._objects.additions:
                    continue
                raise CheckpointError(f"it has no {name!r}")
            saved = {key: value for key, value in manifest.objects[name].items() if key != SPLIT}
            if saved != kind:
                raise CheckpointError(f"its {name!r} is of another kind: {saved}, not {kind}")
        return self._objects.template(shared, index)

    def _comparison(self, index: Index, targets: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """A function that returns this rank's ``targets`` that are in the checkpoint.

        It raises CheckpointError if the tensors of all ranks together differ from the checkpoint's.
        """
        shapes = {name: tuple(value.shape) for name, value in targets.items()}
        optional = self._objects.optional()
        names = xxhash.xxh64_intdigest(repr(sorted(shapes.items())).encode())
        if len(set(self._ranks.gather(names))) > 1:
            # Ranks have different parts of a model, or of the state of an optimizer.
            gathered = self._ranks.gather((shapes, optional, list(self._objects)))
        else:
            gathered = [(shapes, optional, list(self._objects))]
        everywhere = {name: shape for own, _, _ in gathered for name, shape in own.items()}
        registered = {name for _, _, own in gathered for name in own}
        anywhere = tuple({prefix for _, own, _ in gathered for prefix in own})
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


def _step(directory: Path) -> int:
    step = checkpoint_step(directory.name)
    assert step is not None
    return step


def _describe(problem: BaseException) -> str:
    if isinstance(problem, CheckpointError):
        return str(problem)
    if isinstance(problem, OSError):
        return describe_os_error(problem)
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:500]}"
