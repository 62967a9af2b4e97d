"""Removing files that no run needs any more: old logs, files of submitit, snapshots of code, job arrays, caches, keys.

Records of what a run was and did are never removed, nor anything of a run that has not ended: all answers of commands,
and a rebuilt registry, are the same before and after. A part that runs share goes only once no run can need it: each
part is looked at again just before it is removed, since a command may have begun to use it meanwhile. A killed command
has removed only some of its parts; the next one removes the rest.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError, SlurmtrainError
from slurmtrain.model.run.layout import (
    ATTEMPTS,
    RunDir,
    RunsRoot,
    SubmissionDir,
    is_log,
    is_of_submitit,
    is_unborn,
    put_aside,
    run_ids_among,
)
from slurmtrain.ops.prune import has_no_writer
from slurmtrain.ops.shared.observe import observe, observe_run
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.tree_removal import Removal, remove_tree, unlink_logs
from slurmtrain.runtime.code.code_copy import can_be_made_again
from slurmtrain.system.files import describe_os_error, read_json
from slurmtrain.system.locks import locked
from slurmtrain.system.owned_files import read_checked

# A submission may take a snapshot, or write what a job array needs, and wait for an answer before its runs exist.
_LEAST_AGE_S = 86400.0
_SNAPSHOT = re.compile(r"[0-9a-f]{64}")
# Plans are searched for it as text: one that cannot be parsed still protects its snapshot.
_HASHES = re.compile(rb"[0-9a-f]{64}")
_SUBMISSIONS = "submissions"

KINDS = {
    "logs": "logs of runs that ended",
    "jobs": "pickles and batch scripts of runs that ended",
    "copies": "copies of code that no script has changed",
    "code": "snapshots of code that no plan names",
    "arrays": "job arrays of runs that ended",
    "caches": "caches of runs that are gone",
    "keys": "idempotency keys of runs that ended",
    "litter": "leftovers of killed commands",
    "aside": "checkpoints that 'resume --from-start' or '--step' has put aside",
}
# Somebody may want them back, so they go only on request.
ON_REQUEST = frozenset({"aside"})


@dataclass(frozen=True, slots=True)
class Part:
    """What is removed at once: entries of one directory.

    ``kind``: a key of :data:`KINDS`. ``folder``: the directory. ``names``: the entries. ``keep``: whether a file in
    them stays, by its path relative to ``folder``. ``run``: whose lock must be held; None: it is no run's.
    """

    kind: str
    folder: Path
    names: Collection[str]
    keep: Callable[[str], bool] = lambda _: False
    run: RunDir | None = None

    def remove(self, *, dry: bool = False) -> Removal:
        """Remove it. ``dry``: say only what that would free."""
        return remove_tree(self.folder, self.keep, self.names, dry=dry)


@dataclass(slots=True)
class Cleaned:
    """What was removed or, with ``dry``, would be.

    ``bytes``: by kind. ``parts``: the removed parts. ``problems``: the parts that stay, and why.
    """

    dry: bool
    older_than_s: float
    parts: list[Part] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, part: Part, removal: Removal) -> None:
        """Add what removing a part did, unless that was nothing."""
        self.problems += removal.problems
        if removal.bytes or removal.links or part.run is None:
            self.parts.append(part)
            self.bytes[part.kind] = self.bytes.get(part.kind, 0) + removal.bytes

    def count(self, kind: str) -> int:
        """Of how many runs, or of how many entries that belong to none, something of a kind goes."""
        return sum(1 if part.run is not None else len(part.names) for part in self.parts if part.kind == kind)

    def to_dict(self) -> dict[str, Any]:
        """What ``clean --json`` prints."""
        kinds = [
            {"kind": kind, "what": KINDS[kind], "count": self.count(kind), "bytes": self.bytes[kind]}
            for kind in KINDS
            if kind in self.bytes
        ]
        return {
            "schema": SCHEMA,
            "dry_run": self.dry,
            "older_than": self.older_than_s,
            "kinds": kinds,
            "bytes": sum(self.bytes.values()),
            "problems": self.problems,
        }


def find_removable(workspace: Workspace, kinds: Collection[str], older_than_s: float) -> Cleaned:
    """What can be removed, and how much that frees.

    Args:
        workspace: where the runs are.
        kinds: keys of :data:`KINDS`.
        older_than_s: how long ago runs must have ended, and files that belong to none been changed; for most of the
            latter it is a day at least.
    """
    cleanable = Cleaned(dry=True, older_than_s=older_than_s)
    for part in _removable_parts(workspace, kinds, time.time() - older_than_s, cleanable):
        cleanable.add(part, part.remove(dry=True))
    return cleanable


def remove(workspace: Workspace, removable: Cleaned) -> Cleaned:
    """Remove what :func:`find_removable` has returned, except what is needed meanwhile."""
    cleaned = Cleaned(dry=False, older_than_s=removable.older_than_s)
    oldest = time.time() - removable.older_than_s
    for part in removable.parts:
        try:
            with _still_removable(workspace, part, oldest) as rest:
                if rest is not None:
                    if rest.kind == "logs" and rest.run is not None:
                        # The user's own links to them would lead nowhere.
                        unlink_logs(rest.run)
                    cleaned.add(rest, rest.remove())
        except (SlurmtrainError, OSError) as error:
            cleaned.problems.append(describe_os_error(error) if isinstance(error, OSError) else str(error))
    return cleaned


def _removable_parts(workspace: Workspace, kinds: Collection[str], oldest: float, cleanable: Cleaned) -> Iterator[Part]:
    """What can be removed. ``oldest``: later changes protect; ``cleanable``: receives what is in the way."""
    root, aged = workspace.root, min(oldest, _a_day_ago())
    # Of the runs that ended before, only the ones that nothing can write to.
    observed = observe(workspace)
    settled = [run_id for run_id, row in observed.runs.index.items() if row.ended and row.settled]
    over = {
        run_id
        for run_id, listed in observed.runs.fetch(settled).items()
        if not listed.unreadable and (listed.row["ended_at"] or time.time()) <= oldest
    }
    for directory in map(root.run, over):
        folders = (ATTEMPTS, _SUBMISSIONS)
        if "logs" in kinds:
            yield Part("logs", directory.path, folders, lambda path: not is_log(path), directory)
        if "jobs" in kinds:
            yield Part("jobs", directory.path, folders[1:], lambda path: not is_of_submitit(path), directory)
        if "copies" in kinds and can_be_made_again(directory):
            # The copy counts as complete as long as its state is there: that goes first.
            yield Part("copies", directory.path, (directory.code_state.name, directory.code.name), run=directory)
        if "aside" in kinds and (names := list(filter(put_aside, _entries_of(directory.path)))):
            yield Part("aside", directory.path, names, run=directory)
    yield from _parts_without_run(root, kinds, over, aged)
    if "code" in kinds:
        yield from _unnamed_snapshots(workspace, aged, cleanable)
    if "litter" in kinds:
        # An entry that was still to become a snapshot, or to be removed; and the lock of a search that is over.
        is_unfinished = partial(re.match, r"\.(new|old)-")
        for folder, is_litter in ((root.snapshots, is_unfinished), (root.searches, partial(_is_left_lock, root))):
            yield from (Part("litter", folder, [name]) for name in _old(folder, _a_day_ago(), is_litter))


def _parts_without_run(root: RunsRoot, kinds: Collection[str], over: Collection[str], aged: float) -> Iterator[Part]:
    """What several runs share, or what a run has outside its directory, that none of them can need.

    Args:
        root: where the runs are.
        kinds: keys of :data:`KINDS`.
        over: the runs that nothing can write to.
        aged: what was changed later stays.
    """
    existing = set(run_ids_among(_entries_of(root.path)))

    def is_gone(run_id: str) -> bool:
        # An empty id stands for a run that is still to be created (HeldKey.store).
        return run_id in over or (run_id not in existing and run_id != "")

    if "arrays" in kinds:
        for name in _old(root.arrays, aged):
            elements, run_ids = root.array(name).elements, []
            for element in _entries_of(elements):
                with contextlib.suppress(OSError):
                    run_ids.append(SubmissionDir((elements / element).readlink()).run.id)
            if all(map(is_gone, run_ids)):
                yield Part("arrays", root.arrays, [name])
    if "caches" in kinds:
        # Of any age: a history is made anew when it is missing.
        for name in _old(root.histories, time.time()):
            if name.partition(".")[0] not in existing:
                yield Part("caches", root.histories, [name])
    if "keys" in kinds:
        for name in _old(root.keys, aged, lambda name: name.endswith(".json")):
            with contextlib.suppress(PathError):
                record = read_json(root.keys / name) or {}
                if all(map(is_gone, map(str, record.get("runs") or ()))):
                    yield Part("keys", root.keys, [name])


def _is_left_lock(root: RunsRoot, name: str) -> bool:
    """Whether a file beside the records of searches is the lock of one that is over."""
    return name.endswith(".lock") and not (root.searches / name).with_suffix(".json").exists()


def _unnamed_snapshots(workspace: Workspace, aged: float, cleanable: Cleaned) -> Iterator[Part]:
    """Snapshots unchanged since ``aged`` that no plan names. ``cleanable``: receives what is in the way."""
    folder = workspace.root.snapshots
    if not (names := list(_old(folder, aged, _SNAPSHOT.fullmatch))):
        return
    try:
        named = _named_snapshots(workspace)
    except (OSError, PathError) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else error
        cleanable.problems.append(f"no snapshot of code was removed, because a plan cannot be read: {why}")
        return
    yield from (Part("code", folder, [name]) for name in names if name not in named)


def _named_snapshots(workspace: Workspace) -> set[str]:
    """The snapshots that any plan names, also of a run that was deleted: ``rerun`` may use it. Raises OSError."""
    root = workspace.root
    named: set[str] = set()
    for name in _entries_of(root.path):
        # Unborn ones too: their submission may be about to rename them.
        if not (is_unborn(name) or any(run_ids_among([name]))):
            continue
        directory = RunDir(root.path / name)
        submissions = [directory.submissions / each for each in _entries_of(directory.submissions)]
        for path in (directory.plan, *(submission / directory.plan.name for submission in submissions)):
            with contextlib.suppress(FileNotFoundError):
                named.update(text.decode() for text in _HASHES.findall(read_checked(path)))
    return named


@contextlib.contextmanager
def _still_removable(workspace: Workspace, part: Part, oldest: float) -> Iterator[Part | None]:
    """What of a part can still be removed, while nothing else can begin to use it; None: nothing.

    Args:
        workspace: where it is.
        part: what could be removed a moment ago.
        oldest: later changes protect it.
    """
    if part.run is not None:
        with locked(part.run.lock, wait=False) as lock:
            run = None if lock is None else observe_run(workspace, part.run.id, ask_slurm=False)
            yield part if run is not None and run.ended and has_no_writer(run) else None
    elif part.kind == "keys" or part.folder == workspace.root.searches:
        # Of a search, the lock itself goes: whoever has opened it and gets it afterwards finds no search.
        [name] = part.names
        with locked((part.folder / name).with_suffix(".lock"), wait=False) as lock:
            is_old = part.kind != "keys" or name in _old(part.folder, min(oldest, _a_day_ago()))
            is_unused = part.kind == "keys" or _is_left_lock(workspace.root, name)
            yield part if lock is not None and is_old and is_unused else None
    elif part.kind == "code":
        with locked(workspace.root.snapshots_lock):
            named = _named_snapshots(workspace)
            unused = set(_old(part.folder, min(oldest, _a_day_ago()), part.names.__contains__)) - named
            # Under another name first, so that the next submission with this code takes it anew.
            for name in unused:
                (part.folder / name).rename(part.folder / f".old-{name}")
        # Without the lock: removing may take long, and no submission uses what has such a name.
        yield replace(part, names=[f".old-{name}" for name in unused]) if unused else None
    else:
        yield part


def _old(folder: Path, oldest: float, chosen: Callable[[str], object] = bool) -> Iterator[str]:
    """The chosen entries of a directory, in order, that have not been changed since ``oldest``."""
    for name in _entries_of(folder):
        with contextlib.suppress(OSError):
            if chosen(name) and (folder / name).lstat().st_mtime <= oldest:
                yield name


def _entries_of(folder: Path) -> Iterable[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return ()


def _a_day_ago() -> float:
    return time.time() - _LEAST_AGE_S
