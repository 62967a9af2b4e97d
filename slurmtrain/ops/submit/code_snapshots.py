"""The code of runs: the snapshots that they execute, and the working directories that they are submitted from.

Snapshots are taken at submission, and again where a run is to execute newer code. A run comes from the revision in git,
what differs from that, and the packages of its Python.

A file that a filter of git would change counts as modified if its bytes differ from the commit's: the filter is a
program that the repository names. What git-lfs keeps always differs from its pointer in the commit: it is left out.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slurmtrain.errors import NoSnapshot, PathError
from slurmtrain.model.experiment.code import (
    SNAPSHOT,
    CodeSnapshot,
    CodeSpec,
    compare_manifests,
    path_in_word,
    relative_to_root,
)
from slurmtrain.model.experiment.command_words import result_places
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.events.command_events import RunCreated
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.urls import redact_code
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.command_script import find_program
from slurmtrain.runtime.code.git import NoGit, run_git, without_filters
from slurmtrain.runtime.code.packages import read_software

if TYPE_CHECKING:
    from slurmtrain.snapshots.selection import CodeSource

# Where a distribution has its programs; a program elsewhere may be the project's own.
_OF_SYSTEM = frozenset({"/bin", "/sbin", "/usr/bin", "/usr/sbin"})
# Programs that read files of the current directory without being told which.
_READERS = frozenset({"python", "make"})
# What is neither an option nor a number.
_OPERAND = re.compile(r"(?!-|[\d.]+$)")
# The revision is useful but not required: git on a slow file system is not worth a longer wait.
_GIT_TIMEOUT_S = 10.0
# More is data or generated, not what somebody has changed to try something.
_MOST_BYTES = 1 << 20
# A diff of what a filter would change shows nothing that somebody has written; one of very many files is not read.
_MOST_EXCLUDED = 500


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
        try:
            snapshots[key], more = _take(workspace, source, Path(key.python), preview=preview)
        except (NoSnapshot, PathError) as error:
            if not source.by_default:
                raise
            more = [f"runs execute the code as it is when they start, without a snapshot: {error}"]
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
        """The provenance of a plan."""
        return cls(plan.workdir, plan.python, plan.spec.code, "code" not in plan.template)


def code_sources(plans: Sequence[Plan], spec_files: Iterable[Path] = ()) -> dict[SourceKey, CodeSource]:
    """What snapshots are to be taken of for these plans; those without a snapshot have no key in it."""
    results: dict[SourceKey, set[str]] = {}
    specs = {str(path) for path in spec_files}
    for plan in plans:
        if not plan.spec.code.has_snapshot:
            continue
        program, *rest = plan.words
        uses_code = "code" in plan.template or program in _READERS or any(_OPERAND.match(word) for word in rest)
        if not uses_code:
            # A program of the system without operands, such as "nvidia-smi -L", reads nothing in the working directory.
            path = find_program(program, plan.spec.env.get("PATH"))
            uses_code = path is None or os.path.realpath(path).rpartition("/")[0] not in _OF_SYSTEM
        if uses_code:
            results.setdefault(SourceKey.of_plan(plan), set()).update(_results_of(plan))
    return {key: _source(key, places | specs) for key, places in results.items()}


def _source(key: SourceKey, no_code: Iterable[str]) -> CodeSource:
    from slurmtrain.snapshots.selection import CodeSource

    return CodeSource(workdir=Path(key.workdir), spec=key.spec, by_default=key.by_default, no_code=frozenset(no_code))


def _results_of(plan: Plan) -> Iterator[str]:
    """The places, as absolute paths, that a plan's command writes to by relative ones."""
    workdir = plan.workdir
    places = result_places(plan.words, plan.spec.checkpoint.glob, workdir, workdir)
    return (posixpath.normpath(posixpath.join(workdir, place.path)) for place in places)


def with_code_of_now(workspace: Workspace, directory: RunDir, plan: Plan) -> tuple[Plan, list[str]]:
    """A plan of a run with the code as it is now, and notes that say how it differs from what the run had.

    Args:
        workspace: where snapshots are stored.
        directory: the run.
        plan: its plan, with or without a snapshot.

    Raises:
        UserError, PathError: as :func:`with_snapshots`.
    """
    from slurmtrain.runtime.code.code_copy import read_code_manifest

    code = plan.spec.code if plan.spec.code.has_snapshot else CodeSpec(mode=SNAPSHOT)
    key = SourceKey(plan.workdir, plan.python, code, by_default=False)
    # The file that the run was submitted from may have secrets.
    spec_files = [created.payload.spec_file for created in workspace.store.events(directory.id, RunCreated)]
    no_code = {*_results_of(plan), *(str(Path(each).resolve()) for each in spec_files if each)}
    snapshot, notes = _take(workspace, _source(key, no_code), Path(plan.python))
    revision = describe_git(Path(plan.workdir))
    now = f"the current code, snapshot {snapshot.short_hash}{f' ({revision})' if revision else ''}"
    if plan.code is None:
        change = f"the run had no snapshot; now it uses {now}"
    elif plan.code.hash == snapshot.hash:
        change = f"the code has not changed since snapshot {snapshot.short_hash}"
    else:
        since = f"since snapshot {plan.code.short_hash}"
        change = f"{now}: changes {since} are unknown, because that snapshot is missing or damaged"
        with contextlib.suppress(PathError):
            before, after = (read_code_manifest(directory, each.hash) for each in (plan.code, snapshot))
            change = f"{now}: {compare_manifests(before, after).text} {since}"
    newer = plan.with_code(snapshot)
    return newer, [*notes, change, *_live_paths(newer)]


