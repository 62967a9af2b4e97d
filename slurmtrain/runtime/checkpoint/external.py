"""Checkpoints of scripts that write their own: finding all that match a pattern, and the newest complete one.

Also what is read of a checkpoint of any format: contents, step, identity and checksums.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import io
import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmtrain.errors import CheckpointError, PathError, UntrustedPath
from slurmtrain.model.experiment.checkpoint import AUTO, OWN, last_number, step_by_pattern, step_key
from slurmtrain.model.experiment.launcher import RANKS
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import FROM_LOG
from slurmtrain.runtime.checkpoint.checkpoint_files import new_hasher
from slurmtrain.runtime.checkpoint.checkpoint_formats import (
    INDEX,
    SHARD,
    DcpDirectory,
    Format,
    Other,
    SafetensorsFiles,
    TorchFiles,
    is_dcp,
    read_item,
    read_items,
)
from slurmtrain.runtime.checkpoint.untrusted_files import (
    METADATA,
    Contents,
    FileTree,
    as_step,
    checksum_problem,
    directory_of_archive,
    is_archive,
    is_unfinished,
    list_tree,
    member,
    read_archive,
    read_header,
)
from slurmtrain.runtime.environment.node import read_plan
from slurmtrain.runtime.job.run_reader import logged_step
from slurmtrain.system.interpreter import CHECKPOINT_FORMATS, load_plugin
from slurmtrain.system.owned_files import check_owner, open_readable, read_readable

OTHER = Other()
# Tried in this order, after the formats of trainers, whose directories contain files of these.
_PLAIN: tuple[Format, ...] = (DcpDirectory(), SafetensorsFiles(), TorchFiles(), OTHER)
# A larger JSON file holds no state of a trainer.
_LIMIT_BYTES = 1 << 24


@functools.cache
def _of_trainers() -> Mapping[str, Format]:
    """The formats of trainers by name, in the order of trying them: a plug-in, loaded when it is needed."""
    return {each.NAME: each for each in load_plugin(CHECKPOINT_FORMATS, "trainers")}


def _format_named(name: str) -> Format:
    return next((each for each in _PLAIN if name == each.NAME), None) or _of_trainers()[name]


def format_of(tree: FileTree, declared: str = AUTO) -> Format:
    """The format of a checkpoint: the ``declared`` one of ``checkpoint.format``, or else the one of its content.

    Raises OSError.
    """
    if declared not in (AUTO, OWN):
        return _format_named(declared)
    return next(each for each in (*_of_trainers().values(), *_PLAIN) if each.recognizes(tree))


def find_modules(name: str, contents: Collection[str]) -> list[str]:
    """The prefixes of models' weights among the names in a checkpoint's ``contents``; ``name``: its format's."""
    return _format_named(name).modules(contents)


def read_contents(path: Path, declared: str = AUTO) -> Contents:
    """How to read each tensor and plain value of the checkpoint at ``path``, by name, in the order of names.

    Only what training continues from: no random number states, paths, times or settings, so that two equal trainings
    have equal contents. A tensor is read when its function is called.

    Args:
        path: A file or directory.
        declared: Its format as in ``checkpoint.format``.

    Raises:
        CheckpointError: it cannot be read.
        OSError: a file cannot be read.
    """
    tree = list_tree(path)
    contents = format_of(tree, declared).contents(tree)
    return dict(sorted(contents.items()))


def step_by_key(tree: FileTree, names: Sequence[str]) -> int | None:
    """The whole number under a key of a checkpoint; None if no file has one.

    Files of torch.save, headers of safetensors, and JSON are searched, in the order of their names. Nothing in them is
    executed.

    Args:
        tree: The checkpoint.
        names: The names of the key, from the outermost dictionary inwards.
    """
    for name in sorted(tree.sizes):
        with contextlib.suppress(CheckpointError, OSError, ValueError, RecursionError):
            path, label = tree.path / name, name or tree.path.name
            if label.endswith(".safetensors"):
                held: Any = (read_header(path)[0] or {}).get(METADATA)
            elif label.endswith(".json"):
                with open_readable(path) as file:
                    held = json.loads(file.read(_LIMIT_BYTES))
            else:
                held = read_archive(path, label) if is_archive(path) else None
            value = _value_under(held, names)
            # It may be written as text, as all metadata of safetensors is, or as a whole floating-point number.
            if isinstance(value, str) and value.isdecimal():
                return int(value)
            whole = isinstance(value, float) and value.is_integer()
            if (step := as_step(int(value) if whole else value)) is not None:
                return step
    return None


