"""Snapshots of the code that runs execute: taken at submission, and again where a run is to execute newer code."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slurmtrain.errors import NoSnapshot, PathError
from slurmtrain.model.run.events.base import select
from slurmtrain.model.run.events.command import RunCreated
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.spec.code import SNAPSHOT, CodeSnapshot, CodeSpec, compare, path_in_word, relative_to_root
from slurmtrain.model.spec.command_files import result_places
from slurmtrain.model.spec.plan import Plan
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.provenance import describe_git
from slurmtrain.ops.submit.script import find_program

if TYPE_CHECKING:
    from slurmtrain.snapshots.selection import CodeSource

_OF_SYSTEM = frozenset({"/bin", "/sbin", "/usr/bin", "/usr/sbin"})
# Programs that read files of the current directory without being told which.
_READERS = frozenset({"python", "make"})
# What is neither an option nor a number.
_OPERAND = re.compile(r"(?!-|[\d.]+$)")


def with_snapshots(
    workspace: Workspace, plans: Sequence[Plan], spec_files: Iterable[Path] = (), *, preview: bool = False
) -> tuple[list[Plan], list[str]]:
    """Plans with the snapshots that their runs execute, and notes for the user.

    Args:
        workspace: where snapshots are stored.
        plans: the plans of a submission.
        spec_files: the files of their spec, absolute: no code, and secrets may be in them.
        preview: only find out what snapshots there would be; they have no hash, and nothing is stored.

    Raises:
        UserError: a snapshot that a spec asks for cannot be taken, or the code is in a state that cannot be meant.
        PathError: it cannot be read or stored.
    """
    sources = code_sources(plans, spec_files)
    snapshots: dict[SourceKey, CodeSnapshot | None] = {}
    notes: list[str] = []
    for key, source in sources.items():
        snapshots[key], more = _take_or_note(workspace, source, Path(key.python), preview=preview)
        notes += more
    complete = [plan.with_code(snapshots.get(SourceKey.of_plan(plan))) for plan in plans]
    notes += [note for plan in complete for note in _live_paths(plan)]
    return complete, list(dict.fromkeys(notes))


class SourceKey(NamedTuple):
    """What decides which snapshot a plan gets: the runs of a sweep mostly share it."""

    workdir: str
    python: str
    spec: CodeSpec
    by_default: bool

    @classmethod
    def of_plan(cls, plan: Plan) -> SourceKey:
        """That of a plan."""
        return cls(plan.workdir, plan.python, plan.spec.code, "code" not in plan.template)


def code_sources(plans: Sequence[Plan], spec_files: Iterable[Path] = ()) -> dict[SourceKey, CodeSource]:
    """What snapshots are to be taken of for these plans; those without a snapshot have no key in it."""
    results: dict[SourceKey, set[str]] = {}
    specs = {str(path) for path in spec_files}
    for plan in plans:
        if plan.spec.code.has_snapshot and ("code" in plan.template or _may_use_code(plan)):
            results.setdefault(SourceKey.of_plan(plan), set()).update(_results_of(plan))
    return {key: _source(key, places | specs) for key, places in results.items()}


def _source(key: SourceKey, no_code: Iterable[str]) -> CodeSource:
    from slurmtrain.snapshots.selection import CodeSource

    return CodeSource(workdir=Path(key.workdir), spec=key.spec, by_default=key.by_default, no_code=frozenset(no_code))


def _results_of(plan: Plan) -> Iterator[str]:
    """The places, as absolute paths, to which a plan's command writes by relative ones."""
    workdir = plan.workdir
    places = result_places(plan.words, plan.spec.checkpoint.glob, workdir, workdir)
    return (posixpath.normpath(posixpath.join(workdir, place.path)) for place in places)


def _may_use_code(plan: Plan) -> bool:
    """Whether a command may read anything in its working directory: a program of the system without operands may not.

    Args:
        plan: of the command, such as ``nvidia-smi -L``.
    """
    program, *rest = plan.words
    if program in _READERS or any(_OPERAND.match(word) for word in rest):
        return True
    path = find_program(program, plan.spec.env.get("PATH"))
    return path is None or not _is_of_system(path)


