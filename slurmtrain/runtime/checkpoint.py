"""Saving and restoring what a script registered, on all ranks together.

What is the same on all ranks (modules, optimizers, schedulers, gradient scalers) is written once, by rank 0;
everything else, and the states of random number generators, once a rank. Files load with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch

from slurmtrain.errors import CheckpointError, PlaceError
from slurmtrain.model.layout import AttemptDir
from slurmtrain.runtime import checkpointfiles as files
from slurmtrain.runtime import lease, rng
from slurmtrain.runtime.ranks import Ranks
from slurmtrain.system.files import reason_of
from slurmtrain.system.journal import Journal

_SHARED = "state.pt"
_REPLICATED = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.grad_scaler.GradScaler,
)


class Stateful(Protocol):
    """What can be checkpointed: torch's own objects, and anything with the same two methods."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a run goes on: the step, and this rank's generator states (None where they were derived anew)."""

    step: int
    rng: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """What one rank wrote: sizes and hashes by file name, or why not, and whether trying again is no use."""

    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    error: str = ""
    final: bool = False


class Checkpointer:
    """All checkpoints of one attempt. Every method is called on all ranks alike."""

    def __init__(
        self, attempt: AttemptDir, *, keep: int, plan_hash: str | None, ranks: Ranks, journal: Journal | None
    ) -> None:
        """``journal`` is rank 0's; the other ranks have none."""
        self._attempt = attempt
        self._directory = attempt.run.checkpoints
        self._keep = keep
        self._plan_hash = plan_hash
        self._ranks = ranks
        self._journal = journal
        self._objects: dict[str, Stateful] = {}
        self._proved = False
        if ranks.rank == 0:
            files.sweep(self._directory, attempt.path.name)

    def register(self, objects: Mapping[str, Stateful]) -> None:
        """Name what a checkpoint consists of. Raises TypeError for what has no state."""
        for name, obj in objects.items():
            inner = _unwrapped(obj)
            if not hasattr(inner, "state_dict") or not hasattr(inner, "load_state_dict"):
                raise TypeError(f"{name!r} ({type(obj).__name__}) has no state_dict() and load_state_dict()")
            self._objects[name] = inner

    # --- saving -----------------------------------------------------------------------------------------------------

    def save(self, step: int) -> str | None:
        """Save all objects after ``step`` finished steps. Returns why it failed, on all ranks, or None.

        A failed save leaves the earlier checkpoints as they are. Raises CheckpointError where trying again is no use:
        the state cannot be loaded safely, or another attempt has taken over the run.
        """
        began = time.monotonic()
        staging = files.Staging(self._directory, self._attempt.path.name, step)
        said = self._ranks.gather(self._write(staging))
        refused = next((one.error for one in said if one.final), None)
        if refused:
            staging.discard()
            raise CheckpointError(refused)
        failed = "; ".join(one.error for one in said if one.error)
        outcome: tuple[str | None, bool] = (failed, False)
        if self._ranks.rank == 0:
            written = {name: result for one in said for name, result in one.files.items()}
            outcome = self._give_up(staging, step, failed) if failed else self._publish(staging, step, written, began)
        reason, fenced = self._ranks.broadcast(outcome)
        if fenced:
            raise CheckpointError(reason or "")
        return reason

    def _write(self, staging: files.Staging) -> _Written:
        """Write this rank's files. Whatever goes wrong is told, not raised: the other ranks are waiting."""
        me = f"rank {self._ranks.rank}"
        try:
            shared, own = self._capture()
            written = {}
            if self._ranks.rank == 0:
                written[_SHARED] = _write_file(staging, _SHARED, shared)
            name = _rank_file(self._ranks.rank)
            written[name] = _write_file(staging, name, own)
            if not self._proved:
                _prove_loadable([staging.path / name for name in written])
                self._proved = True
        except OSError as error:
            return _Written(error=f"{me}: {reason_of(error)}")
        except PlaceError as error:
            return _Written(error=f"{me}: {error}")
        except CheckpointError as error:
            return _Written(error=f"{me}: {error}", final=True)
        except Exception as error:  # noqa: BLE001 (whatever a state_dict raises)
            return _Written(error=f"{me}: {type(error).__name__}: {error}")
        return _Written(files=written)

    def _capture(self) -> tuple[dict[str, Any], dict[str, Any]]:
        shared, own = {}, {}
        for name, obj in self._objects.items():
            state = obj.state_dict()
            if isinstance(obj, _REPLICATED):
                _refuse_sharded(name, state)
                shared[name] = state
            else:
                own[name] = state
        return {"objects": shared}, {"objects": own, "rng": rng.capture(self._ranks.device)}

    def _give_up(self, staging: files.Staging, step: int, reason: str) -> tuple[str | None, bool]:
        """On rank 0: clean up after a save that failed; an earlier checkpoint may make room for the next try."""
        assert self._journal is not None
        staging.discard()
        with contextlib.suppress(OSError):
            self._journal.write("save_failed", step=step, reason=reason)
        return reason, False

    def _publish(
        self, staging: files.Staging, step: int, written: Mapping[str, tuple[int, str]], began: float
    ) -> tuple[str | None, bool]:
        """On rank 0: publish. Returns what went wrong, and whether another attempt has taken over."""
        assert self._journal is not None
        try:
            if not self._holds_lease():
                staging.discard()
                return "another attempt has taken over this run; nothing was published", True
            path, manifest = staging.publish(
                written, world_size=self._ranks.world_size, plan_hash=self._plan_hash, began=began
            )
            self._journal.write("saved", **manifest.describe(path))
            for gone in files.prune(self._directory, self._keep):
                self._journal.write("pruned", path=f"{gone.parent.name}/{gone.name}")
        except OSError as error:
            return self._give_up(staging, step, reason_of(error))
        return None, False

    def _holds_lease(self) -> bool:
        return lease.holds(self._attempt)

    # --- restoring --------------------------------------------------------------------------------------------------

    def restore(self) -> Restored | None:
        """Load the newest checkpoint whose files are what was written; None where none was ever published.

        Raises CheckpointError where there are checkpoints and none can be used: silently starting again would hide it.
        """
        candidates = self._ranks.broadcast([str(path) for path in files.published(self._directory)])
        reasons = []
        for candidate in map(Path, candidates):
            reason, manifest = self._check(candidate)
            if reason is None and manifest is not None:
                return self._load(candidate, manifest)
            reasons.append(f"{candidate.name}: {reason}")
            if self._journal is not None:
                path = f"{candidate.parent.name}/{candidate.name}"
                self._journal.write("rejected", step=int(candidate.name.split("-")[1]), path=path, reason=reason)
        if reasons:
            raise CheckpointError(
                "no checkpoint can be restored, and starting again would lose them all: "
                + "; ".join(reasons)
                + f"; 'slurmtrain resume --from-start {self._attempt.run.id}' starts again on purpose"
            )
        return None

    def _check(self, directory: Path) -> tuple[str | None, files.Manifest | None]:
        """Verify a checkpoint on all ranks, each its own part."""
        reason, manifest = None, None
        try:
            manifest = files.read_manifest(directory)
            mine = [_SHARED] if self._ranks.rank == 0 else []
            mine += [name for name in (_rank_file(self._ranks.rank),) if name in manifest.files]
            files.verify(directory, manifest, iter(mine))
        except CheckpointError as error:
            reason = str(error)
        said = [why for why in self._ranks.gather(reason) if why]
        return (said[0] if said else None), manifest

    def _load(self, directory: Path, manifest: files.Manifest) -> Restored:
        error = None
        own: dict[str, Any] = {}
        try:
            own = self._load_objects(directory, manifest)
        except Exception as problem:  # noqa: BLE001 (whatever a load_state_dict raises: the other ranks are waiting)
            error = f"rank {self._ranks.rank}: {type(problem).__name__}: {problem}"
        errors = [one for one in self._ranks.gather(error) if one]
        if errors:
            raise CheckpointError(f"{directory} does not fit what the script registered: {errors[0]}")
        if self._journal is not None:
            self._journal.write("restored", **manifest.describe(directory))
        if own:
            return Restored(manifest.step, own["rng"])
        rng.reseed(self._plan_hash, manifest.step, self._ranks.rank)
        return Restored(manifest.step, None)

    def _load_objects(self, directory: Path, manifest: files.Manifest) -> dict[str, Any]:
        shared = _read_file(directory / _SHARED)["objects"]
        own: dict[str, Any] = {}
        if manifest.world_size == self._ranks.world_size:
            own = _read_file(directory / _rank_file(self._ranks.rank))
        states = {**shared, **own.get("objects", {})}
        for name, obj in self._objects.items():
            if name not in states:
                raise CheckpointError(_missing(name, obj, manifest, self._ranks.world_size))
            obj.load_state_dict(states[name])
        return own


