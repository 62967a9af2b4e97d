"""The code of runs: the snapshots that they execute, and the working directories that they are submitted from.

Snapshots are taken at submission, and again where a run is to execute newer code. A run comes from the revision in git,
what differs from that, and the packages of its Python.

A file that a filter of git would change counts as modified if its bytes differ from the commit's: the filter is a
program that the repository names. Only what git-lfs keeps is recognized, by the pointer in the commit, which has the
SHA-256 and the size of the content (git-lfs-spec, "The Pointer").
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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
from slurmtrain.model.run.events.base import select
from slurmtrain.model.run.events.command_events import RunCreated
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.urls import redact_code
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.command_script import find_program
from slurmtrain.runtime.code.git import NoGit, run_git, without_filters
from slurmtrain.runtime.code.packages import read_software

if TYPE_CHECKING:
    from slurmtrain.snapshots.selection import CodeSource

_OF_SYSTEM = frozenset({"/bin", "/sbin", "/usr/bin", "/usr/sbin"})
# Programs that read files of the current directory without being told which.
_READERS = frozenset({"python", "make"})
# What is neither an option nor a number.
_OPERAND = re.compile(r"(?!-|[\d.]+$)")
# The revision is useful but not required: git on a slow file system is not worth a longer wait.
_GIT_TIMEOUT_S = 10.0
# More is data or generated, not what somebody has changed to try something.
_MOST_BYTES = 1 << 20
_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\nsize (\d+)\n"
)
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
        """The provenance of a plan."""
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
    """The places, as absolute paths, that a plan's command writes to by relative ones."""
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
    from slurmtrain.snapshots import snapshot_store

    return (snapshot_store.preview_snapshot if preview else snapshot_store.take)(workspace.root, source, python)


def _spec_file(directory: RunDir) -> Iterator[str]:
    """The file that a run was submitted from, if there was one."""
    # Imported here: only a run that exists has journals.
    from slurmtrain.runtime.job.run_reader import read_events

    source = "journal/created.jsonl"
    for created in select(read_events(directory.path / source, source), RunCreated):
        if created.payload.spec_file:
            yield str(Path(created.payload.spec_file).resolve())


def _difference(directory: RunDir, earlier: CodeSnapshot, later: CodeSnapshot) -> str:
    from slurmtrain.runtime.code.code_copy import read_code_manifest

    try:
        before = read_code_manifest(directory, earlier.hash)
    except PathError:
        return f"what has changed since snapshot {earlier.short_hash} is not known, as that is missing or damaged"
    difference = compare_manifests(before, read_code_manifest(directory, later.hash))
    return f"{difference.text} since snapshot {earlier.short_hash}"


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
    return Provenance(git, _without_secrets(difference), read_software(Path(python)).to_text().encode())


def _git_facts(directory: Path) -> tuple[dict[str, Any] | None, bytes]:
    """The revision of the code that runs, if it is in git, and how the code differs from that."""
    commit = _ask_git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None, b""
    try:
        changed = changed_files(directory, timeout_s=_GIT_TIMEOUT_S)
    except (NoGit, subprocess.TimeoutExpired):
        changed = ChangedFiles((), b"")
    modified = len(changed.paths)
    facts = {"commit": commit, "dirty": modified > 0, "modified": modified}
    branch = _ask_git(directory, "symbolic-ref", "--quiet", "--short", "HEAD")
    return ({**facts, "branch": branch} if branch else facts), changed.difference


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


def _without_secrets(difference: bytes) -> bytes:
    text = difference.decode(errors="replace").strip()
    safe = "".join(f"{redact_code(line)}\n" for line in text.splitlines()).encode()
    return safe if len(safe) <= _MOST_BYTES else b""


def _ask_git(directory: Path, *arguments: str) -> str | None:
    try:
        return run_git(directory, *arguments, timeout_s=_GIT_TIMEOUT_S).decode(errors="replace").strip()
    except (NoGit, subprocess.TimeoutExpired):
        return None


# --- changes since the commit ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChangedFiles:
    """What has changed in a work tree since its commit.

    ``paths``: files and submodules, relative to the work tree. ``difference``: what ``git diff HEAD`` prints, of files
    without a filter.
    """

    paths: Sequence[str]
    difference: bytes


def changed_files(directory: Path, *, timeout_s: float) -> ChangedFiles:
    """What has changed in the work tree that a directory is in.

    Args:
        directory: In the work tree.
        timeout_s: How long each command of git may take.

    Raises:
        NoGit: There is no work tree, or git fails.
        subprocess.TimeoutExpired: It takes longer.
    """
    root = Path(os.fsdecode(run_git(directory, "rev-parse", "--show-toplevel", timeout_s=timeout_s)).removesuffix("\n"))

    def ask(*arguments: str, stdin: bytes = b"") -> bytes:
        return run_git(root, *arguments, timeout_s=timeout_s, stdin=stdin)

    plain = without_filters(root, timeout_s=timeout_s)
    # Submodules have filters of their own, and git would ask them with these options only.
    status = ask(
        *plain, "status", "--porcelain", "-z", "--untracked-files=no", "--ignore-submodules=dirty", "--no-renames"
    )
    listed = [os.fsdecode(line[3:]) for line in status.split(b"\0") if line]
    filtered = _filtered(listed, ask)
    paths = [path for path in listed if path not in filtered or not _is_kept_by_lfs(root, path, ask)]
    submodules = [path for path in _submodules(root, ask) if path not in paths and _is_changed(root / path, timeout_s)]
    difference = b""
    if paths and len(filtered) <= _MOST_EXCLUDED:
        excluded = [f":(top,exclude,literal){path}" for path in filtered]
        # Neither programs that are configured for git nor colours.
        options = ("--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=dirty", "--submodule=short")
        difference = ask(*plain, "diff", *options, "HEAD", "--", ":(top)", *excluded)
    return ChangedFiles([*paths, *submodules], difference)


def _is_changed(submodule: Path, timeout_s: float) -> bool:
    try:
        return (submodule / ".git").exists() and bool(changed_files(submodule, timeout_s=timeout_s).paths)
    except NoGit:
        return False


def _submodules(root: Path, ask: Callable[..., bytes]) -> list[str]:
    if not (root / ".gitmodules").exists():
        return []
    entries = (entry.partition(b"\t") for entry in ask("ls-files", "-s", "-z").split(b"\0"))
    return [os.fsdecode(path) for facts, _, path in entries if facts.startswith(b"160000")]


def _filtered(paths: Sequence[str], ask: Callable[..., bytes]) -> set[str]:
    """The paths that have a filter: git's attributes are read, and nothing is run."""
    stdin = b"".join(os.fsencode(path) + b"\0" for path in paths)
    words = ask("check-attr", "-z", "--stdin", "filter", stdin=stdin).split(b"\0") if paths else []
    triples = zip(words[::3], words[2::3], strict=False)
    return {os.fsdecode(path) for path, value in triples if value not in (b"unspecified", b"unset")}


def _is_kept_by_lfs(root: Path, path: str, ask: Callable[..., bytes]) -> bool:
    """Whether a file has the content that a pointer in the commit stands for."""
    try:
        if int(ask("cat-file", "-s", f"HEAD:{path}")) > 1024:
            return False
        pointer = _POINTER.match(ask("cat-file", "blob", f"HEAD:{path}"))
        if pointer is None or os.lstat(root / path).st_size != int(pointer[2]):
            return False
        with (root / path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest().encode() == pointer[1]
    except (NoGit, OSError, ValueError):
        return False