@cache
def _is_of_system(program: str) -> bool:
    return os.path.realpath(program).rpartition("/")[0] in _OF_SYSTEM


def _take_or_note(
    workspace: Workspace, source: CodeSource, python: Path, *, preview: bool
) -> tuple[CodeSnapshot | None, list[str]]:
    """The snapshot of a source; without one by default, a note that says why."""
    try:
        return _take(workspace, source, python, preview=preview)
    except (NoSnapshot, PathError) as error:
        if not source.by_default:
            raise
        return None, [f"runs execute the code as it is when they start, without a snapshot: {error}"]


def with_code_of_now(workspace: Workspace, directory: RunDir, plan: Plan) -> tuple[Plan, list[str]]:
    """A plan of a run with the code as it is now, and notes that say how it differs from what the run had.

    Args:
        workspace: where snapshots are stored.
        directory: the run.
        plan: its plan, with or without a snapshot.

    Raises:
        UserError, PathError: as :func:`with_snapshots`.
    """
    code = plan.spec.code if plan.spec.code.has_snapshot else CodeSpec(mode=SNAPSHOT)
    key = SourceKey(plan.workdir, plan.python, code, by_default=False)
    no_code = {*_results_of(plan), *_spec_file(directory)}
    snapshot, notes = _take(workspace, _source(key, no_code), Path(plan.python))
    revision = describe_git(Path(plan.workdir))
    now = f"the code of now, snapshot {snapshot.short_hash}{f' ({revision})' if revision else ''}"
    newer = plan.with_code(snapshot)
    if plan.code is None:
        return newer, [*notes, f"the run had no snapshot, and executes {now}", *_live_paths(newer)]
    if plan.code.hash == snapshot.hash:
        return newer, [*notes, f"the code has not changed since snapshot {snapshot.short_hash}", *_live_paths(newer)]
    return newer, [*notes, f"{now}: {_difference(directory, plan.code, snapshot)}", *_live_paths(newer)]


def _take(
    workspace: Workspace, source: CodeSource, python: Path, *, preview: bool = False
) -> tuple[CodeSnapshot, list[str]]:
    # Imported here: without a snapshot, nothing of it is needed.
    from slurmtrain.snapshots import store

    return (store.preview if preview else store.take)(workspace.root, source, python)


def _spec_file(directory: RunDir) -> Iterator[str]:
    """The file that a run was submitted from, if there was one."""
    # Imported here: only a run that exists has journals.
    from slurmtrain.runtime.job.run_reader import read_events

    source = "journal/created.jsonl"
    for created in select(read_events(directory.path / source, source), RunCreated):
        if created.payload.spec_file:
            yield str(Path(created.payload.spec_file).resolve())


def _difference(directory: RunDir, earlier: CodeSnapshot, later: CodeSnapshot) -> str:
    from slurmtrain.runtime.code.tree import read_manifest

    try:
        before = read_manifest(directory, earlier.hash)
    except PathError:
        return f"what has changed since snapshot {earlier.short_hash} is not known, as that is missing or damaged"
    return f"{compare(before, read_manifest(directory, later.hash)).text} since snapshot {earlier.short_hash}"


def _live_paths(plan: Plan) -> Iterator[str]:
    """Notes on absolute paths of the repository that a run uses as they are by then, and not from the snapshot."""
    if plan.code is None:
        return
    root = plan.code.root
    for word in plan.words:
        is_path = any(relative_to_root(path, root) is not None for _, path in path_in_word(word))
        if f"{root}/" in word and not is_path:
            yield f"{word!r} in the command names {root}, which it uses as it is by then, not as in the snapshot"
    for line in plan.spec.setup:
        if f"{root}/" in line:
            yield f"{line!r} in 'setup' names {root}, which it uses as it is by then, not as in the snapshot"
