"""Directories and files that two runs would write to at once, by what their commands say."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from slurmtrain.errors import PathError, SlurmtrainError
from slurmtrain.model.spec.code import CodeSnapshot
from slurmtrain.model.spec.command_files import NamedPath, paths_written
from slurmtrain.model.spec.launcher import split_command
from slurmtrain.model.spec.plan import Plan
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import read_json

# How many of the newest live runs are compared with: each costs reading its plan.
_MOST = 200
# How a pattern of checkpoints is shown, before it.
_PATTERN = "checkpoint.glob"


def shared_by_runs(plans: Sequence[Plan]) -> list[str]:
    """Notes on where runs of these plans would write what others of them write."""
    counts = _counts(plans)
    return [f"{n} runs write to the same {named}; {_cure(named)}" for (_, named), n in counts.items() if n > 1]


def shared_with_others(workspace: Workspace, plans: Sequence[Plan]) -> list[str]:
    """A note if a run of these plans would write what an earlier one writes that has not ended.

    What the plans share is left out: it is a mistake of its own, with the same cure.
    """
    by_path = {path: named for (path, named), n in _counts(plans).items() if n == 1}
    if not by_path:
        return []
    try:
        index = observe(workspace, ask_slurm=False).runs.index
    except (SlurmtrainError, OSError):  # what is only noted must not keep a run from starting
        return []
    live = [run_id for run_id, row in index.items() if not row.ended][-_MOST:]
    used = {path: run_id for run_id in live for path in _outputs_in(workspace, run_id) & by_path.keys()}
    if not used:
        return []
    path = next(path for path in by_path if path in used)
    named, more = by_path[path], len(used) - 1
    likewise = f", and likewise {more} more" if more else ""
    return [f"run {used[path]}, which has not ended, writes to the same {named}{likewise}; {_cure(named)}"]


def _counts(plans: Sequence[Plan]) -> Counter[tuple[str, NamedPath]]:
    """How many of the plans write to each path."""
    return Counter(output for plan in plans for output in dict(_outputs_of(plan)).items())


def _outputs_in(workspace: Workspace, run_id: str) -> set[str]:
    """The absolute paths to which a run writes; none if its plan cannot be read."""
    with contextlib.suppress(PathError, ValueError, KeyError, TypeError):
        plan = read_json(workspace.root.run(run_id).plan) or {}
        spec = plan["spec"]
        outputs = _outputs(split_command(spec["command"]), spec["checkpoint"], plan["workdir"])
        code = CodeSnapshot.from_dict(plan["code"]) if plan.get("code") else None
        return {path for path, named in outputs if _is_shared(path, named, code)}
    return set()


def _outputs_of(plan: Plan) -> Iterator[tuple[str, NamedPath]]:
    outputs = _outputs(plan.words, {"glob": plan.spec.checkpoint.glob}, plan.workdir)
    return (output for output in outputs if _is_shared(*output, plan.code))


def _is_shared(path: str, named: NamedPath, code: CodeSnapshot | None) -> bool:
    """Whether what is written leaves a run's own copy of its code, if it has one: also by links to directories."""
    in_directory = named.option != _PATTERN or "/" in named.path
    return code is None or in_directory or code.stays(path)


def _outputs(words: Sequence[str], checkpoint: Mapping[str, Any], workdir: str) -> Iterator[tuple[str, NamedPath]]:
    """Absolute paths that a command writes to, with how they are written."""
    paths = {os.path.normpath(Path(workdir, named.path)): named for named in paths_written(words)}
    yield from paths.items()
    pattern = checkpoint["glob"]
    if pattern is None or "{" in pattern:
        return
    pattern_path = os.path.normpath(Path(workdir, pattern))
    # One mistake, one note: a pattern in the directory of an option.
    if not any(pattern_path.startswith(f"{path}/") for path in paths):
        yield pattern_path, NamedPath(_PATTERN, pattern)


def _cure(named: NamedPath) -> str:
    """How to keep the runs apart, as half a sentence."""
    name = PurePath(named.path).name
    if named.option == _PATTERN:
        return f"write '{{checkpoint_dir}}/{name}' there, and {{checkpoint_dir}} in the command"
    return f"'{{run_dir}}/{name}' keeps them apart"
