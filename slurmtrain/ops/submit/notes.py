"""Notes for a person before runs are created: what may go wrong with them, what is submitted, and the most it may cost.

A note is a line, once for all runs of a sweep.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from slurmtrain.config import Config
from slurmtrain.errors import PathError, SlurmtrainError
from slurmtrain.model.experiment.code import CodeSnapshot, directories_of, relative_to_root
from slurmtrain.model.experiment.command_words import NamedPath, paths_read, paths_written
from slurmtrain.model.experiment.launcher import split_command
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.slurm_options import runs_in_container, unknown_srun_options
from slurmtrain.model.experiment.sweep import Pack, SweepCost, cost_of
from slurmtrain.model.experiment.sweep_values import SearchSpec
from slurmtrain.model.preflight.obsolete_variables import describe_obsolete
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.shared.next_attempts import pack_of_group, request_key, split_groups
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.trackers import notes_on_trackers
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.command_script import (
    find_script,
    is_missing,
    names_what_it_needs,
    note_script,
    notes_on_scripts,
)
from slurmtrain.slurm import outer_variables
from slurmtrain.slurm.slurm_commands import read_options
from slurmtrain.specfile import PlannedRun, SpecFile
from slurmtrain.system.files import read_json
from slurmtrain.system.locks import mount_of

_TEMPORARY = "/tmp"  # noqa: S108 (nothing is written there)
# File systems in memory: local to one machine.
_OWN_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
# How many of the newest live runs are compared with: each costs reading its plan.
_MOST = 200
# How a pattern of checkpoints is shown, before it.
_PATTERN = "checkpoint.glob"


def notes_on(workspace: Workspace, plans: Sequence[Plan], executor: str) -> list[str]:
    """Notes on what may go wrong with runs of these plans, before any is created.

    Args:
        workspace: where the runs go.
        plans: the plans of all runs.
        executor: ``slurm`` or ``local``.
    """
    variables = {**os.environ, **plans[0].spec.env}
    return [
        *notes_on_plans(plans, executor, _Snapshots(workspace).has),
        *shared_with_others(workspace, plans),
        *notes_on_trackers(plans),
        *(_not_shared(workspace.root.path) if executor == "slurm" else []),
        *(note.rstrip(".") for note in describe_obsolete(variables)),
    ]


def notes_on_pack(pack: Pack | None, executor: str) -> list[str]:
    """A note if the runs of a sweep share no GPUs, though the spec says so: with the ``executor`` local."""
    if pack is None or not pack.share_gpu or executor != "local":
        return []
    return ["'sweep.pack.share_gpu' is for jobs of Slurm: on this machine each run has GPUs of its own"]


def notes_on_plans(
    plans: Sequence[Plan], executor: str, is_in_snapshot: Callable[[Plan, Path], bool] = lambda *_: False
) -> list[str]:
    """The notes that need no more than the plans and the files of this machine.

    Args:
        plans: the plans of all runs.
        executor: ``slurm`` or ``local``.
        is_in_snapshot: whether a run will have something at this path, which is not there now.
    """
    counts = Counter(note for plan in plans for note in dict.fromkeys(_notes_on_plan(plan, executor)))
    notes = [_of_runs(note, count, len(plans)) for note, count in counts.items()]
    if executor == "slurm":
        notes += outer_variables.notes(plans)
    return [*notes, *_missing_files(plans, is_in_snapshot), *shared_by_runs(plans)]


def _notes_on_plan(plan: Plan, executor: str) -> Iterator[str]:
    yield from plan.launcher_notes()
    yield from note_script(plan, executor)
    yield from notes_on_scripts(plan)
    yield from _other_python(plan)
    if plan.spec.deterministic:
        yield "'deterministic: true': such algorithms are often slower on GPUs, and an operation that has none fails"
    if executor == "slurm":
        # sbatch refuses a slip itself, and at once; srun only in the job.
        yield from unknown_srun_options(plan.spec.slurm, _read_srun_options)


@functools.cache
def _read_srun_options(option: str) -> frozenset[str]:
    return read_options(option, "srun")


def _of_runs(note: str, count: int, total: int) -> str:
    if total == 1:
        return note
    return f"{count} runs: {note}" if count == total else f"{count} of {total} runs: {note}"


def adopted_checkpoint(run: RunDir, plan: Plan) -> list[str]:
    """A note if a new run's checkpoint pattern already matches a checkpoint, maybe written by another run."""
    if plan.spec.checkpoint.glob is None:
        return []
    from slurmtrain.model.experiment.checkpoint import OWN
    from slurmtrain.runtime.checkpoint.external import Search, newest

    # The run has no copy of its code yet: where it will have links, they lead to what is in the working directory now.
    checkpoint = newest(Search.from_plan(replace(plan, code=None), run))
    if checkpoint is None:
        return []
    handed = "may be found by" if plan.spec.checkpoint.format == OWN else "is handed to"
    return [
        f"{checkpoint.path} matches checkpoint.glob and {handed} this new run; "
        "begin the pattern with {checkpoint_dir} to keep runs apart"
    ]


class _Snapshots:
    """The files in the snapshots of plans; each snapshot is read once, and only if a file is missing."""

    def __init__(self, workspace: Workspace) -> None:
        self._root = workspace.root
        self._paths: dict[str, set[str]] = {}

    def has(self, plan: Plan, path: Path) -> bool:
        """Whether the snapshot of a plan holds a file or directory; one that was taken earlier may."""
        relative = None if plan.code is None else relative_to_root(str(path), plan.code.root)
        if plan.code is None or relative is None:
            return False
        if plan.code.hash not in self._paths:
            from slurmtrain.runtime.code.code_copy import read_code_manifest

            files: list[str] = []
            with contextlib.suppress(PathError):
                files = [file.path for file in read_code_manifest(self._root.run("new"), plan.code.hash).files]
            self._paths[plan.code.hash] = {*files, *directories_of(files)}
        return relative in self._paths[plan.code.hash]