def _missing(name: str, obj: Stateful, manifest: files.Manifest, world_size: int) -> str:
    if not isinstance(obj, _REPLICATED) and manifest.world_size != world_size:
        return (
            f"{name!r} was saved by each of {manifest.world_size} ranks and cannot be handed to {world_size}; "
            f"resume with {manifest.world_size} ranks"
        )
    return f"it holds no {name!r}"


def _write_file(staging: files.Staging, name: str, state: Any) -> tuple[int, str]:
    with staging.open(name) as file:
        try:
            torch.save(state, cast(IO[bytes], file))
        except RuntimeError as error:
            # Torch reports a failed write as an error of its own.
            raise file.failure or error from error
    return file.result


def _read_file(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _prove_loadable(paths: Iterable[Path]) -> None:
    """Find out at the first save, not at the first resume, that a state cannot be loaded safely."""
    for path in paths:
        try:
            torch.load(path, map_location="meta", weights_only=True, mmap=True)
        except Exception as error:
            raise CheckpointError(
                "a state_dict holds what cannot be loaded with weights_only=True; it may hold tensors, numbers, text, "
                f"lists and dicts: {' '.join(str(error).split())[:300]}"
            ) from error


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def _unwrapped(obj: Any) -> Any:
    """The module inside DistributedDataParallel or torch.compile, so that a checkpoint fits with and without them."""
    while True:
        if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
            obj = obj.module
        elif isinstance(getattr(obj, "_orig_mod", None), torch.nn.Module):
            obj = obj._orig_mod
        else:
            return obj


def _refuse_sharded(name: str, state: Any) -> None:
    if isinstance(state, dict):
        for value in state.values():
            _refuse_sharded(name, value)
    elif _is_sharded(state):
        raise CheckpointError(f"{name!r} is sharded over ranks (DTensor), which this version cannot save; use DDP")


def _is_sharded(state: object) -> bool:
    # The module takes a second to import; where nobody has, there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(state, module.DTensor)
