"""Saving on all ranks while training continues: plan, copy, let the writers write, publish.

Training stalls only during :meth:`Saver.begin`. Afterwards the ranks check the writers' progress from time to time, at
steps at which they communicate anyway; when all writers have finished, rank 0's publishes. Every public method must be
called on all ranks, and returns the same answer to all of them.

The ranks' votes decide when a save advances, so all ranks take each of these steps together:

1. *begin*: each rank captures its state. If a ``state_dict`` raises, the exception is reported to the other ranks
   rather than raised, since they are waiting. One all-reduce answers: did any rank fail, did any state change its
   shape? If a shape changed, DCP's planners plan again, the only collective whose cost grows with the state. Each rank
   copies its tensors into the memory that it shares with its writer. That memory is an image of the file, with torch's
   prefixes between the tensors (``shard_plan``), so the writer needs neither torch nor a plan.
2. *written*: at the first vote at which no writer is busy, the ranks gather sizes, hashes and errors. On any error
   rank 0 removes the directory and journals ``save_failed``.
3. *publishing*: rank 0's writer checks the lease, writes ``.metadata``, then ``MANIFEST.json`` atomically, renames the
   directory to ``step-<n>``, fsyncs ``checkpoints/``, and prunes.
4. *over*: rank 0 votes the outcome, so all ranks know it.

If a rank fails during a save, that save is lost unless it is the only rank: the others can no longer be reached.
A directory without a manifest is not a checkpoint. One with a manifest is complete: the next attempt, which removes
half-written directories, renames it into place.
"""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from slurmtrain.errors import CheckpointError
from slurmtrain.model.experiment.checkpoint import KeepSpec
from slurmtrain.model.interruption.interval import Publication, Vote
from slurmtrain.model.run.events.base import Payload
from slurmtrain.model.run.events.checkpoint_events import CheckpointPruned, CheckpointSaved, QuotaExceeded, SaveFailed
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.runtime.checkpoint import checkpoint_files, rng
from slurmtrain.runtime.checkpoint.checkpoint_files import Staging
from slurmtrain.runtime.checkpoint.shard_plan import (
    PARTS,
    SHARED,
    RankLayout,
    Sharding,
    SplitObjects,
    file_name,
    meshes,
    own_name,
    part_of,
)
from slurmtrain.runtime.checkpoint.state_dicts import Objects
from slurmtrain.runtime.checkpoint.torch_index import INDEX
from slurmtrain.runtime.checkpoint.writer_client import ShardWriter, WriterGone
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.system.directories import FollowedDirectory, without_aliases
from slurmtrain.system.files import describe_os_error, space_left
from slurmtrain.system.journal import Journal
from slurmtrain.version import __version__

_log = logging.getLogger("slurmtrain")
# More bytes than any disk has: assumed to be free if the file system does not say.
_BOUNDLESS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPolicy:
    """What a spec requires of checkpoints, and what manifests record about the run.

    ``quota``: how many bytes all checkpoints together may take; None: no limit.
    """

    keep: KeepSpec
    quota: int | None = None
    plan_hash: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Save:
    """One save, from its beginning to its end. What is known at first is given; the saver fills in the rest.

    ``request``: the id of the request that it answers. ``began``: by the monotonic clock. ``mesh``: the device meshes
    that tensors are sharded over. ``places``: (start, length) of values in this rank's file. ``order``: the number of
    its latest order: answers to other orders do not count. ``written``: the answer of this rank's writer. ``problem``:
    why it failed; empty if it was published. ``seconds`` until it was published, and ``stall_s`` are rank 0's.
    """

    step: int
    why: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    request: str | None = None
    began: float = 0.0
    mesh: Sequence[Mapping[str, Any]] = ()
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    stall_s: float = 0.0
    order: int = 0
    written: Mapping[str, Any] | None = None
    publishing: bool = False
    publication: Publication = Publication.NONE
    problem: str = ""
    seconds: float = 0.0


