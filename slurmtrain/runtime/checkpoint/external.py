"""Checkpoints of scripts that write their own: finding all that match a pattern, and the newest complete one."""

from __future__ import annotations

import contextlib
import glob
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurmtrain.errors import CheckpointError, PathError, UntrustedPath
from slurmtrain.model.experiment.checkpoint import AUTO, OWN, last_number, step_by_pattern, step_key
from slurmtrain.model.experiment.launcher import RANKS
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import FROM_LOG
from slurmtrain.runtime.checkpoint.formats.deepspeed import DeepSpeed, is_tag, tags_in
from slurmtrain.runtime.checkpoint.formats.lookup import fingerprint, format_of, step_by_key
from slurmtrain.runtime.checkpoint.formats.plain_files import Format
from slurmtrain.runtime.checkpoint.formats.trees import FileTree, is_unfinished, list_tree
from slurmtrain.runtime.environment.node import read_plan
from slurmtrain.runtime.job.run_reader import logged_step
from slurmtrain.system.owned_files import check_owner

# Formats of directories that contain files of simpler formats: a directory whose save has only begun looks like a
# simpler one, so it is judged by the format of its neighbours.
_OF_TRAINERS = frozenset({"hf", "accelerate", "lightning", "deepspeed"})


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
        began_at = run.plan.stat().st_mtime if run.plan.exists() else math.inf
        return cls(
            pattern=absolute(spec.glob, str(_directory_of(spec.glob, plan, run)), run),
            format=spec.format,
            step=spec.step,
            since=since,
            ranks=min(map(_least_ranks, [plan, *_earlier_plans(run)])),
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


def _directory_of(pattern: str, plan: Plan, run: RunDir) -> Path:
    """What a pattern is relative to: not the run's own copy of its code where that has but a link for it."""
    copy = plan.working_directory(run.code)
    return Path(plan.workdir) if "/" in pattern and (copy / pattern.partition("/")[0]).is_symlink() else copy


def _least_ranks(plan: Plan) -> int:
    """The least number of ranks; of a launcher that the command calls, only the number of nodes is certain."""
    resources = plan.spec.resources
    least = resources.ranks_on(range(resources.nodes.min))
    return least.world_size if plan.spec.launcher in (None, RANKS) else len(least.counts)


def _earlier_plans(run: RunDir) -> Iterator[Plan]:
    """The plans of the run's submissions; each may have had another number of ranks."""
    for path in run.submissions.glob("*/plan.json"):
        with contextlib.suppress(PathError):
            if (plan := read_plan(path)) is not None:
                yield plan


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
    matches = _in_order(search)
    for position, each in enumerate(matches):
        if each.step is None and each.complete and search.run is not None:
            step = logged_step(search.run, each.saved_at)
            matches[position] = each if step is None else replace(each, step=step, step_from=FROM_LOG)
    return matches


def _in_order(search: Search) -> list[ExternalCheckpoint]:
    """The checkpoints, the newest first.

    If all complete ones have a step, the highest is the newest; or else, if all their names have a number, the highest
    of these, since clocks of nodes differ; otherwise the one that was written to last.
    """
    candidates = [_judge(search, each) for each in _with_neighbours(search, list(_candidates(search)))]
    matches = [_describe(search, each) for each in _compare_files(candidates)]
    checkpoints = [each for each in matches if search.since is None or each.saved_at >= search.since]
    complete = [each for each in checkpoints if each.complete]
    if all(each.step is not None for each in complete):
        return sorted(checkpoints, key=lambda each: (each.step or 0, each.saved_at), reverse=True)
    if all(last_number(each.path.name) is not None for each in complete):
        return sorted(checkpoints, key=lambda each: (last_number(each.path.name) or 0, each.saved_at), reverse=True)
    return sorted(checkpoints, key=lambda each: each.saved_at, reverse=True)


@dataclass(frozen=True, slots=True)
class _Candidate:
    tree: FileTree
    format: Format
    problem: str | None = None


def _candidates(search: Search) -> Iterator[_Candidate]:
    for name in glob.glob(search.pattern, recursive=True):  # noqa: PTH207 (pathlib takes no absolute patterns)
        path = Path(name)
        # What cannot be read is gone, or leads nowhere.
        with contextlib.suppress(OSError):
            if not is_unfinished(path.name):
                yield from _expand(search, list_tree(path))


def _expand(search: Search, tree: FileTree) -> Iterator[_Candidate]:
    """A candidate, or the tags in a directory of DeepSpeed."""
    recognized = format_of(tree, search.format)
    if isinstance(recognized, DeepSpeed) and not is_tag(tree):
        for tag in tags_in(tree):
            yield _Candidate(tree.below(tag), recognized)
    elif tree.sizes:
        yield _Candidate(tree, recognized)


def _with_neighbours(search: Search, candidates: Sequence[_Candidate]) -> Iterator[_Candidate]:
    """Candidates with the format of a trainer that most directories have, if their own shows nothing of it yet."""
    trainers = Counter(each.format.NAME for each in candidates if each.tree.is_directory)
    common = next((name for name, _ in trainers.most_common() if name in _OF_TRAINERS), None)
    for each in candidates:
        simple = each.tree.is_directory and each.format.NAME not in _OF_TRAINERS
        if common is not None and simple and search.format in (AUTO, OWN):
            yield replace(each, format=format_of(each.tree, common))
        else:
            yield each


def _judge(search: Search, candidate: _Candidate) -> _Candidate:
    tree = candidate.tree
    try:
        # Others may be able to write to it, since scripts save with any umask; but in a directory that is shared,
        # anybody could add what would be the newest.
        check_owner(tree.path.stat(), tree.path)
        problem = candidate.format.problem(tree, search.ranks if tree.saved_at >= search.began_at else 1)
    except UntrustedPath as error:
        problem = error.why
    except FileNotFoundError:
        problem = "it is being deleted"
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
    return replace(candidate, problem=problem)


def _compare_files(candidates: Sequence[_Candidate]) -> Iterator[_Candidate]:
    """Candidates; a complete one that alone lacks a file which all others have was cut off while it was saved."""
    files = {id(each): each.format.optional_files(each.tree) for each in candidates if each.problem is None}
    for each in candidates:
        others = [
            files[id(other)]
            for other in candidates
            if other is not each and other.problem is None and other.format is each.format
        ]
        # Once two lack a file, the script no longer saves it.
        missing = set.intersection(*others) - files[id(each)] if others and each.problem is None else set()
        yield replace(each, problem=f"{min(missing)} is missing, which the others have") if missing else each


def _describe(search: Search, candidate: _Candidate) -> ExternalCheckpoint:
    tree = candidate.tree
    return ExternalCheckpoint(
        path=tree.path,
        format=candidate.format.NAME,
        step=_step(search, candidate),
        bytes=tree.bytes,
        saved_at=tree.saved_at,
        problem=candidate.problem,
    )


def _step(search: Search, candidate: _Candidate) -> int | None:
    """The step by the spec's key or pattern; else the one inside; else the one in the name."""
    tree = candidate.tree
    if (key := step_key(search.step)) is not None:
        return step_by_key(tree, key) if candidate.problem is None else None
    if search.step is not None:
        return step_by_pattern(search.step, str(tree.path))
    if candidate.problem is None:
        with contextlib.suppress(CheckpointError, OSError):
            step = candidate.format.step(tree)
            if step is not None:
                return step
    return candidate.format.step_in_name(tree.path.name)