def _missing_files(plans: Sequence[Plan], is_in_snapshot: Callable[[Plan, Path], bool]) -> Iterator[str]:
    """A note for each option of the command whose files are not there, whatever they are called in each run."""
    by_option: dict[str, list[tuple[int, NamedPath, Path]]] = {}
    for run, plan in enumerate(plans):
        for named, path in _missing_in(plan):
            if is_in_snapshot(plan, path):
                continue
            by_option.setdefault(named.option, []).append((run, named, path))
    for missing in by_option.values():
        _, named, first = missing[0]
        more = len({path for _, _, path in missing}) - 1
        note = f"there is no {first}, which the command names ({named})" + (
            f", nor {more} more like it" if more else ""
        )
        yield _of_runs(note, len({run for run, _, _ in missing}), len(plans))


def _missing_in(plan: Plan) -> Iterator[tuple[NamedPath, Path]]:
    """Files that a command seems to read, and that are not there. Lines of setup may make them, or go elsewhere."""
    if plan.spec.setup or runs_in_container(plan.spec.slurm):
        return
    script = find_script(plan)
    for named in paths_read(plan.words):
        path = Path(plan.workdir, named.path)
        if is_missing(path) and (script is None or path != script.path):
            yield named, path


def _other_python(plan: Plan) -> list[str]:
    """A note if ``python`` in the command, the first on PATH, is not slurmtrain's, and nothing else tells of it."""
    if plan.words[0] != "python" or Path(plan.python).parent == Path(sys.executable).parent:
        return []
    script = find_script(plan)
    if script is not None and names_what_it_needs(script):
        return []
    return [
        f"'python' in the command is {plan.python}, the first on PATH; slurmtrain itself runs on {sys.executable}: "
        "activate that environment if the script needs what is installed there"
    ]


def _not_shared(root: Path) -> list[str]:
    """A note if compute nodes cannot see the runs root: each machine has its own memory file systems and /tmp."""
    mount = mount_of(root.stat().st_dev)
    if root.is_relative_to(_TEMPORARY):
        place = _TEMPORARY
    elif mount is not None and mount.kind in _OWN_FILESYSTEMS:
        place = mount.point
    else:
        return []
    return [
        f"the runs root {root} is on this machine's own {place}, which compute nodes usually do not see; choose a "
        "shared directory with --runs or SLURMTRAIN_RUNS"
    ]


# --- directories and files that two runs would write to at once ------------------------------------------------------


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
    """The absolute paths that a run writes to; none if its plan cannot be read."""
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


# --- previews --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Preview:
    """The runs of a spec. ``keys``: those that vary. ``notes``: what ``submit`` would warn of in the spec.

    ``search``: the search that chooses the values of runs; the only run here is an example.
    """

    runs: Sequence[PlannedRun]
    keys: Sequence[str]
    cost: SweepCost
    notes: Sequence[str]
    search: SearchSpec | None = None

    def to_json(self) -> dict[str, Any]:
        """What ``submit --dry-run --json`` prints."""
        runs = [
            {
                "name": run.plan.spec.name,
                "plan_hash": run.plan.hash,
                "varies": dict(run.varies),
                "overrides": list(run.overrides),
            }
            for run in self.runs
        ]
        search = {"search": self.search.to_dict()} if self.search is not None else {}
        return {"schema": 1, "runs": runs, **search, "cost_per_attempt": cost_json(self.cost)}


def preview(spec: SpecFile, executor: str) -> Preview:
    """What submitting all runs of ``spec`` would be; ``executor``: what would start them, for the notes."""
    plans = [run.plan for run in spec.runs]
    keys = list(dict.fromkeys(key for run in spec.runs for key in run.varies))
    notes = [*map(str, spec.warnings), *notes_on_pack(spec.pack, executor), *notes_on_plans(plans, executor)]
    return Preview(spec.runs, keys, cost_of_runs(spec), notes, spec.search)


def cost_of_runs(spec: SpecFile) -> SweepCost:
    """What all runs of a spec may cost."""
    # The runs of a search are all like its example.
    runs = spec.runs * (spec.search.trials if spec.search is not None else 1)
    if spec.pack is None:
        return cost_of(run.plan.spec.resources for run in runs)
    # As they are submitted: those that do not fill a job are a smaller pack, which has a node to itself all the same.
    keyed = ((request_key(run.plan, run.secrets), run.plan.spec.resources) for run in runs)
    groups = split_groups(keyed, len(runs), spec.pack.runs)
    return sum((cost_of(group, pack_of_group(spec.pack, len(group))) for group in groups), cost_of(()))


def cost_json(cost: SweepCost) -> dict[str, Any]:
    """A cost in JSON; sums that nothing bounds are null."""
    bounded = not cost.without_limit
    return {
        "runs": cost.runs,
        "node_hours": cost.node_hours if bounded else None,
        "gpu_hours": cost.gpu_hours if bounded else None,
        "runs_without_limit": cost.without_limit,
    }


def large_sweep(config: Config, spec: SpecFile) -> str:
    """Why a sweep should be confirmed before it is submitted, as a sentence without a full stop; empty if not."""
    if len(spec.runs) == 1 and spec.search is None:
        return ""
    cost = cost_of_runs(spec)
    excess = cost.excess(config.sweep_confirm_runs, config.sweep_confirm_gpu_hours)
    return f"this sweep is {cost}: {excess}" if excess else ""