class Publisher:
    """Publishes what all ranks have written. The writer does the work; its answers go to :meth:`take`."""

    def __init__(
        self, attempt: AttemptDir, policy: PublishPolicy, world_size: int, writer: ShardWriter, journal: Journal | None
    ):
        """Publish what ``world_size`` ranks of ``attempt`` have written, following the ``policy``.

        ``writer``: rank 0's writer, which does the work. ``journal``: where the results are recorded; None on other
        ranks, whose publishers do nothing.
        """
        self._attempt = attempt
        self._policy = policy
        self._world_size = world_size
        self._writer = writer
        self._journal = journal
        self._request: str | None = None
        self._warned = False

    # --- room ---------------------------------------------------------------------------------------------------------

    def no_room(self, needed: int, settle: Callable[[], None]) -> str:
        """Why there is no room for a checkpoint of ``needed`` bytes, even after pruning others; empty if there is room.

        Exceeding the quota only causes a warning, since losing work is worse. ``settle`` waits until the writer has
        answered all orders.
        """
        used = self._used_bytes()
        missing = max(needed - self._free(), 0 if used is None else used + needed - (self._policy.quota or 0))
        if missing > 0:
            settle()
            try:
                self.take(self._writer.ask("prune", **self._prune_order(), missing=missing))
            except WriterGone as error:
                return str(error)
            used, quota = self._used_bytes(), self._policy.quota
            if used is not None and quota is not None and used + needed > quota and not self._warned:
                self._warned = True
                _log.warning(
                    "checkpoint.quota is %s: %s are used, one more checkpoint takes %s, and no other checkpoint may "
                    "be deleted", in_gb(quota), in_gb(used), in_gb(needed),
                )  # fmt: skip
                self._write(QuotaExceeded(bytes=needed, taken_bytes=used, quota=quota))
        free = self._free()
        if needed <= free:
            return ""
        return without_aliases(
            f"it needs {in_gb(needed)}, but only {in_gb(free)} are free in {self._attempt.run.checkpoints}"
        )

    def _used_bytes(self) -> int | None:
        """How many bytes this run's checkpoints take; None if there is no quota."""
        if self._policy.quota is None:
            return None
        checkpoints = self._attempt.run.checkpoints
        return sum(
            checkpoint_files.bytes_of(path)
            for path in (*checkpoint_files.published(checkpoints), *checkpoint_files.damaged(checkpoints))
        )

    def _free(self) -> int:
        try:
            return space_left(self._attempt.run.path).bytes
        except OSError:
            # Writing will then show whether there is room.
            return _BOUNDLESS

    # --- orders -------------------------------------------------------------------------------------------------------

    def order(self, save: Save, answers: Sequence[Mapping[str, Any]], index: bytes, objects: Mapping[str, Any]) -> int:
        """Order the writer to publish what all ranks have written for a save, and then to prune.

        Args:
            save: The save, for the manifest.
            answers: The answers of the ranks' writers, by rank.
            index: The content of ``.metadata``.
            objects: The kinds of the saved objects, by name.

        Returns:
            The number of the order to publish.

        Raises:
            WriterGone: The process that writes has ended.
        """
        self._request = save.request
        manifest = {
            "step": save.step,
            "why": save.why,
            # The manifest is JSON, which has neither NaN nor infinities.
            "metrics": {name: value for name, value in save.metrics.items() if math.isfinite(value)},
            "world_size": self._world_size,
            "mesh": save.mesh,
            "stall_s": save.stall_s,
            "plan_hash": self._policy.plan_hash,
            "attempt": self._attempt.path.name,
            "versions": versions(),
            "params": dict(self._policy.params),
            "objects": objects,
        }
        number = self._writer.order(
            "publish",
            attempt=str(self._attempt.path),
            round=self._attempt.round,
            step=save.step,
            files={file_name(rank): (part["bytes"], part["xxh3_128"]) for rank, part in enumerate(answers)},
            # Orders are JSON, which has no bytes.
            index=(INDEX, base64.b64encode(index).decode()),
            manifest=manifest,
            began=save.began,
        )
        # Orders are executed one after another: nothing is deleted before the new checkpoint is in its place.
        self._writer.order("prune", **self._prune_order())
        return number

    def _prune_order(self) -> dict[str, Any]:
        return {"attempt": str(self._attempt.path), "keep": asdict(self._policy.keep)}

    def give_up(self, save: Save, reason: str) -> None:
        """Clean up after a failed save and journal why; earlier checkpoints are unaffected."""
        if self._journal is None:
            return
        checkpoint_files.Staging(self._attempt.run.checkpoints, self._attempt.owner, save.step).discard()
        self.failed(save, reason)

    def recover(self, save: Save) -> float | None:
        """Finish a publication during which the writer died: the seconds the save took, or None if it failed."""
        directory = checkpoint_files.Staging(self._attempt.run.checkpoints, self._attempt.owner, save.step).finish()
        try:
            manifest = checkpoint_files.read_manifest(directory)
        except CheckpointError:
            return None
        # This may be an earlier attempt's checkpoint of the same step, which the save was to replace.
        if manifest.attempt != self._attempt.path.name:
            return None
        self.take({"saved": manifest.describe(directory)})
        return manifest.seconds

    # --- the journal --------------------------------------------------------------------------------------------------

    def take(self, answer: Mapping[str, Any]) -> None:
        """Journal what the writer has done."""
        if "saved" in answer:
            self._write(CheckpointSaved(**answer["saved"], request=self._request))
        for pruned in answer.get("pruned", ()):
            self._write(CheckpointPruned(**pruned))

    def failed(self, save: Save, reason: str) -> None:
        """Journal that a save has failed."""
        self._write(SaveFailed(step=save.step, why=save.why, reason=reason, request=save.request))

    def _write(self, event: Payload) -> None:
        # A full disk must not end training, and checkpoints are found on disk even if no event mentions them.
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal.write(event)