def _take(
    workspace: Workspace, source: CodeSource, python: Path, *, preview: bool = False
) -> tuple[CodeSnapshot, list[str]]:
    # Imported here: without a snapshot, nothing of it is needed.
    from slurmtrain.snapshots import snapshot_store

    return (snapshot_store.preview_snapshot if preview else snapshot_store.take)(workspace.root, source, python)


def _live_paths(plan: Plan) -> Iterator[str]:
    """Notes on absolute paths of the repository that a run uses as they are by then, and not from the snapshot."""
    if plan.code is None:
        return
    root = plan.code.root
    live = f"names {root}, and uses the files there when it runs, not the snapshot"
    for word in plan.words:
        if f"{root}/" in word and all(relative_to_root(path, root) is None for _, path in path_in_word(word)):
            yield f"{word!r} in the command {live}"
    yield from (f"{line!r} in 'setup' {live}" for line in plan.spec.setup if f"{root}/" in line)


# --- where it comes from ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a run is submitted from.

    ``git``: ``commit``, ``dirty`` and ``branch``; None outside a checkout. ``difference``: what ``git diff HEAD``
    prints of files that no filter applies to, without secrets; empty if there is none, or it is too long.
    ``environment``: Python and its packages, the text of a :class:`~slurmtrain.model.environment.Software`.
    """

    git: dict[str, Any] | None
    difference: bytes
    environment: bytes


def find_provenance(workdir: Path, python: str) -> Provenance:
    """What runs that are submitted now come from.

    Args:
        workdir: Where their commands run.
        python: What the word ``python`` in their commands stands for.
    """
    git, difference = _git_facts(workdir)
    lines = difference.decode(errors="replace").strip().splitlines()
    safe = "".join(f"{redact_code(line)}\n" for line in lines).encode()
    # All or nothing: a difference that was cut would look like a whole one.
    return Provenance(git, safe if len(safe) <= _MOST_BYTES else b"", read_software(Path(python)).to_text().encode())


def _git_facts(directory: Path) -> tuple[dict[str, Any] | None, bytes]:
    """The revision of the code that runs, if it is in git, and how the code differs from that."""
    commit = _ask_git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None, b""
    try:
        paths, difference = _changed_files(directory)
    except (NoGit, subprocess.TimeoutExpired):
        paths, difference = [], b""
    facts = {"commit": commit, "dirty": bool(paths), "modified": len(paths)}
    branch = _ask_git(directory, "symbolic-ref", "--quiet", "--short", "HEAD")
    return ({**facts, "branch": branch} if branch else facts), difference


def _changed_files(directory: Path) -> tuple[list[str], bytes]:
    """What has changed since the commit in the work tree of a directory, and what ``git diff HEAD`` prints of it.

    The difference is of files without a filter. A submodule counts if it is at another commit.

    Raises:
        NoGit: There is no work tree, or git fails.
        subprocess.TimeoutExpired: A command of git takes too long.
    """
    ask = partial(run_git, timeout_s=_GIT_TIMEOUT_S)
    root = Path(os.fsdecode(ask(directory, "rev-parse", "--show-toplevel")).removesuffix("\n"))
    plain = without_filters(root, timeout_s=_GIT_TIMEOUT_S)
    # Submodules have filters of their own, and git would ask them with these options only.
    own = "--ignore-submodules=dirty"
    status = ask(root, *plain, "status", "--porcelain", "-z", "--untracked-files=no", own, "--no-renames")
    listed = [os.fsdecode(line[3:]) for line in status.split(b"\0") if line]
    # Attributes are read, and nothing is run.
    stdin = b"".join(os.fsencode(path) + b"\0" for path in listed)
    words = ask(root, "check-attr", "-z", "--stdin", "filter", stdin=stdin).split(b"\0") if listed else []
    filters = dict(zip(map(os.fsdecode, words[::3]), words[2::3], strict=False))
    filtered = [path for path in listed if filters.get(path, b"unset") not in (b"unspecified", b"unset")]
    paths = [path for path in listed if filters.get(path) != b"lfs"]
    if not paths or len(filtered) > _MOST_EXCLUDED:
        return paths, b""
    excluded = [f":(top,exclude,literal){path}" for path in filtered]
    # Neither programs that are configured for git nor colours.
    options = ("--no-ext-diff", "--no-textconv", "--no-color", own, "--submodule=short")
    return paths, ask(root, *plain, "diff", *options, "HEAD", "--", ":(top)", *excluded)


def describe_git(directory: Path) -> str:
    """The revision of the code in a directory in a few words; empty if it is not in git."""
    return describe_revision(_git_facts(directory)[0])


def describe_revision(git: Mapping[str, Any] | None) -> str:
    """A revision in a few words; empty if there is none.

    Args:
        git: ``commit``, ``branch``, and how many files were modified, as a run keeps it.
    """
    if not git or not git.get("commit"):
        return ""
    state = f"{git.get('modified', 'some')} modified" if git.get("dirty") else "clean"
    return ", ".join(filter(None, (str(git["commit"])[:12], git.get("branch"), state)))


def _ask_git(directory: Path, *arguments: str) -> str | None:
    try:
        return run_git(directory, *arguments, timeout_s=_GIT_TIMEOUT_S).decode(errors="replace").strip()
    except (NoGit, subprocess.TimeoutExpired):
        return None
