"""Creating the run directories of a submission: all of them, or none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from slurmtrain.errors import PathError, RegistryFailed
from slurmtrain.model.run.events.base import is_plain
from slurmtrain.model.run.events.command_events import RunCreated
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.lineage import Upstream
from slurmtrain.ops.shared.next_attempts import HeldRun, run_settings
from slurmtrain.ops.shared.workspace import Workspace, person
from slurmtrain.ops.submit.chained_runs import StartPoints
from slurmtrain.ops.submit.code_snapshots import Provenance, find_provenance
from slurmtrain.runtime.upstreams import note_dependent, write_upstreams
from slurmtrain.specfile import PlannedRun, SpecFile
from slurmtrain.system.files import (
    DIRECTORY_MODE,
    DiskSpace,
    describe_os_error,
    durable_together,
    fsync_directory,
    json_bytes,
    link_new,
    make_new_directory,
    space_left,
    write_new,
)
from slurmtrain.system.journal import Journal
from slurmtrain.system.locks import locked

# A new run takes about 100 KiB and 30 files and directories until its ranks start (measured with one node; a block for
# each). What ranks write after that is up to them.
_FIRST = DiskSpace(1 << 20, 64)
_EACH = DiskSpace(256 << 10, 64)
# SQLite's journal of a transaction, and what the transaction adds.
_REGISTRY = DiskSpace(1 << 20, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Runs that are created together.

    ``spec``: where they are from. ``runs``: its runs that are to be created. ``executor``: ``slurm`` or
    ``local``. ``sweep``: the id that they share; None for a single run. ``upstreams``: for each of ``runs``, the runs
    that it starts after; empty: none of them starts after any. ``start_points``: the
    checkpoints that they begin with, by what their plans say.
    """

    spec: SpecFile
    runs: Sequence[PlannedRun]
    executor: str
    sweep: str | None
    upstreams: Sequence[Sequence[Upstream]] = ()
    start_points: StartPoints = field(default_factory=dict)


def check_room(workspace: Workspace, runs: int) -> None:
    """Check that there is room for new runs, before the first is created.

    If only the registry has no room, it is not used, which it says itself: the run directories are the truth.

    Args:
        workspace: where they go.
        runs: how many.

    Raises:
        PathError: there is no room for them.
    """
    root, registry = workspace.root.path, workspace.config.registry
    needed = DiskSpace(_FIRST.bytes + runs * _EACH.bytes, (_FIRST.inodes or 0) + runs * (_EACH.inodes or 0))
    shortage = _shortage(root, needed)
    if shortage:
        raise PathError(
            f"the runs root {root} has too little room: {shortage} that {runs} new run(s) may need; nothing was "
            "created; free some space, or choose another place with --runs"
        )
    if isinstance(registry, Path) and (shortage := _shortage(registry.parent, _REGISTRY)):
        workspace.store.give_up(
            RegistryFailed(
                f"the registry {registry} has too little room: {shortage} that it may need; free some space in "
                f"{registry.parent}, or set 'registry' in slurmtrain.yaml to a file elsewhere"
            )
        )


def _shortage(folder: Path, needed: DiskSpace) -> str:
    try:
        return space_left(folder).shortage(needed)
    except OSError:
        return ""  # writing will then show whether there is room


def create(
    workspace: Workspace,
    batch: Batch,
    locks: ExitStack,
    *,
    announce: Callable[[Sequence[str]], None] = lambda _: None,
) -> list[HeldRun]:
    """Create runs: build all directories under temporary names, then rename them into place, their locks held.

    Args:
        workspace: where they go.
        batch: the runs to create.
        locks: receives the locks of the runs, which so cannot be seen unlocked before they have a job.
        announce: called with their ids before any of them can be seen; may raise OSError.

    Raises:
        PathError: a directory cannot be written; none is left.
    """
    plan = batch.runs[0].plan
    common = _Common(person(), find_provenance(Path(plan.workdir), plan.python))
    built: list[tuple[RunDir, int]] = []
    visible: list[RunDir] = []
    try:
        # Until they are renamed nobody sees them: what a power failure takes of them was never there.
        with durable_together(workspace.root.path) if len(batch.runs) > 1 else nullcontext():
            for planned, after in zip(batch.runs, batch.upstreams or [()] * len(batch.runs), strict=True):
                built.append(_build(workspace, batch, planned, common, locks))
                if after:
                    write_upstreams(built[-1][0], after)
        # Ids of one millisecond were drawn in no order; the runs' ids are in the order of the sweep.
        ids = sorted(unborn.id.removeprefix(".new-") for unborn, _ in built)
        announce(ids)
        runs = [HeldRun(workspace.root.run(name), lock) for name, (_, lock) in zip(ids, built, strict=True)]
        # Not strict: the list is empty if none of the runs starts after others.
        for run, after in zip(runs, batch.upstreams, strict=False):
            # Before it can be seen: whoever ends the upstream finds all that wait for it.
            for upstream in after:
                note_dependent(workspace.root.run(upstream.run), run.id)
        for (unborn, _), run in zip(built, runs, strict=True):
            unborn.path.rename(run.directory.path)
            visible.append(run.directory)
        fsync_directory(workspace.root.path)
    except BaseException as error:
        # First, since a run is removed under such a name.
        for unborn, _ in built:
            shutil.rmtree(unborn.path, ignore_errors=True)
        remove_runs(workspace, visible)
        if isinstance(error, OSError):
            place, why = workspace.root.path, describe_os_error(error)
            raise PathError(f"cannot write to the runs root {place}: {why}; nothing was created") from error
        raise
    return runs