def _value_under(value: Any, names: Sequence[str]) -> Any:
    """What stands under a key, whose names may have dots themselves."""
    for count in range(len(names), 0, -1):
        inner = member(value, ".".join(names[:count]))
        if inner is not None:
            return inner if count == len(names) else _value_under(inner, names[count:])
    return None


# A file up to this size is read whole.
_SMALL = 1 << 18
# Of a larger one: bytes at each end, and the number and size of samples in between.
_EDGE = 1 << 16
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 12
# The beginning of each tensor, of at most so many.
_TENSOR_BYTES = 1 << 8
_TENSORS = 1024
_CHUNK = 1 << 22


def fingerprint(tree: FileTree) -> str:
    """The identity of a checkpoint, in hex: equal for a copy, different for another save to the same place.

    Whole tensors are never read: a checkpoint may have hundreds of gigabytes. What is read of a file: all of it if it
    is small, else its beginning, its end and samples in between; and checksums where its format has some. Training
    changes almost every parameter, and with it the samples; where most parameters are frozen, checksums, the beginning
    of each tensor, and small files such as a trainer's state differ.

    Raises OSError.
    """
    hasher = new_hasher()
    for name in sorted(tree.sizes):
        size = tree.sizes[name]
        hasher.update(f"{name}\0{size}\0".encode())
        path = tree.path / name
        if size <= _SMALL:
            hasher.update(read_readable(path))
            continue
        with open_readable(path) as file:
            for offset, length in _places(tree, name, size):
                # Offsets in a file that is not whole, or that somebody forged, may be any number.
                file.seek(min(max(0, offset), size))
                hasher.update(file.read(length))
        with contextlib.suppress(CheckpointError):
            if is_archive(path):
                hasher.update(directory_of_archive(path))
    return hasher.hexdigest()


