"""The runs that a run starts after: the files that name them, how they stand, and what the run gets from them."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import NoCheckpoint, PathError, SlurmtrainError
from slurmtrain.model.run.layout import RunDir, RunsRoot, checkpoint_name, run_ids_among
from slurmtrain.model.run.lineage import EARLY, Standing, Upstream, standing
from slurmtrain.system.files import FILE_MODE, describe_os_error, make_new_directory, read_json, write_json

# Commands that only list runs import this module too, and nothing of specs and checkpoints.
if TYPE_CHECKING:
    from slurmtrain.model.experiment.chain import Reference
    from slurmtrain.model.experiment.checkpoint import StartFromSpec
    from slurmtrain.model.experiment.spec import Spec
    from slurmtrain.model.run.run import Run

_SEEN_S = 20.0
_POLL_S = 0.2


def read_upstreams(run: RunDir) -> list[Upstream]:
    """The runs that this one starts after. Raises PathError."""
    data = read_json(run.upstreams)
    if data is None:
        return []
    try:
        return [Upstream.from_dict(each) for each in data["upstreams"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise PathError(f"{run.upstreams} has changed since slurmtrain wrote it ({error!r})") from error


def write_upstreams(run: RunDir, upstreams: Sequence[Upstream]) -> None:
    """Record, in a run that nobody can see yet, which runs it starts after. Raises OSError."""
    write_json(run.upstreams, {"upstreams": [upstream.to_dict() for upstream in upstreams]})


def note_dependent(upstream: RunDir, run_id: str) -> None:
    """Note that a run starts after ``upstream``, unless that was deleted meanwhile. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        try:
            make_new_directory(upstream.dependents)
        except FileNotFoundError:
            return
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    os.close(os.open(upstream.dependents / run_id, flags, FILE_MODE))


def dependents_of(run: RunDir) -> list[str]:
    """The ids of the runs that start after this one, oldest first; some may never have been created."""
    with contextlib.suppress(OSError):
        return sorted(run_ids_among(os.listdir(run.dependents)))
    return []


def has_begun(run: RunDir) -> bool:
    """Whether all upstreams of a run had ended as they must when it began: it never waits for them again."""
    return run.upstream_facts.exists()


def write_facts(run: RunDir, facts: Mapping[str, Any]) -> None:
    """Record that the upstreams of a run have ended, and what its references stand for. Raises OSError."""
    write_json(run.upstream_facts, {"facts": dict(facts)})


