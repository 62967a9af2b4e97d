"""Rank 0's part of saving: making room for a checkpoint, publishing it, pruning others, and journaling all of it."""

from __future__ import annotations

import base64
import contextlib
import logging
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from slurmtrain.errors import CheckpointError
from slurmtrain.model.experiment.checkpoint import KeepSpec
from slurmtrain.model.interruption.interval import Publication
from slurmtrain.model.run.events.base import Payload
from slurmtrain.model.run.events.checkpoint_events import CheckpointPruned, CheckpointSaved, QuotaExceeded, SaveFailed
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.runtime.checkpoint.shard_plan import file_name
from slurmtrain.runtime.checkpoint.torch_index import INDEX
from slurmtrain.runtime.checkpoint.writer_client import ShardWriter, WriterGone
from slurmtrain.system.directories import without_aliases
from slurmtrain.system.files import space_left
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
            self._warn_of_quota(needed)
        free = self._free()
        if needed <= free:
            return ""
        return without_aliases(
            f"it needs {in_gb(needed)}, and {in_gb(free)} are free in {self._attempt.run.checkpoints}"
        )

    def _warn_of_quota(self, needed: int) -> None:
        used, quota = self._used_bytes(), self._policy.quota
        if used is None or quota is None or used + needed <= quota or self._warned:
            return
        self._warned = True
        _log.warning(
            "checkpoint.quota is %s; %s are used, one more checkpoint takes %s, and nothing else may be deleted",
            in_gb(quota), in_gb(used), in_gb(needed),
        )  # fmt: skip
        self._write(QuotaExceeded(bytes=needed, taken_bytes=used, quota=quota))

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
            index=(INDEX, base64.b64encode(index).decode()),
            manifest=manifest,
            began=save.began,
        )
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
