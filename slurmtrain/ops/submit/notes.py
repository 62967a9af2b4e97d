"""Notes for a person before runs are created: what may go wrong with them.

A note is a line, once for all runs of a sweep.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from slurmtrain.model.environment import describe_obsolete
from slurmtrain.model.experiment.command_words import NamedPath, paths_read, paths_written
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.slurm_options import runs_in_container, unknown_srun_options
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.command_script import (
    NEEDED,
    find_script,
    imports_of,
    is_missing,
    note_profile,
    note_script,
    notes_on_shell,
)
from slurmtrain.slurm import outer_variables
from slurmtrain.slurm.slurm_commands import read_options
from slurmtrain.system.locks import mount_of

_TEMPORARY = "/tmp"  # noqa: S108 (nothing is written there)
# File systems in memory: local to one machine.
_OWN_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_srun_options = functools.cache(functools.partial(read_options, program="srun"))
# How a pattern of checkpoints is shown, before it.
_PATTERN = "checkpoint.glob"


def notes_on(
    workspace: Workspace, plans: Sequence[Plan], executor: str, code_of_now: Sequence[Plan] | None = None
) -> list[str]:
    """Notes on what may go wrong with runs of these plans, before any is created.

    Args:
        workspace: where the runs go.
        plans: the plans of all runs.
        executor: ``slurm`` or ``local``.
        code_of_now: the plans whose code is the code in their working directories, where files may be missing; None:
            all.
    """
    notes = notes_on_plans(plans, executor, code_of_now)
    if executor == "slurm":
        notes += notes_on_root(workspace.root.path)
    return [*notes, *(note.rstrip(".") for note in describe_obsolete({**os.environ, **plans[0].spec.env}))]


def notes_on_root(root: Path) -> list[str]:
    """A note if compute nodes cannot see the runs root: each machine has its own memory file systems and /tmp."""
    mount = mount_of(root.stat().st_dev)
    in_memory = mount.point if mount is not None and mount.kind in _OWN_FILESYSTEMS else None
    place = _TEMPORARY if root.is_relative_to(_TEMPORARY) else in_memory
    if not place:
        return []
    return [
        f"the runs root {root} is on this machine's own {place}, and compute nodes usually cannot see that; choose a "
        "shared directory with --runs or SLURMTRAIN_RUNS"
    ]


def notes_on_pack(pack: Pack | None, executor: str) -> list[str]:
    """A note if the runs of a sweep share no GPUs, though the spec says so: with the ``executor`` local."""
    if pack is None or not pack.share_gpu or executor != "local":
        return []
    return ["'sweep.pack.share_gpu' only affects Slurm jobs: on this machine each run has its own GPUs"]


def notes_on_plans(plans: Sequence[Plan], executor: str, code_of_now: Sequence[Plan] | None = None) -> list[str]:
    """The notes that need no more than the plans and the files of this machine.

    Args:
        plans: the plans of all runs.
        executor: ``slurm`` or ``local``.
        code_of_now: as for :func:`notes_on`.
    """
    counts: Counter[str] = Counter()
    for plan in plans:
        notes = [*plan.launcher_notes(), *note_script(plan, executor), *notes_on_shell(plan), *note_profile(plan)]
        script = find_script(plan)
        is_noted = script is not None and any(each.package in NEEDED for each in imports_of(script))
        if plan.words[0] == "python" and Path(plan.python).parent != Path(sys.executable).parent and not is_noted:
            notes.append(
                f"'python' in the command is {plan.python}, the first on PATH, but slurmtrain runs on "
                f"{sys.executable}: activate that environment if the script needs packages from it"
            )
        if executor == "slurm":
            # sbatch refuses a slip itself, and at once; srun only in the job.
            notes += unknown_srun_options(plan.spec.slurm, _srun_options)
        counts.update([*dict.fromkeys(notes)])
    return [
        *(_of_runs(note, count, len(plans)) for note, count in counts.items()),
        *(outer_variables.notes(plans) if executor == "slurm" else []),
        *_missing_files(plans if code_of_now is None else code_of_now),
        *_shared_by_runs(plans),
    ]


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
    handed = "may be found by" if plan.spec.checkpoint.format == OWN else "would be passed to"
    return [
        f"{checkpoint.path} matches checkpoint.glob and {handed} this new run; "
        "begin the pattern with {checkpoint_dir} to keep runs apart"
    ]


def _missing_files(plans: Sequence[Plan]) -> Iterator[str]:
    """A note for each option of the command whose files are not there, whatever they are called in each run."""
    by_option: dict[str, list[tuple[int, NamedPath, Path]]] = {}
    for run, plan in enumerate(plans):
        # Lines of setup may make the files, or go elsewhere.
        if plan.spec.setup or runs_in_container(plan.spec.slurm):
            continue
        script = find_script(plan)
        for named in paths_read(plan.words):
            path = Path(plan.workdir, named.path)
            if is_missing(path) and (script is None or path != script.path):
                by_option.setdefault(named.option, []).append((run, named, path))
    for missing in by_option.values():
        _, named, first = missing[0]
        more = len({path for _, _, path in missing}) - 1
        likewise = f", and {more} more like it" if more else ""
        note = f"the command names a file that does not exist: {first} ({named}){likewise}"
        yield _of_runs(note, len({run for run, _, _ in missing}), len(plans))


def _shared_by_runs(plans: Sequence[Plan]) -> Iterator[str]:
    """Notes on where runs of these plans would write what others of them write."""
    counts: Counter[tuple[str, NamedPath]] = Counter()
    for plan in plans:
        paths = {os.path.normpath(Path(plan.workdir, named.path)): named for named in paths_written(plan.words)}
        counts.update(paths.items())
        pattern = plan.spec.checkpoint.glob
        if pattern is not None and "{" not in pattern:
            path = os.path.normpath(Path(plan.workdir, pattern))
            # Files right in a run's own copy of its code are its own; links to directories lead out of that.
            is_own = plan.code is not None and "/" not in pattern and not plan.code.stays(path)
            # One mistake, one note: a pattern in the directory of an option.
            if not is_own and not any(path.startswith(f"{each}/") for each in paths):
                counts[path, NamedPath(_PATTERN, pattern)] += 1
    for (_, named), count in counts.items():
        if count > 1:
            name = PurePath(named.path).name
            cure = f"'{{run_dir}}/{name}' keeps them apart"
            if named.option == _PATTERN:
                cure = f"write '{{checkpoint_dir}}/{name}' there, and {{checkpoint_dir}} in the command"
            yield f"{count} runs write to the same {named}; {cure}"
