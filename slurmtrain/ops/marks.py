"""What people note on runs: tags, notes, and which runs lists leave out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from slurmtrain.errors import RunUnreadable, UserError
from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.model.run.events.base import Payload
from slurmtrain.model.run.events.command_events import NoteWritten, RunArchived, TagsChanged
from slurmtrain.model.run.layout import is_run_id
from slurmtrain.ops.shared.find import LAST, find, find_all
from slurmtrain.ops.shared.observe import Observed
from slurmtrain.ops.shared.workspace import Workspace, person
from slurmtrain.registry.rows import Listed

# Characters of a tag.
TAG_LIMIT = 64
# No quotes are needed for it in a shell, nor in a condition.
_TAG = re.compile(r"\w[\w.+/:-]*")
# Longer ones belong into a file.
_LONGEST_NOTE = 10_000


def add_tag(workspace: Workspace, names: Sequence[str], tag: str) -> list[str]:
    """Tag runs; returns their ids.

    Args:
        workspace: where the runs are.
        names: names, sweeps and patterns, as :func:`~slurmtrain.ops.shared.find.choose` takes them.
        tag: the tag.

    Raises:
        UserError: it cannot be a tag, or is a run.
        RunNotFound, RunUnreadable: a name refers to no run, or to one that cannot be read; nothing was changed.
    """
    run_ids, observed = find_all(workspace, names)
    # Whoever forgets the tag has named a run last, with whose id the others would be tagged.
    if tag == LAST or (is_run_id(tag) and tag in observed.runs.index):
        raise UserError(f"{tag!r} is a run; the tag comes after the runs: slurmtrain tag RUN... TAG")
    if problem := tag_problem(tag):
        raise UserError(f"{tag!r} cannot be a tag: {problem}")
    change = TagsChanged(add=[tag], by=person())
    return _mark(workspace, observed, run_ids, ("tag", change), lambda listed: tag not in listed.tags)


def remove_tag(workspace: Workspace, names: Sequence[str], tag: str) -> list[str]:
    """Remove a tag from runs; returns their ids.

    Args:
        workspace: where the runs are.
        names: names, sweeps and patterns, as :func:`~slurmtrain.ops.shared.find.choose` takes them.
        tag: the tag.

    Raises:
        UserError: none of the runs has it.
        RunNotFound, RunUnreadable: a name refers to no run, or to one that cannot be read; nothing was changed.
    """
    run_ids, observed = find_all(workspace, names)
    tags = {each for listed in observed.runs.fetch(run_ids).values() for each in listed.tags}
    if tag not in tags:
        has = f"they have {', '.join(sorted(tags))}" if tags else "they have no tags"
        raise UserError(f"none of these {len(run_ids)} run(s) has the tag {tag!r}{suggestion(tag, tags) or f'; {has}'}")
    change = TagsChanged(remove=[tag], by=person())
    return _mark(workspace, observed, run_ids, ("tag", change), lambda listed: tag in listed.tags)


def tag_problem(tag: str) -> str:
    """Why a text cannot be a tag, for a message; empty if it can."""
    if not 0 < len(tag) <= TAG_LIMIT:
        return f"a tag has 1 to {TAG_LIMIT} characters"
    if not _TAG.fullmatch(tag) or not tag.isprintable():
        return "a tag is a word of letters, digits, '.', '_', '-', '+', '/' and ':' that begins with a letter or digit"
    return ""


def write_note(workspace: Workspace, name: str, text: str) -> str:
    """Write a note on a run, in place of the one before; returns the run's id.

    Args:
        workspace: where the run is.
        name: the run, as :func:`~slurmtrain.ops.shared.find.choose` takes it.
        text: the note; empty: none from now on.

    Raises:
        UserError: it is too long.
        RunNotFound, RunUnreadable: there is no such run, or it cannot be read.
    """
    if len(text) > _LONGEST_NOTE:
        raise UserError(f"a note has at most {_LONGEST_NOTE} characters, this one has {len(text)}")
    [run_id], observed = find(workspace, [name], ask_slurm=False)
    change = NoteWritten(text=text, by=person())
    _mark(workspace, observed, [run_id], ("note", change), lambda listed: listed.row["note"] != text)
    return run_id


def archive(workspace: Workspace, names: Sequence[str], *, undo: bool = False) -> list[str]:
    """Leave runs out of lists once they have ended; returns their ids.

    Args:
        workspace: where the runs are.
        names: names, sweeps and patterns, as :func:`~slurmtrain.ops.shared.find.choose` takes them.
        undo: list them again.

    Raises:
        RunNotFound, RunUnreadable: a name refers to no run, or to one that cannot be read; nothing was changed.
    """
    run_ids, observed = find_all(workspace, names)
    change = RunArchived(archived=not undo, by=person())
    return _mark(workspace, observed, run_ids, ("archive", change), lambda listed: bool(listed.row["archived"]) == undo)


def _mark(
    workspace: Workspace,
    observed: Observed,
    run_ids: Sequence[str],
    change: tuple[str, Payload],
    changes: Callable[[Listed], bool],
) -> list[str]:
    """Journal an event in each of these runs that the event changes; returns their ids.

    The registry takes it in with the next command.

    Args:
        workspace: where the runs are.
        observed: all runs.
        run_ids: the runs to change.
        change: the name of the command, and the event.
        changes: whether the event changes a run.
    """
    runs = observed.runs.fetch(run_ids)
    unreadable = [run_id for run_id, listed in runs.items() if listed.unreadable]
    if unreadable:
        raise RunUnreadable(f"cannot read {', '.join(unreadable)}, so nothing was changed; 'slurmtrain show' says why")
    command, event = change
    for run_id, listed in runs.items():
        if changes(listed):
            with workspace.journal(workspace.root.run(run_id), command) as journal:
                journal.write(event)
    return list(runs)