def _places(tree: FileTree, name: str, size: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of what is read of a large file."""
    yield 0, _EDGE
    yield size - _EDGE, _EDGE
    for number in range(_SAMPLES):
        yield size * (2 * number + 1) // (2 * _SAMPLES), _SAMPLE_BYTES
    if name.endswith(".safetensors"):
        header, begin = read_header(tree.path / name)
        with contextlib.suppress(TypeError, LookupError, AttributeError, ValueError):
            entries = [entry for key, entry in (header or {}).items() if key != METADATA]
            for entry in _spread_evenly(entries):
                yield begin + int(entry["data_offsets"][0]), _TENSOR_BYTES
    folder, _, last = name.rpartition("/")
    place = tree.below(folder) if folder else tree
    if is_dcp(place) and INDEX in place.top:
        # The ends of tensors: each is an archive, which ends with checksums.
        with contextlib.suppress(CheckpointError):
            for item in _spread_evenly([item for item in read_items(place) if item.file == last]):
                yield max(0, item.offset + item.length - 4 * _TENSOR_BYTES), 4 * _TENSOR_BYTES


def _spread_evenly(entries: list[Any]) -> list[Any]:
    """At most so many of them as are read, spread evenly."""
    return entries[:: max(1, -(-len(entries) // _TENSORS))]


def find_damage(tree: FileTree) -> Iterator[str]:
    """What differs from what was written, as phrases; reads every file of the ``tree`` that has checksums.

    Archives, which ``torch.save`` writes, have a checksum for each tensor; files of torch.distributed.checkpoint are
    sequences of archives; safetensors files have no checksums. The checkpoint must be complete. Raises OSError.
    """
    for name in sorted(tree.sizes):
        path = tree.path / name
        if name.endswith(SHARD):
            continue
        if is_archive(path) and (problem := checksum_problem(path)):
            yield f"{name or tree.path.name}: {problem}"
    for folder in ("", *sorted({name.rpartition("/")[0] for name in tree.sizes if "/" in name})):
        part = tree.below(folder) if folder else tree
        try:
            items = read_items(part) if INDEX in part.top else []
        except CheckpointError as error:
            yield str(error)
            continue
        for item in items:
            if problem := checksum_problem(io.BytesIO(read_item(part, item))):
                yield f"{item.name} in {item.file}: {problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Where the checkpoints of a script are, and how to read them.

    ``pattern``: an absolute glob. ``format`` and ``step``: as in the spec. ``since``: ignores older ones (seconds since
    1970). ``ranks``: the least number of ranks of this run, which saved what is newer than ``began_at``. ``run``: its
    metrics tell the step of a checkpoint that does not tell it itself; None: nothing does.
    """

    pattern: str
    format: str = AUTO
    step: str | None = None
    since: float | None = None
    ranks: int = 1
    began_at: float = 0.0
    run: RunDir | None = None

    @classmethod
    def from_plan(cls, plan: Plan, run: RunDir, since: float | None = None) -> Search:
        """What the ``plan`` of a ``run`` says, which has ``checkpoint.glob``. ``since``: its last fresh start."""
        spec = plan.spec.checkpoint
        assert spec.glob is not None
        # Without the time of the plan no checkpoint is held to the number of ranks of this run.
        began_at = run.plan.stat().st_mtime if run.plan.exists() else math.inf
        # Relative to the run's own copy of its code, unless that has but a link for it.
        base = plan.working_directory(run.code)
        if "/" in spec.glob and (base / spec.glob.partition("/")[0]).is_symlink():
            base = Path(plan.workdir)
        # Each submission may have had another number of ranks.
        plans = [plan]
        for path in run.submissions.glob("*/plan.json"):
            with contextlib.suppress(PathError):
                plans += filter(None, [read_plan(path)])
        ranks = []
        for each in plans:
            least = each.spec.resources.ranks_on(range(each.spec.resources.nodes.min))
            # Of a launcher that the command calls, only the number of nodes is certain.
            ranks.append(least.world_size if each.spec.launcher in (None, RANKS) else len(least.counts))
        return cls(
            pattern=absolute(spec.glob, str(base), run),
            format=spec.format,
            step=spec.step,
            since=since,
            ranks=min(ranks),
            began_at=began_at,
            run=run,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalCheckpoint:
    """A checkpoint of a user's script.

    ``format``: its name. ``step``: None if unknown. ``saved_at``: in seconds since 1970. ``problem``: why it is not
    complete, as a phrase; None if it is. ``step_from``: ``log`` if the step is the one logged last when it was saved.
    """

    path: Path
    format: str
    step: int | None
    bytes: int
    saved_at: float
    problem: str | None = None
    step_from: str | None = None

    @property
    def complete(self) -> bool:
        """Whether it was written to the end, as far as its format shows."""
        return self.problem is None

    def fingerprint(self) -> str | None:
        """Its identity by its content; None if it cannot be read, as when it has just been deleted."""
        with contextlib.suppress(OSError):
            return fingerprint(list_tree(self.path))
        return None


def absolute(pattern: str, workdir: str, run: RunDir) -> str:
    """The ``pattern`` of a spec, which is relative to ``workdir``, as an absolute pattern.

    ``{run_dir}`` and ``{checkpoint_dir}`` are replaced by the directories of ``run``.
    """
    filled = pattern.replace("{run_dir}", glob.escape(str(run.path)))
    filled = filled.replace("{checkpoint_dir}", glob.escape(str(run.checkpoints)))
    return os.path.join(glob.escape(workdir), os.path.expanduser(filled))  # noqa: PTH111, PTH118 (a pattern, not a path)


def newest(search: Search) -> ExternalCheckpoint | None:
    """The newest complete checkpoint; None if there is none."""
    return next((each for each in find_checkpoints(search) if each.complete), None)


def find_checkpoints(search: Search) -> list[ExternalCheckpoint]:
    """All checkpoints that the pattern matches, also incomplete ones, the newest first.

    A step that none tells is the one that was logged last when it was saved, which says nothing about their order.
    """
    candidates: list[_Candidate] = []
    for name in glob.glob(search.pattern, recursive=True):  # noqa: PTH207 (pathlib takes no absolute patterns)
        path = Path(name)
        # What cannot be read is gone, or leads nowhere.
        with contextlib.suppress(OSError):
            if is_unfinished(path.name):
                continue
            tree = list_tree(path)
            recognized = format_of(tree, search.format)
            if (folders := recognized.checkpoints_within(tree)) is not None:
                candidates += [_Candidate(tree.below(folder), recognized) for folder in folders]
            elif tree.sizes:
                candidates.append(_Candidate(tree, recognized))
    # Directories of trainers contain files of simpler formats: one whose save has only begun looks like a simpler one,
    # and gets the format of a trainer that most directories have.
    trainers = Counter(each.format.NAME for each in candidates if each.tree.is_directory)
    common = next((name for name, _ in trainers.most_common() if name in _of_trainers()), None)
    for each in candidates:
        is_simple = each.tree.is_directory and each.format.NAME not in _of_trainers()
        if common is not None and is_simple and search.format in (AUTO, OWN):
            each.format = format_of(each.tree, common)
        each.judge(search)
    _note_missing_files(candidates)
    checkpoints = [each.described(search) for each in candidates]
    checkpoints = [each for each in checkpoints if search.since is None or each.saved_at >= search.since]
    complete = [each for each in checkpoints if each.complete]
    # If all complete ones have a step, the highest is the newest; or else, if all their names have a number, the
    # highest of these, since clocks of nodes differ; otherwise the one that was written to last.
    if all(each.step is not None for each in complete):
        checkpoints.sort(key=lambda each: (each.step or 0, each.saved_at), reverse=True)
    elif all(last_number(each.path.name) is not None for each in complete):
        checkpoints.sort(key=lambda each: (last_number(each.path.name) or 0, each.saved_at), reverse=True)
    else:
        checkpoints.sort(key=lambda each: each.saved_at, reverse=True)
    for position, checkpoint in enumerate(checkpoints):
        if checkpoint.step is None and checkpoint.complete and search.run is not None:
            step = logged_step(search.run, checkpoint.saved_at)
            if step is not None:
                checkpoints[position] = replace(checkpoint, step=step, step_from=FROM_LOG)
    return checkpoints


@dataclass(slots=True)
class _Candidate:
    """What a pattern matches. ``problem``: why it is not complete, once it is judged; None if it is."""

    tree: FileTree
    format: Format
    problem: str | None = None

    def judge(self, search: Search) -> None:
        """Find out whether it is complete."""
        tree = self.tree
        try:
            # Others may be able to write to it, since scripts save with any umask; but in a directory that is shared,
            # anybody could add what would be the newest.
            check_owner(tree.path.stat(), tree.path)
            self.problem = self.format.problem(tree, search.ranks if tree.saved_at >= search.began_at else 1)
        except UntrustedPath as error:
            self.problem = error.why
        except FileNotFoundError:
            self.problem = "it is being deleted"
        except OSError as error:
            self.problem = f"it cannot be read: {error.strerror}"

    def step(self, search: Search) -> int | None:
        """The step by the spec's key or pattern; else the one inside; else the one in the name."""
        if (key := step_key(search.step)) is not None:
            return step_by_key(self.tree, key) if self.problem is None else None
        if search.step is not None:
            return step_by_pattern(search.step, str(self.tree.path))
        if self.problem is None:
            with contextlib.suppress(CheckpointError, OSError):
                if (step := self.format.step(self.tree)) is not None:
                    return step
        return self.format.step_in_name(self.tree.path.name)

    def described(self, search: Search) -> ExternalCheckpoint:
        """It as others see it."""
        tree = self.tree
        return ExternalCheckpoint(
            path=tree.path,
            format=self.format.NAME,
            step=self.step(search),
            bytes=tree.bytes,
            saved_at=tree.saved_at,
            problem=self.problem,
        )


def _note_missing_files(candidates: Sequence[_Candidate]) -> None:
    """A complete candidate that alone lacks a file which all others have was cut off while it was saved."""
    complete = [(each, each.format.optional_files(each.tree)) for each in candidates if each.problem is None]
    for each, files in complete:
        others = [held for other, held in complete if other is not each and other.format is each.format]
        # Once two lack a file, the script no longer saves it.
        missing = set.intersection(*others) - files if others else set()
        if missing:
            each.problem = f"{min(missing)} is missing, but the other checkpoints have it"
