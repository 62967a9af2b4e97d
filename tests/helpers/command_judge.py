"""What must hold after any command, whatever it has found: nothing lost, nothing open to others, and plain words."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from helpers.forked_commands import Ended
from helpers.sample_home import LIVE, SAVED, STATES, SampleHome, id_of
from slurmtrain.model.run.layout import (
    ATTEMPTS,
    JOURNALS,
    checkpoint_name,
    is_log,
    is_of_submitit,
    is_run_id,
    is_unborn,
    put_aside,
)

# docs/reference/cli.md.
EXIT_CODES = frozenset({0, 1, 2, 130})
_TRACEBACK = re.compile(rb"Traceback \(most recent|Exception ignored|Fatal Python error|Warning: ")
# A Ctrl-C while an object is collected cannot be raised: Python prints it, and the command goes on.
_LOST_INTERRUPT = re.compile(
    rb"Exception ignored in: [^\n]*\nTraceback \(most recent[^\n]*\n(?: [^\n]*\n)*KeyboardInterrupt"
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f]")
# Files at the top of a runs root that commands rewrite.
_CACHES = re.compile(
    r"\.?(registry\.db|mlflow\.db)[^/]*|mlartifacts(/.*)?|\.(watch|mlflow|mlflow\.queue|counters)\.lock|\.squeue\.json"
    r"|\.histories(/.*)?|searches/[0-9a-z]{10}\.(json|lock)|counters\.jsonl|(csv|curves)/[0-9a-z]{10}\.csv|wandb/[0-9a-z]{10}\.(csv|json)"
    r"|tensorboard/[0-9a-z]{10}/(slurmtrain\.json|events\.out\.tfevents\.[0-9]{10}\.slurmtrain)"
)
# What W&B has of a run.
_OFFLINE_RUN = re.compile(r"wandb/offline-run-[0-9_]+-([0-9a-z]{10})(?:/|$)")
# Directories at the top of a runs root besides those of runs.
_FOLDERS = ("keys", "nodes", "searches", "csv", "curves", "tensorboard", "wandb", ".histories")
# Files of a run that commands rewrite.
_REWRITTEN = re.compile(r"lease\.json|sent\.json|claims(/.*)?|\.lock|checkpoint-request\.json")
_OTHERS_MAY = 0o077
# What of a run stays when its files are deleted.
_STAYS = re.compile(
    r"spec\.yaml|plan\.json|journal(/.*)?|attempts|attempts/[^/]*|attempts/[^/]*/[^/]*\.jsonl|submissions.*\.json"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """What is at a path: ``content`` is that of a file, or the target of a link."""

    kind: int
    mode: int
    content: bytes = b""


_NOTHING = Entry(0, 0)
Snapshot = Mapping[str, Entry]


def snapshot(root: Path) -> Snapshot:
    """Everything below a directory, by path relative to it; also what its modes hide from its owner."""
    entries: dict[str, Entry] = {}
    # Bytes: names may be no text.
    _collect(os.fsencode(root), b"", entries)
    return entries


def _collect(folder: bytes, start: bytes, entries: dict[str, Entry]) -> None:
    with _allowed(folder):
        for name in sorted(os.listdir(folder)):
            path, place = folder + b"/" + name, start + name
            about = os.lstat(path)
            kind = stat.S_IFMT(about.st_mode)
            entries[os.fsdecode(place)] = Entry(kind, stat.S_IMODE(about.st_mode), _content(path, kind))
            if kind == stat.S_IFDIR:
                _collect(path, place + b"/", entries)


def _content(path: bytes, kind: int) -> bytes:
    if kind == stat.S_IFLNK:
        return os.readlink(path)  # noqa: PTH115 (bytes)
    if kind != stat.S_IFREG:
        return b""
    with _allowed(path), open(path, "rb") as file:  # noqa: PTH123
        return file.read()


@contextlib.contextmanager
def _allowed(path: bytes) -> Iterator[None]:
    """Let the owner use what its mode forbids."""
    mode = stat.S_IMODE(os.stat(path).st_mode)  # noqa: PTH116
    needed = stat.S_IRUSR | stat.S_IXUSR if os.path.isdir(path) else stat.S_IRUSR  # noqa: PTH112
    is_hidden = mode & needed != needed
    if is_hidden:
        os.chmod(path, 0o700)  # noqa: PTH101
    try:
        yield
    finally:
        if is_hidden:
            os.chmod(path, mode)  # noqa: PTH101


def judge(arguments: Sequence[str], ended: Ended, *, home: SampleHome, before: Snapshot, after: Snapshot) -> list[str]:
    """What is wrong, each as ``category: detail``.

    Args:
        arguments: the command's.
        ended: how it ended.
        home: where it ran.
        before: the home before it.
        after: the home after it.
    """
    inside = PurePath(home.runs).relative_to(home.path).as_posix()
    if before.get(inside, _NOTHING).kind == stat.S_IFLNK:
        inside = os.path.relpath(os.fsdecode(before[inside].content), home.path)
    return [
        *_words(arguments, ended),
        *_lost(arguments, inside, before, after),
        *_open(arguments, inside, before, after),
    ]


def _words(arguments: Sequence[str], ended: Ended) -> Iterator[str]:
    if ended.hung:
        yield f"hang: still running after {ended.seconds:.0f} s"
    elif ended.code not in EXIT_CODES:
        yield f"exit code: {ended.code}"
    for text in (ended.output, ended.errors):
        # A rank's own traceback may be printed, but not as a message.
        if text is ended.errors and (match := _TRACEBACK.search(_LOST_INTERRUPT.sub(b"", text))):
            lines = text[match.start() :].decode(errors="replace").strip().splitlines()
            yield f"traceback: {lines[-1][:200]}"
        # A rank's output is printed as it is.
        if "logs" not in arguments and (match := _CONTROL.search(text.decode(errors="replace"))):
            near = text.decode(errors="replace")[max(0, match.start() - 60) : match.end() + 20]
            yield f"escape: {near!r}"


def _lost(arguments: Sequence[str], inside: str, before: Snapshot, after: Snapshot) -> Iterator[str]:
    for path, entry in before.items():
        now = after.get(path)
        if now == entry or _may_change(path, inside, arguments):
            continue
        if now is None and (_was_to_go(path, inside, arguments, before) or _was_replaced(path, inside, before, after)):
            continue
        rest = _in_run(path, inside)
        if rest is not None and _is_checkpoint(rest):
            if not _kept(path, entry, inside, arguments, after):
                yield f"lost: {path}"
        elif rest is not None and _grows(rest):
            if now is None or now.kind != entry.kind or not now.content.startswith(entry.content):
                yield f"lost: {path} {'is gone' if now is None else 'was rewritten'}"
        elif now is None:
            yield f"lost: {path} is gone"
        elif (now.kind, now.content) != (entry.kind, entry.content):
            yield f"lost: {path} was changed"


def _in_run(path: str, inside: str) -> str | None:
    """A path relative to the run that it is in; None if it is in none."""
    parts = PurePath(path).parts
    root = PurePath(inside).parts
    if parts[: len(root)] != root or len(parts) < len(root) + 2 or not is_run_id(parts[len(root)]):
        return None
    return "/".join(parts[len(root) + 1 :])


def _may_change(path: str, inside: str, arguments: Sequence[str]) -> bool:
    if path.startswith(("slurm/", "tmp/")):
        return True
    if "--to" in arguments and "--force" in arguments and path == _target(arguments):
        return True
    if path != inside and not path.startswith(f"{inside}/"):
        return False
    rest = path[len(inside) + 1 :]
    if _CACHES.fullmatch(rest) or is_unborn(rest.partition("/")[0]):
        return True
    of_run = _in_run(path, inside)
    return of_run is not None and _REWRITTEN.fullmatch(of_run) is not None


def _was_to_go(path: str, inside: str, arguments: Sequence[str], before: Snapshot) -> bool:
    """Whether ``delete`` or ``clean`` was to delete this."""
    depth = len(PurePath(inside).parts)
    if "clean" in arguments:
        return _is_cleaned(path, inside)
    if "delete" not in arguments or not path.startswith(f"{inside}/"):
        return False
    runs = [name for name in map(os.path.basename, before) if is_run_id(name)]
    of_wandb = _OFFLINE_RUN.match(path[len(inside) + 1 :])
    run = of_wandb[1] if of_wandb else PurePath(path).parts[depth]
    if not any(_names(word, run, runs) for word in arguments):
        return False
    return (
        of_wandb is not None or "--forget" in arguments or _STAYS.fullmatch(_in_run(path, inside) or JOURNALS) is None
    )


def _is_cleaned(path: str, inside: str) -> bool:
    """Whether this is of a kind that ``clean`` removes, and of no run that lives."""
    of_run = _in_run(path, inside)
    if of_run is None:
        return path.startswith((f"{inside}/.code/", f"{inside}/keys/", f"{inside}/arrays/"))
    if PurePath(path).parts[len(PurePath(inside).parts)] in map(id_of, LIVE):
        return False
    is_emptied = of_run.endswith(("/logs", "/submitit"))
    return is_emptied or is_log(of_run) or is_of_submitit(of_run) or put_aside(of_run.partition("/")[0])


def _was_replaced(path: str, inside: str, before: Snapshot, after: Snapshot) -> bool:
    """Whether this is an unsynced directory of W&B, and the run has a newer one now (docs/trackers.md)."""

    def directories(entries: Snapshot, run: str) -> set[str]:
        matches = (_OFFLINE_RUN.match(each[len(inside) + 1 :]) for each in entries if each.startswith(f"{inside}/"))
        return {match[0].rstrip("/") for match in matches if match and match[1] == run}

    gone = _OFFLINE_RUN.match(path[len(inside) + 1 :]) if path.startswith(f"{inside}/") else None
    return gone is not None and bool(directories(after, gone[1]) - directories(before, gone[1]))


def _names(word: str, run: str, runs: Sequence[str]) -> bool:
    """Whether a word of a command line may stand for a run: the newest, or by its id or its name, or a pattern."""
    if word == "@last":
        return run == max(runs)
    name = next((state for state in STATES if id_of(state) == run), "")
    return word != "" and (run.startswith(word.lower()) or fnmatchcase(run, word.lower()) or fnmatchcase(name, word))


def _target(arguments: Sequence[str]) -> str:
    return str(PurePath("project") / arguments[arguments.index("--to") + 1])


def _is_checkpoint(rest: str) -> bool:
    return rest.startswith("checkpoints/") or rest == "checkpoints"


def _kept(path: str, entry: Entry, inside: str, arguments: Sequence[str], after: Snapshot) -> bool:
    """Whether a part of a checkpoint is still somewhere in its run, or was deleted by a command that deletes."""
    if entry.kind != stat.S_IFREG:
        return True
    run = "/".join(PurePath(path).parts[: len(PurePath(inside).parts) + 1])
    parts = PurePath(path).parts
    name = parts[len(PurePath(inside).parts) + 2]
    if "prune" in arguments and name != checkpoint_name(SAVED[-1]):
        return True
    if name.startswith("."):
        return True  # half-written, or being deleted
    return any(each.content == entry.content for other, each in after.items() if other.startswith(f"{run}/"))


def _grows(rest: str) -> bool:
    return (
        rest.endswith(".jsonl") or (rest.startswith(ATTEMPTS) and "/logs/" in rest) or rest.startswith(f"{JOURNALS}/")
    )


def _is_root_file(path: str, inside: str) -> bool:
    """Whether this is what commands write into a runs root, which another directory may be too (``--runs ~``)."""
    name = path.split("/")[1]
    return path.startswith(f"{inside}/") or is_run_id(name) or _CACHES.fullmatch(name) is not None or name in _FOLDERS


def _open(arguments: Sequence[str], inside: str, before: Snapshot, after: Snapshot) -> Iterator[str]:
    """New files that others can read, and files where a command has nothing to leave."""
    for path, entry in after.items():
        if "--to" in arguments and path == _target(arguments):
            continue  # a file for others too
        old = before.get(path)
        if old is not None and (old.kind, old.mode) == (entry.kind, entry.mode):
            continue
        if path.startswith("slurm/"):
            continue
        new_rights = entry.mode & _OTHERS_MAY & ~(0 if old is None else old.mode)
        if new_rights and path.startswith(f"{inside}/") and entry.kind != stat.S_IFLNK:
            yield f"mode: {path} has {entry.mode:o}"
        is_outside = path.startswith(("home/", "elsewhere/")) and not _is_root_file(path, inside)
        # A directory that its owner has moved there, and that is still used through a link.
        is_outside = is_outside and not path.startswith("elsewhere/moved/")
        if old is None and (is_outside or path.endswith(".tmp")):
            yield f"litter: {path}"
