"""Snapshots of the code that runs execute: taken at submission, and again where a run is to execute newer code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.spec.code.section import SNAPSHOT, CodeSpec
from slurmtrain.model.spec.code.snapshot import CodeSnapshot, compare
from slurmtrain.model.spec.code.tree_paths import path_in_word, relative_to_root
from slurmtrain.model.spec.plan import Plan
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.provenance import describe_git


def with_snapshots(workspace: Workspace, plans: Sequence[Plan]) -> tuple[list[Plan], list[str]]:
    """Plans with the snapshots that their specs ask for, and notes for the user.

    Args:
        workspace: where snapshots are stored.
        plans: the plans of a submission.

    Raises:
        UserError: there is too much code, or it is in a state that cannot be meant.
        PathError: it cannot be read or stored.
    """
    by_key: dict[tuple[str, str, CodeSpec], CodeSnapshot] = {}
    notes: list[str] = []
    complete = []
    for plan in plans:
        code = plan.spec.code
        if not code.has_snapshot:
            complete.append(plan)
            continue
        # The runs of a sweep mostly share it.
        key = (plan.workdir, plan.python, code)
        if key not in by_key:
            by_key[key], more = _take(workspace, plan, code)
            notes += more
        complete.append(replace(plan, code=by_key[key]))
        notes += [note for note in _live_paths(complete[-1]) if note not in notes]
    return complete, notes


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
    snapshot, notes = _take(workspace, plan, code)
    revision = describe_git(Path(plan.workdir))
    now = f"the code of now, snapshot {snapshot.short_hash}{f' ({revision})' if revision else ''}"
    newer = replace(plan, code=snapshot)
    if plan.code is None:
        return newer, [*notes, f"the run had no snapshot, and executes {now}", *_live_paths(newer)]
    if plan.code.hash == snapshot.hash:
        return newer, [*notes, f"the code has not changed since snapshot {snapshot.short_hash}", *_live_paths(newer)]
    return newer, [*notes, f"{now}: {_difference(directory, plan.code, snapshot)}", *_live_paths(newer)]


def _take(workspace: Workspace, plan: Plan, code: CodeSpec) -> tuple[CodeSnapshot, list[str]]:
    # Imported here: without a snapshot, nothing of it is needed.
    from slurmtrain.snapshots.store import take

    return take(workspace.root, Path(plan.workdir), Path(plan.python), code)


def _difference(directory: RunDir, earlier: CodeSnapshot, later: CodeSnapshot) -> str:
    from slurmtrain.runtime.code.tree import read_manifest

    try:
        before = read_manifest(directory, earlier.hash)
    except PathError:
        return f"what has changed since snapshot {earlier.short_hash} is not known, as that is missing or damaged"
    return f"{compare(before, read_manifest(directory, later.hash)).text} since snapshot {earlier.short_hash}"


def _live_paths(plan: Plan) -> Iterator[str]:
    """Notes on absolute paths of the repository that a run uses as they are by then, and not from the snapshot."""
    assert plan.code is not None
    root = plan.code.root
    for word in plan.words:
        is_path = any(relative_to_root(path, root) is not None for _, path in path_in_word(word))
        if f"{root}/" in word and not is_path:
            yield f"{word!r} in the command names {root}, which it uses as it is by then, not as in the snapshot"
    for line in plan.spec.setup:
        if f"{root}/" in line:
            yield f"{line!r} in 'setup' names {root}, which it uses as it is by then, not as in the snapshot"
