"""Rank 0's part of saving: room for a checkpoint, publishing it, pruning others, and saying so in the journal."""

from __future__ import annotations

import base64
import contextlib
import logging
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from slurmtrain.errors import CheckpointError
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.model.spec.spec import KeepSpec
from slurmtrain.runtime.checkpoint import files
from slurmtrain.runtime.checkpoint.index import INDEX
from slurmtrain.runtime.checkpoint.shard_plan import file_name
from slurmtrain.runtime.checkpoint.writer_client import ShardWriter, WriterGone
from slurmtrain.system.journal import Journal
from slurmtrain.version import __version__

_log = logging.getLogger("slurmtrain")
# More than any disk has: what is assumed where nobody says.
_BOUNDLESS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPolicy:
    """What a spec says of checkpoints, and what their manifests say of the run. ``quota``: bytes that all may take."""

    keep: KeepSpec
    quota: int | None = None
    plan_hash: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveInfo:
    """What is said of one save. ``request``: the id of the wish that it fulfils."""

    step: int
    why: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    request: str | None = None


class Publisher:
    """Publishes what all ranks have written. The writer does the work; its answers come back to :meth:`take`."""

    def __init__(
        self, attempt: AttemptDir, policy: PublishPolicy, world_size: int, writer: ShardWriter, journal: Journal
    ):
        self._attempt = attempt
        self._policy = policy
        self._world_size = world_size
        self._writer = writer
        self._journal = journal
        self._request: str | None = None
        self._warned = False

    # --- room ---------------------------------------------------------------------------------------------------------

    def no_room(self, needed: int, settle: Callable[[], None]) -> str:
        """Why there is no room for a checkpoint of so many bytes; the policy lets go of others before that.

        Going beyond the quota is only warned of: work that is lost is worse. ``settle`` waits for what is unanswered.
        """
        taken = self._taken()
        missing = max(needed - self._free(), 0 if taken is None else taken + needed - (self._policy.quota or 0))
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
        return f"it needs {in_gb(needed)}, and {in_gb(free)} are free in {self._attempt.run.checkpoints}"

    def _warn_of_quota(self, needed: int) -> None:
        taken, quota = self._taken(), self._policy.quota
        if taken is None or quota is None or taken + needed <= quota or self._warned:
            return
        self._warned = True
        _log.warning(
            "checkpoint.quota is %s; %s are taken, and one more checkpoint takes %s, and nothing more may be deleted",
            in_gb(quota), in_gb(taken), in_gb(needed),
        )  # fmt: skip
        self._write("over_quota", bytes=needed, taken=taken, quota=quota)

    def _taken(self) -> int | None:
        """The bytes that this run's checkpoints take; None where nothing limits them."""
        if self._policy.quota is None:
            return None
        there = self._attempt.run.checkpoints
        return sum(files.bytes_of(path) for path in (*files.published(there), *files.damaged(there)))

    def _free(self) -> int:
        try:
            found = os.statvfs(self._attempt.run.path)
        except OSError:
            # Then writing will tell.
            return _BOUNDLESS
        return found.f_bavail * found.f_frsize

    # --- orders -------------------------------------------------------------------------------------------------------

    def order(
        self,
        about: SaveInfo,
        *,
        began: float,
        stall_s: float,
        written: Sequence[Mapping[str, Any]],
        index: bytes,
        mesh: Sequence[Mapping[str, Any]],
        objects: Mapping[str, Any],
    ) -> int:
        """Let the writer publish, then prune. ``written``: the writers' answers, by rank. Raises WriterGone.

        Returns the number of the order to publish.
        """
        self._request = about.request
        manifest = {
            "step": about.step,
            "why": about.why,
            "metrics": {name: value for name, value in about.metrics.items() if math.isfinite(value)},
            "world_size": self._world_size,
            "mesh": mesh,
            "stall_s": stall_s,
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
            step=about.step,
            files={file_name(rank): (one["bytes"], one["xxh3_128"]) for rank, one in enumerate(written)},
            index=(INDEX, base64.b64encode(index).decode()),
            manifest=manifest,
            began=began,
        )
        self._writer.order("prune", **self._prune_order())
        return number

    def _prune_order(self) -> dict[str, Any]:
        return {"attempt": str(self._attempt.path), "keep": asdict(self._policy.keep)}

    def give_up(self, about: SaveInfo, reason: str) -> None:
        """Clean up after a save that failed; earlier checkpoints are as they were."""
        files.Staging(self._attempt.run.checkpoints, self._attempt.owner, about.step).discard()
        self.failed(about, reason)

    def recover(self, about: SaveInfo) -> float | None:
        """What became of a publication in which the writer was killed: what the save has taken, if it was published."""
        directory = files.Staging(self._attempt.run.checkpoints, self._attempt.owner, about.step).finish()
        try:
            manifest = files.read_manifest(directory)
        except CheckpointError:
            return None
        if manifest.attempt != self._attempt.path.name:
            return None
        self.take({"saved": manifest.describe(directory)})
        return manifest.seconds

    # --- what is said -------------------------------------------------------------------------------------------------

    def take(self, answer: Mapping[str, Any]) -> None:
        """Journal what the writer has done."""
        if "saved" in answer:
            self._write("saved", **answer["saved"], request=self._request)
        for pruned in answer.get("pruned", ()):
            self._write("pruned", **pruned)

    def failed(self, about: SaveInfo, reason: str) -> None:
        """Journal that a save has failed."""
        self._write("save_failed", step=about.step, why=about.why, reason=reason, request=about.request)

    def _write(self, kind: str, **data: Any) -> None:
        # A full disk must not end training; what is on disk is found by looking.
        with contextlib.suppress(OSError):
            self._journal.write(kind, **data)


def versions() -> dict[str, str]:
    """Of what writes checkpoints."""
    return {"slurmtrain": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def in_gb(size: int) -> str:
    """Bytes, for people."""
    return f"{size / 1e9:.2f} GB" if size >= 10_000_000 else f"{size / 1e6:.2f} MB"
