"""Whether the same was submitted before: with the same idempotency key, or a moment ago, which may be a mistake.

Submitting again with the same key returns the runs of the first time.

A key's record in ``<runs>/keys/`` names its runs. It is written under the key's lock, before any of the runs can be
seen, so a command that was killed anywhere leaves runs that the next one with this key finds, and completes. The runs
themselves stay the truth: one that is in the record without a directory was never created, unless the record says that
all of them were.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError, UserError
from slurmtrain.model.run.ids import created_ms
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.specfile import SpecFile
from slurmtrain.system.files import make_directory, read_json, write_json
from slurmtrain.system.locks import locked

_RECENT_S = 60.0
_LONGEST = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """What was submitted with a key.

    ``plans``: the hashes of the plans, in order. ``runs``: the ids of their runs, in the same order; empty before they
    are known. ``complete``: whether all of them were submitted. ``sweeps``: for each spec, the id that its runs share,
    if they do.
    """

    key: str
    executor: str
    plans: Sequence[str]
    runs: Sequence[str] = ()
    complete: bool = False
    sweeps: Sequence[str | None] = ()


class HeldKey:
    """A key whose lock this process holds."""

    def __init__(self, path: Path, record: KeyRecord) -> None:
        """``path``: the file of ``record``."""
        self._path = path
        self.record = record

    def existing(self, workspace: Workspace) -> list[str | None]:
        """The id of the run of each plan, None for a run that is still to be created.

        Raises UserError if a run has been deleted since it was submitted.
        """
        runs = self.record.runs or [""] * len(self.record.plans)
        existing = [run_id if run_id and workspace.root.run(run_id).path.exists() else None for run_id in runs]
        if self.record.complete and None in existing:
            deleted = runs[existing.index(None)]
            raise UserError(
                f"the idempotency key {self.record.key!r} belongs to run {deleted}, whose directory was deleted; "
                "choose another key to submit again"
            )
        return existing

    def store(self, runs: Sequence[str], sweeps: Sequence[str | None], *, complete: bool = False) -> None:
        """Record the ``runs``, and the ``sweeps`` of the specs. Raises OSError.

        ``complete``: all of them have been submitted.
        """
        self.record = replace(self.record, runs=tuple(runs), sweeps=tuple(sweeps), complete=complete)
        write_json(self._path, asdict(self.record))

    def forget(self) -> None:
        """Remove the record: there are no runs."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def held_key(workspace: Workspace, key: str, plans: Sequence[str], executor: str) -> Iterator[HeldKey]:
    """Hold a key, waiting for another submission with it to end.

    Args:
        workspace: where the runs are.
        key: any text.
        plans: the hashes of the plans to submit, in order.
        executor: ``slurm`` or ``local``.

    Raises:
        UserError: the key cannot be one, or belongs to other plans.
        PathError: its record cannot be read or written.
    """
    if not key.strip() or len(key) > _LONGEST or not key.isprintable():
        raise UserError(f"--idempotency-key: a key has 1 to {_LONGEST} printable characters")
    path = workspace.root.submission_key(key)
    make_directory(path.parent)
    with locked(path.with_suffix(".lock")):
        new = KeyRecord(key=key, executor=executor, plans=tuple(plans))
        record = _read(path) or new
        if (tuple(record.plans), record.executor) != (new.plans, new.executor):
            submitted = f" (run {', '.join(record.runs)})" if record.runs else ""
            raise UserError(
                f"the idempotency key {key!r} was used to submit something else{submitted}; nothing was created; "
                "choose another key"
            )
        yield HeldKey(path, record)


def _read(path: Path) -> KeyRecord | None:
    data = read_json(path)
    if data is None:
        return None
    try:
        return _record_of(data)
    except (KeyError, TypeError, ValueError) as error:
        raise PathError(f"{path} is not a record of an idempotency key; remove it to use the key again") from error


def _record_of(data: dict[str, Any]) -> KeyRecord:
    return KeyRecord(
        key=str(data["key"]),
        executor=str(data["executor"]),
        plans=tuple(map(str, data["plans"])),
        runs=tuple(map(str, data["runs"])),
        complete=bool(data["complete"]),
        # Records of earlier versions have one, or none.
        sweeps=tuple(str(sweep) if sweep else None for sweep in data.get("sweeps") or [data.get("sweep")]),
    )


@dataclass(frozen=True, slots=True)
class RecentRun:
    """A run that was submitted ``seconds`` ago."""

    id: str
    seconds: float

    def __str__(self) -> str:
        return f"the same plan was submitted {self.seconds:.0f} s ago as run {self.id}, which has not ended"


def find_recent(workspace: Workspace, spec: SpecFile) -> RecentRun | None:
    """The newest run of a plan of ``spec`` that was submitted within the last minute and has not ended."""
    hashes = {planned.plan.hash for planned in spec.runs}
    same = [run for run in _recent(workspace) if _plan_hash(workspace, run.id) in hashes]
    if not same:
        return None
    runs = observe(workspace, [run.id for run in same], ask_slurm=False).runs
    return next((run for run in same if run.id in runs and not runs[run.id].ended), None)


def _recent(workspace: Workspace) -> Iterator[RecentRun]:
    """Runs of the last minute, the newest first, by the times in their ids."""
    now = time.time()
    for run_id in reversed(workspace.run_ids()):
        seconds = now - created_ms(run_id) / 1000
        if seconds > _RECENT_S:
            return
        # An id from the future is from before the clock was set back, or from another machine.
        if seconds > -_RECENT_S:
            yield RecentRun(run_id, max(0.0, seconds))


def _plan_hash(workspace: Workspace, run_id: str) -> str | None:
    with contextlib.suppress(PathError):
        return (read_json(workspace.root.run(run_id).plan) or {}).get("hash")
    return None