def versions() -> dict[str, str]:
    """The versions of the software that writes checkpoints, by name."""
    return {"slurmtrain": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def in_gb(size: int) -> str:
    """A ``size`` in bytes as readable text."""
    return f"{size / 1e9:.2f} GB" if size >= 10_000_000 else f"{size / 1e6:.2f} MB"


@dataclass(slots=True)
class _CapturedState:
    """What this rank has to save: tensors and pickled values, by their names in the index."""

    tensors: dict[str, Any]
    values: Mapping[str, bytes]
    shared: Mapping[str, Any] = field(default_factory=dict)
    """The state that all ranks share, apart from tensors."""
    problem: str = ""
    final: bool = False
    """Whether retrying is useless."""

    @property
    def names(self) -> dict[str, Any]:
        """The state as the planner expects it; of values that are not tensors it uses only the names."""
        return {**self.tensors, **dict.fromkeys(self.values)}


class Saver:
    """All saves of one attempt, one at a time."""

    def __init__(
        self, attempt: AttemptDir, objects: Objects, policy: PublishPolicy, ranks: RankGroup, journal: Journal | None
    ) -> None:
        """Save ``objects`` into the run directory of ``attempt``, following the ``policy``, on all ``ranks`` together.

        ``journal``: rank 0's; None on other ranks.
        """
        # The runs root may be renamed while the run trains: what is saved then is saved where the run is by then.
        self._directory = FollowedDirectory(attempt.run.path)
        self.run = RunDir(self._directory.alias)
        """The run's directory, wherever it is."""
        self._attempt = AttemptDir(self.run.attempts / attempt.path.name, attempt.round)
        self._objects = objects
        self._ranks = ranks
        self._sharding = Sharding(ranks)
        self._split = SplitObjects(ranks)
        # The writer gets paths by the alias, which leads there only from a process with the same descriptor.
        self._writer = ShardWriter(inherited=[self._directory.handle])
        self._leads = journal is not None
        self._publisher = Publisher(self._attempt, policy, ranks.world_size, self._writer, journal)
        self._save: Save | None = None
        self._proved = False
        self._framed: tuple[torch.Tensor, RankLayout] | None = None

    def close(self, *, failed: bool) -> None:
        """Stop the writer, on this rank only. ``failed``: wait only for what can be published without other ranks."""
        if failed and self._ranks.world_size == 1:
            with contextlib.suppress(CheckpointError):
                self.finish()
        # It refers to the memory that the writer is about to free.
        self._framed = None
        self._take_answers(until=lambda: failed and (self._save is None or not self._save.publishing))
        self._writer.close(wait=not failed)
        self._directory.close()

    @property
    def step(self) -> int | None:
        """The step that is being saved; None if no save is in progress."""
        return None if self._save is None else self._save.step

    # --- what stalls training -----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Plan, and allocate memory in the background, so that the first save is as short as later ones.

        Raises CheckpointError if the state can never be saved: better now than after hours. Any other problem is left
        for the first save to report.
        """
        captured = self._capture()
        if self._ranks.greatest(int(captured.problem != ""))[0]:
            self._raise_if_final(captured)
            return
        try:
            self._plan(captured)
        except ValueError:
            return
        try:
            self._writer.memory(self._sharding.layout.tensor_bytes)
            # Better to warn now than after hours of training that a checkpoint will not fit.
            full = self._no_room()
            self._writer.order("populate", bytes=self._writer.memory_bytes)
        except (WriterGone, OSError):
            return
        if full:
            _log.warning("there is no space for a checkpoint: %s", full)

    def begin(self, save: Save) -> str | None:
        """Copy the state and have it written. Returns why that failed, or None.

        No save may be in progress.

        Raises CheckpointError if retrying is useless: the state cannot be loaded safely, or cannot be saved at all.
        """
        assert self._save is None
        save.began = time.monotonic()
        # Notice now if the writer has died, so that the next orders go to a new one.
        self._take_answers(wait=False, until=lambda: False)
        captured = self._capture()
        new = not captured.problem and (self._sharding.is_new(captured.names) or self._split.is_new(captured.shared))
        # One all-reduce for both: a rank that continued alone would wait for the others in the planners' collectives.
        failed, changed = self._ranks.greatest(int(captured.problem != ""), int(new))
        if failed:
            reason = self._raise_if_final(captured)
            self._publisher.failed(save, reason)
            return reason
        if changed:
            try:
                self._plan(captured)
            except ValueError as error:
                raise CheckpointError(f"the state cannot be saved: {error}") from error
        # Only rank 0 checks and prunes: the disk is shared, and two ranks that prune at once disagree on what is left.
        full = self._ranks.broadcast(self._no_room())
        if full:
            self._publisher.failed(save, full)
            return full
        save.mesh, save.places = meshes(captured.tensors), self._sharding.places_of(captured.values)
        self._save = save
        staging = Staging(self._attempt.run.checkpoints, self._attempt.owner, save.step)
        size = self._sharding.layout.tensor_bytes + sum(map(len, captured.values.values()))
        try:
            self._copy(self._writer.memory(size), captured)
            save.order = self._writer.order("write", path=str(staging.path / file_name(self._ranks.rank)), bytes=size)
        except (OSError, CheckpointError) as error:
            # Stored as if it were the writer's answer: the other ranks learn of it when all have written.
            save.written = {"error": describe_os_error(error) if isinstance(error, OSError) else str(error)}
        save.stall_s = time.monotonic() - save.began
        return None

    def _plan(self, captured: _CapturedState) -> None:
        """Agree with the other ranks on who writes what. Raises ValueError, or CheckpointError for clashing names."""
        self._split.agree(captured.shared, self._objects.kinds())
        self._sharding.plan(captured.names, self._objects.parameters())

    def _capture(self) -> _CapturedState:
        """The current state, or why there is none: exceptions are stored, since other ranks wait for this one."""
        rank = self._ranks.rank
        try:
            state = self._objects.capture()
            own = {"objects": state.own, "rng": rng.capture(self._ranks.device)}
            if parts := self._split.part_of(state.shared):
                own[PARTS] = parts
            values = {own_name(rank): self._pickled(own)}
            if rank == 0:
                values[SHARED] = self._pickled(state.shared)
        except CheckpointError as error:
            return _CapturedState({}, {}, problem=str(error), final=True)
        except Exception as error:  # noqa: BLE001 (whatever a state_dict raises)
            return _CapturedState({}, {}, problem=f"{type(error).__name__}: {error}")
        return _CapturedState(state.tensors, values, state.shared)

    def _pickled(self, value: Any) -> bytes:
        """What torch.save writes; until all ranks have written once, prove it loadable. Raises CheckpointError."""
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
        except Exception as error:  # whatever a __reduce__ raises
            raise CheckpointError(
                f"a state_dict contains a value that cannot be saved: {_first_words(error)}"
            ) from error
        if not self._proved:
            # At the first save, not at the first resume.
            buffer.seek(0)
            try:
                # Not to the device "meta": from 2.15 on torch reads the indices of sparse tensors, to validate them.
                torch.load(buffer, map_location="cpu", weights_only=True)
            except Exception as error:
                raise CheckpointError(
                    "a state_dict contains a value that cannot be loaded with weights_only=True; it may contain "
                    f"tensors, numbers, text, lists and dicts: {_first_words(error)}"
                ) from error
        return buffer.getvalue()

    def _raise_if_final(self, captured: _CapturedState) -> str:
        """What went wrong, on all ranks. Raises CheckpointError instead if retrying is useless."""
        outcomes = self._ranks.gather((captured.problem, captured.final))
        reason = _problems_by_rank([problem for problem, _ in outcomes])
        if any(final for _, final in outcomes):
            raise CheckpointError(reason)
        return reason

    def _no_room(self) -> str:
        if not self._leads:
            return ""
        return self._publisher.no_room(
            self._sharding.layout.all_bytes, settle=lambda: self._take_answers(until=lambda: False)
        )

    def _copy(self, memory: torch.Tensor, captured: _CapturedState) -> None:
        device = self._ranks.device
        if device.type == "cuda":
            self._writer.pin()
        layout = self._sharding.layout
        self._frame(memory, layout)
        for place in layout.places:
            part = part_of(captured.tensors, place)
            if part.numel():
                first, last = place.data
                memory[first:last].view(part.dtype).view(part.shape).copy_(part, non_blocking=True)
        for name, (start, _) in self._sharding.places_of(captured.values).items():
            _put(memory, start, captured.values[name])
        if device.type == "cuda":
            # The copies above are only queued: the next step overwrites their source, and the writer reads the target.
            torch.cuda.synchronize(device)

    def _frame(self, memory: torch.Tensor, layout: RankLayout) -> None:
        """Write the prefixes and suffixes around the tensors, once for each ``memory`` and ``layout``."""
        if self._framed is not None and self._framed[0] is memory and self._framed[1] is layout:
            return
        for place in layout.places:
            _put(memory, place.start, place.frame.prefix)
            _put(memory, place.data[1], place.frame.suffix)
        self._framed = (memory, layout)

    # --- while training continues -------------------------------------------------------------------------------------

    def progress(self) -> tuple[bool, Publication]:
        """Whether this rank is still writing, and how far the publication is: its part of the ranks' vote."""
        self._take_answers(wait=False, until=lambda: False)
        save = self._save
        if save is None:
            return False, Publication.NONE
        return save.written is None, save.publication

    def advance(self, agreed: Vote) -> Save | None:
        """Advance the save in progress as the ranks have ``agreed``. Returns it once it has ended.

        Raises CheckpointError if another attempt has taken over the run.
        """
        save = self._save
        if save is None or agreed.writing:
            return None
        if not save.publishing:
            return self._all_written(save)
        return self._over(save, agreed.publication) if agreed.publication else None

    def finish(self, *, stalls: bool = False) -> Save | None:
        """Wait until the save in progress has ended. Raises CheckpointError like :meth:`advance`.

        ``stalls``: training continues afterwards, so the wait counts as a stall caused by the save.
        """
        save = self._save
        if save is None:
            return None
        began = time.monotonic()
        outcome = None
        if not save.publishing:
            self._take_answers(until=lambda: save.written is not None)
            # The time that publishing adds is not known when the manifest is written.
            save.stall_s += time.monotonic() - began if stalls else 0.0
            outcome = self._all_written(save)
        if outcome is None:
            if self._leads:
                self._take_answers(until=lambda: save.publication is not Publication.NONE)
            outcome = self._over(save, Publication(self._ranks.greatest(save.publication)[0]))
        return outcome

    def _take_answers(self, *, until: Callable[[], bool], wait: bool = True) -> None:
        """Process the writer's answers until ``until()`` or none is due; without ``wait``, only available ones."""
        while self._writer.busy and not until():
            try:
                answer = self._writer.wait() if wait else self._writer.poll()
            except WriterGone as error:
                self._lost_writer(str(error))
                return
            if answer is None:
                return
            self._take(answer)

    def _take(self, answer: Mapping[str, Any]) -> None:
        save = self._save
        self._publisher.take(answer)
        if save is None or answer["number"] != save.order:
            return
        if not save.publishing:
            save.written = answer
        elif "saved" in answer:
            save.publication, save.seconds = Publication.PUBLISHED, float(answer["saved"]["seconds"])
        elif "fenced" in answer:
            save.publication, save.problem = Publication.FENCED, str(answer["fenced"])
        else:
            self._not_published(save, str(answer["error"]))

    def _lost_writer(self, reason: str) -> None:
        save = self._save
        if save is None:
            return
        if not save.publishing:
            save.written = save.written or {"error": reason}
        elif self._leads and save.publication is Publication.NONE:
            seconds = self._publisher.recover(save)
            if seconds is None:
                self._not_published(save, reason)
            else:
                save.publication, save.seconds = Publication.PUBLISHED, seconds

    def _not_published(self, save: Save, reason: str) -> None:
        save.publication, save.problem = Publication.FAILED, f"rank 0: {reason}"
        self._publisher.give_up(save, save.problem)

    def _all_written(self, save: Save) -> Save | None:
        """All ranks have written, or failed to: publish, or give up."""
        assert save.written is not None
        parts = self._ranks.gather((save.written, save.places))
        answers = [answer for answer, _ in parts]
        save.problem = _problems_by_rank([str(answer.get("error", "")) for answer in answers])
        if save.problem:
            self._publisher.give_up(save, save.problem)
            self._save = None
            return save
        # Pickled values have the same types in every save: if the first can be loaded, so can all later ones.
        self._proved = save.publishing = True
        if self._leads:
            placed = {name: (rank, *place) for rank, (_, places) in enumerate(parts) for name, place in places.items()}
            try:
                save.order = self._publisher.order(save, answers, self._sharding.index(placed), self._split.kinds)
            except WriterGone as error:
                self._lost_writer(str(error))
        return None

    def _over(self, save: Save, publication: Publication) -> Save:
        self._save = None
        # Only rank 0 knows why it was not published.
        save.problem = self._ranks.broadcast(save.problem) if publication is not Publication.PUBLISHED else ""
        if publication is Publication.FENCED:
            raise CheckpointError(save.problem)
        return save


def _problems_by_rank(problems: list[str]) -> str:
    return "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)


def _put(memory: torch.Tensor, start: int, content: bytes) -> None:
    if content:
        memory[start : start + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _first_words(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
