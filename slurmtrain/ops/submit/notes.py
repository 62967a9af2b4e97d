"""Notes on what may go wrong with runs that are being submitted: a line each, once for all runs of a sweep."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.model.preflight.obsolete_variables import describe_obsolete
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.spec.code import directories_of, relative_to_root
from slurmtrain.model.spec.command_files import NamedPath, paths_read
from slurmtrain.model.spec.plan import Plan
from slurmtrain.model.spec.sbatch import runs_in_container, unknown_srun_options
from slurmtrain.model.spec.sweep import Pack
from slurmtrain.ops.shared.trackers import notes_on_trackers
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.outputs import shared_by_runs, shared_with_others
from slurmtrain.ops.submit.script import find_script, is_missing, names_what_it_needs, note_script
from slurmtrain.ops.submit.shell_scripts import notes_on_scripts
from slurmtrain.runtime.environment import surroundings
from slurmtrain.slurm.command import read_options
from slurmtrain.system.locks import mount_of

_TEMPORARY = "/tmp"  # noqa: S108 (nothing is written there)
# File systems in memory: local to one machine.
_OWN_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


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
        notes += surroundings.notes(plans)
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
    from slurmtrain.model.spec.checkpoint import OWN
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
    """What the snapshots of plans hold, each of which is read once, and only if a file is missing."""

    def __init__(self, workspace: Workspace) -> None:
        self._root = workspace.root
        self._paths: dict[str, set[str]] = {}

    def has(self, plan: Plan, path: Path) -> bool:
        """Whether the snapshot of a plan holds a file or directory; one that was taken earlier may."""
        relative = None if plan.code is None else relative_to_root(str(path), plan.code.root)
        if plan.code is None or relative is None:
            return False
        if plan.code.hash not in self._paths:
            from slurmtrain.runtime.code.tree import read_manifest

            files: list[str] = []
            with contextlib.suppress(PathError):
                files = [file.path for file in read_manifest(self._root.run("new"), plan.code.hash).files]
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
