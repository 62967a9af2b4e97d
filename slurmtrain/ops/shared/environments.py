"""The environment that a run was submitted from, and the environments of its attempts on their nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from slurmtrain.model.environment import (
    Environment,
    Software,
    changes_in_words,
    compare_environments,
    kinds_of,
    package_changes,
)
from slurmtrain.model.run.events.agent_events import EnvironmentNoted, HelperFailed
from slurmtrain.model.run.layout import RunDir, attempt_of
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.owned_files import read_checked


def submitted_software(directory: RunDir) -> Software | None:
    """Python and its packages when a run was submitted; None if that is not known.

    Args:
        directory: The run.
    """
    with contextlib.suppress(OSError):
        return Software.from_text(read_checked(directory.environment).decode(errors="replace"))
    return None


def environments_of(workspace: Workspace, run: Run) -> dict[int, Environment]:
    """The environments of a run's attempts, by their numbers; attempts without a record of any node are left out.

    Args:
        workspace: Where the run is.
        run: The run.
    """
    notes = _notes(workspace, run)
    directory = workspace.root.run(run.id)
    return {number: _environment(directory, by_node) for number, by_node in notes.items()}


def newest_environment(workspace: Workspace, run: Run) -> Environment:
    """The environment of a run's newest attempt with a known one, else the environment of its submission.

    Args:
        workspace: Where the run is.
        run: The run.
    """
    of_attempts = environments_of(workspace, run)
    if of_attempts:
        return of_attempts[max(of_attempts)]
    return Environment(software=submitted_software(workspace.root.run(run.id)))


def describe_changes(workspace: Workspace, run: Run) -> dict[int, list[str]]:
    """How the environments of attempts differ from the first one's, and within each among its nodes, in words.

    Also which Python they had if ``setup`` chose it, and which commands beside the ranks failed on nodes.

    Args:
        workspace: Where the run is.
        run: The run.
    """
    notes = _notes(workspace, run)
    directory = workspace.root.run(run.id)
    lines: dict[int, list[str]] = {}
    first: Environment | None = None
    for number, by_node in notes.items():
        environment = _environment(directory, by_node)
        first = first or environment
        changes = compare_environments(first, environment)
        interpreter = next(iter(by_node.values())).interpreter
        of_setup = [f"python is {interpreter}, as 'setup' makes it"] if interpreter else []
        parts = [
            f"other {kind} than the first attempt: {changes_in_words(of_kind)}" for kind, of_kind in changes.items()
        ]
        lines[number] = [*of_setup, *parts, *_among_nodes(directory, by_node)]
    for number, why in _failed_helpers(workspace, run):
        lines.setdefault(number, []).append(why)
    return {number: lines[number] for number in sorted(lines) if lines[number]}


def _failed_helpers(workspace: Workspace, run: Run) -> Iterator[tuple[int, str]]:
    """The attempt, and why, of all that nodes ran beside their ranks and that failed."""
    numbers = {attempt.key: attempt.number for attempt in run.attempts}
    for event in workspace.store.events(run.id, HelperFailed):
        if (number := numbers.get(attempt_of(event.source))) is not None:
            yield number, f"{event.payload.why}, on node {event.payload.node}"


def _notes(workspace: Workspace, run: Run) -> dict[int, dict[int, EnvironmentNoted]]:
    """What nodes have noted, by attempt and node, in their order."""
    numbers = {attempt.key: attempt.number for attempt in run.attempts}
    notes: dict[int, dict[int, EnvironmentNoted]] = {}
    for event in workspace.store.events(run.id, EnvironmentNoted):
        if (number := numbers.get(attempt_of(event.source))) is not None:
            notes.setdefault(number, {})[event.payload.node] = event.payload
    return {number: dict(sorted(notes[number].items())) for number in sorted(notes)}


def _environment(directory: RunDir, by_node: Mapping[int, EnvironmentNoted]) -> Environment:
    first = next(iter(by_node.values()))
    return Environment(
        software=_read(directory, first.software),
        versions=first.versions,
        machines=kinds_of(note.machine for note in by_node.values()),
        variables=first.variables,
    )


def _among_nodes(directory: RunDir, by_node: Mapping[int, EnvironmentNoted]) -> Iterator[str]:
    """Lines on nodes that have other packages than the first one."""
    [(number, first), *others] = by_node.items()
    software = _read(directory, first.software)
    for node, note in others:
        if note.software != first.software and software and (own := _read(directory, note.software)):
            changes = changes_in_words(package_changes(software, own))
            yield f"other packages on node {node} than on node {number}: {changes}"


def _read(directory: RunDir, name: str) -> Software | None:
    """A list of packages; None if it is missing, or its name is none."""
    if not (name.isalnum() and name.isascii()):
        return None
    with contextlib.suppress(OSError):
        return Software.from_text(read_checked(directory.software(name)).decode(errors="replace"))
    return None