def read_facts(run: RunDir) -> Mapping[str, Any]:
    """What the references of a run stand for, which its node 0 has written; empty without upstreams.

    Raises PathError if this node cannot see them.
    """
    if not run.upstreams.exists():
        return {}
    # Other nodes see a file of node 0's a moment later on some file systems.
    deadline = time.monotonic() + _SEEN_S
    while (data := read_json(run.upstream_facts)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    facts = (data or {}).get("facts")
    if not isinstance(facts, Mapping):
        raise PathError(f"{run.upstream_facts} is missing, or has changed since slurmtrain wrote it")
    return facts


# --- whether the runs that it starts after have ended -----------------------------------------------------------------
# Slurm starts a job with ``--dependency=afterany`` once the other job is over, however it ended, and also if it will be
# replaced by another job; ``afterok`` would never start it after a crash that the run itself survives, and would start
# it once Slurm has forgotten a job that failed. So node 0 decides, and puts its job back into the queue if it is too
# early.


# How long a job of Slurm's waits for the last words of an upstream, which a network file system may show late.
_LAST_WORDS_S = 10.0
_UPSTREAM_POLL_S = 0.5
_SLOWEST_POLL_S = 3.0
# When a job looks again whether an upstream that has no job has ended; then after twice as long each time: a week costs
# 35 starts, and nobody who waits for a command for days waits much longer for that.
_LOOK_AGAIN_S = 120.0
_SELDOM_S = 6 * 3600.0
_MOST_DOUBLINGS = 8


def read_upstream_runs(run: RunDir, upstreams: Sequence[Upstream]) -> dict[str, Run]:
    """The upstreams of a run that exist, by id, as their journals have them now."""
    from slurmtrain.model.interruption.policy import with_next_start
    from slurmtrain.runtime.job.run_reader import read_run

    root = RunsRoot(run.path.parent)
    directories = [root.run(upstream.run) for upstream in upstreams]
    return {each.id: with_next_start(read_run(each)) for each in directories if each.path.is_dir()}


def standing_of(run: RunDir, upstreams: Sequence[Upstream]) -> Standing:
    """How the upstreams of a run stand."""
    return standing(upstreams, read_upstream_runs(run, upstreams))


def wait_for_upstreams(
    run: RunDir,
    upstreams: Sequence[Upstream],
    *,
    patient: bool,
    note: Callable[[Upstream], object],
    give_up: Callable[[], bool],
) -> Standing:
    """Wait until the upstreams of a run have ended; returns how they stand then.

    Args:
        run: The run.
        upstreams: The runs that it starts after.
        patient: Wait as long as it takes, as on this machine, where that costs nothing.
        note: Called with each upstream as it begins to wait for it.
        give_up: Whether not to wait any longer.
    """
    began, noted, poll_s = time.monotonic(), None, _UPSTREAM_POLL_S
    remaining = upstreams
    while True:
        now = standing_of(run, remaining)
        if now.is_ready and remaining is not upstreams:
            # Again: one that had ended may have been resumed.
            now = standing_of(run, upstreams)
        if now.is_ready or now.problem or give_up():
            return now
        if not patient and time.monotonic() - began > _LAST_WORDS_S:
            return now
        if patient and now.waits[0] != noted:
            noted = now.waits[0]
            note(noted)
        # Of a sweep, most have ended long before the last.
        remaining = now.waits
        time.sleep(poll_s)
        poll_s = min(_SLOWEST_POLL_S, 1.2 * poll_s)


def unfinished_jobs(run: RunDir, upstreams: Sequence[Upstream]) -> list[str]:
    """The newest jobs of the upstreams of a run that have not ended."""
    runs = read_upstream_runs(run, upstreams).values()
    return [each.newest.job_id for each in runs if not each.ended and each.newest is not None and each.newest.job_id]


def look_again_s(run: RunDir, upstreams: Sequence[Upstream]) -> float:
    """In how many seconds a job that has started too early looks again, if no job of its upstreams is in the queue.

    Args:
        run: Its run, whose end has been journaled.
        upstreams: The runs that it starts after.
    """
    from slurmtrain.runtime.job.run_reader import read_run

    waits = [each.newest for each in read_upstream_runs(run, upstreams).values() if not each.ended]
    submitted = max((attempt.submitted_at or 0.0 for attempt in waits if attempt is not None), default=0.0)
    starts = [attempt for attempt in read_run(run).attempts if attempt.cause == EARLY]
    # The starts before that waited for another job.
    count = sum((attempt.started_at or 0.0) > submitted for attempt in starts)
    return min(_SELDOM_S, _LOOK_AGAIN_S * 2.0 ** min(_MOST_DOUBLINGS, max(0, count - 1)))


# --- what a run gets from the runs that it starts after ---------------------------------------------------------------
def take_from_upstreams(run: RunDir, spec: Spec, upstreams: Sequence[Upstream], *, is_node_0: bool) -> None:
    """Note the results that a run gets from the runs that it starts after, which have ended.

    Later attempts use the same; only what an override has added is looked up then.

    Args:
        run: The run.
        spec: Its spec.
        upstreams: The runs that it starts after.
        is_node_0: Whether this is the node that writes.

    Raises:
        SlurmtrainError: An upstream does not have it.
    """
    from slurmtrain.model.experiment.chain import references_of

    recorded = read_facts(run) if has_begun(run) else None
    references = [each for each in references_of(spec) if str(each) not in (recorded or {})]
    if recorded is not None and not references:
        return
    facts = find_facts(run, upstreams, references)
    if not is_node_0:
        return
    if recorded is None and spec.start_from is not None:
        link_upstream(run, upstreams, spec.start_from)
    write_facts(run, {**(recorded or {}), **facts})


def find_facts(run: RunDir, upstreams: Sequence[Upstream], references: Sequence[Reference]) -> dict[str, Any]:
    """What the references of a run stand for, by their text.

    Args:
        run: The run.
        upstreams: The runs that it starts after, which have ended.
        references: To facts of these.

    Raises:
        SlurmtrainError: An upstream has no such fact.
    """
    if not references:
        return {}
    runs, root = read_upstream_runs(run, upstreams), RunsRoot(run.path.parent)
    by_name = {upstream.name: upstream for upstream in upstreams}
    facts = {}
    for reference in references:
        upstream = by_name.get(reference.run)
        ended = None if upstream is None else runs.get(upstream.run)
        value = None if ended is None else _fact(root.run(ended.id), ended, reference.field)
        if value is None:
            metric = reference.field.removeprefix("metrics.")
            noun = metric if metric == reference.field else f"metric {metric!r}"
            raise SlurmtrainError(f"{reference}: run {upstream or reference.run} has no {noun}")
        facts[str(reference)] = value
    return facts


def link_upstream(run: RunDir, upstreams: Sequence[Upstream], start_from: StartFromSpec) -> None:
    """Let a run begin with a checkpoint of one of the runs that it starts after, if it has not been given one before.

    Args:
        run: The run.
        upstreams: The runs that it starts after, which have ended.
        start_from: The checkpoint, and its run.

    Raises:
        SlurmtrainError: The upstream has no such checkpoint of slurmtrain's format, or it cannot be linked.
    """
    from slurmtrain.runtime.checkpoint.checkpoint_files import link_checkpoint, published, start_point

    upstream = next((each for each in upstreams if start_from.run in (each.name, each.run)), None)
    if upstream is None or start_point(run) is not None:
        return
    checkpoints = RunsRoot(run.path.parent).run(upstream.run).checkpoints
    name = None if start_from.step is None else checkpoint_name(int(start_from.step))
    path = next((each for each in published(checkpoints) if name in (None, each.name)), None)
    if path is None:
        of_step = "" if start_from.step is None else f" of step {start_from.step}"
        raise NoCheckpoint(
            f"run {upstream} has no checkpoint{of_step} to begin with that slurmtrain.session() can read"
        )
    try:
        # A killed attempt may have linked only some of its files.
        shutil.rmtree(run.start, ignore_errors=True)
        link_checkpoint(path, run)
    except OSError as error:
        raise PathError(f"cannot link {path} into {run.start}: {describe_os_error(error)}") from error


def _fact(directory: RunDir, run: Run, field: str) -> Any:
    newest = run.checkpoint
    step = run.step if run.step is not None or newest is None else newest.step
    facts: Mapping[str, Any] = {"id": run.id, "dir": str(directory.path), "step": step}
    if field == "checkpoint":
        from slurmtrain.runtime.checkpoint.checkpoint_files import newest_published

        # The library's own, else one that the script saved itself.
        complete = [directory.path / each.path for each in reversed(run.checkpoints) if each.on_disk and each.complete]
        path = newest_published(directory.checkpoints) or next((path for path in complete if path.exists()), None)
        return None if path is None else str(path)
    return run.metrics.get(field.removeprefix("metrics.")) if field.startswith("metrics.") else facts[field]