def remove_runs(workspace: Workspace, runs: Sequence[RunDir]) -> list[RunDir]:
    """Remove runs that were created but have no job; returns those that cannot be removed.

    If this is killed halfway, ``sync`` removes the rest.
    """
    left = []
    for run in runs:
        unborn = workspace.root.unborn(run.id)
        try:
            run.path.rename(unborn.path)
        except OSError:
            left.append(run)
        # Also where the rename failed because an earlier removal was killed after it.
        shutil.rmtree(unborn.path, ignore_errors=True)
    return left


@dataclass(frozen=True, slots=True)
class _Common:
    """What the runs of a batch have in common: who submits them and from what, and files.

    ``texts``: the first file with each content. It never changes, so the others are links to it.
    """

    by: str
    provenance: Provenance
    texts: dict[bytes, Path] = field(default_factory=dict)

    def write(self, path: Path, content: bytes) -> None:
        """Write a file that must not exist. Raises OSError."""
        first = self.texts.setdefault(content, path)
        if first == path or not link_new(path, first):
            write_new(path, content)


def _build(
    workspace: Workspace, batch: Batch, planned: PlannedRun, common: _Common, locks: ExitStack
) -> tuple[RunDir, int]:
    """Build the directory of a run under a temporary name; returns it, and the descriptor of its lock.

    ``locks`` receives the lock. Raises OSError, PathError if it cannot be written; nothing is left then.
    """
    provenance = common.provenance
    unborn = _new_directory(workspace, batch.sweep)
    try:
        # The lock belongs to the file, which a rename keeps.
        lock = locks.enter_context(locked(unborn.lock))
        assert lock is not None
        for folder in (unborn.journals, unborn.attempts, unborn.submissions):
            make_new_directory(folder)
        # Private, also where a group shares the runs root.
        unborn.checkpoints.mkdir(mode=DIRECTORY_MODE)
        write_new(unborn.plan, json_bytes(planned.plan.to_json()))
        comments = "".join(f"# override: {override}\n" for override in planned.overrides)
        spec_text = f"{batch.spec.text.rstrip(chr(10))}\n{comments}" if comments else batch.spec.text
        for path, content in (
            (unborn.spec, spec_text.encode()),
            (unborn.code_difference, provenance.difference),
            (unborn.environment, provenance.environment),
        ):
            if content or path == unborn.spec:
                common.write(path, content)
        start_from = planned.plan.spec.start_from
        # Without one, the run starts after that which it begins with, and finds it then.
        if start_from is not None and (point := batch.start_points.get(start_from)) is not None:
            point.take_over(unborn)
        with Journal(unborn.journals / "created.jsonl") as journal:
            journal.write(
                RunCreated(
                    name=planned.plan.spec.name,
                    plan_hash=planned.plan.hash,
                    executor=batch.executor,
                    by=common.by,
                    git=provenance.git,
                    overrides=planned.overrides,
                    sweep=batch.sweep,
                    parallel=batch.spec.parallel if batch.sweep is not None else None,
                    pack=batch.spec.pack.to_dict() if batch.spec.pack is not None else None,
                    varies={key: value if is_plain(value) else str(value) for key, value in planned.varies.items()},
                    trial=planned.trial,
                    search=planned.search,
                    spec_file=str(batch.spec.path) if batch.spec.path else None,
                    parents=[parent.to_dict() for parent in planned.parents] or None,
                    **run_settings(planned.plan),
                )
            )
    except BaseException:
        shutil.rmtree(unborn.path, ignore_errors=True)
        raise
    return unborn, lock


def _new_directory(workspace: Workspace, sweep: str | None) -> RunDir:
    # Two submissions in one millisecond may draw the same id: the one whose mkdir() fails draws again.
    while True:
        name = workspace.new_id()
        with suppress(FileExistsError):
            if name != sweep:
                workspace.make_run_directory(workspace.root.unborn(name))
                return workspace.root.unborn(name)
