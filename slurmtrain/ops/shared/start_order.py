"""Runs that start after others: jobs that wait for other runs' jobs, and the end of runs that wait for a failed one.

Jobs are made to wait by Slurm's dependencies. A run whose upstream will not complete is ended, with a reason that says
which: its job would find out itself once it starts, which may take days in a full queue. The agents of local runs see
it at once.

Runs are active one at a time for each name where a spec has ``slurm.dependency: singleton``. Slurm compares the names
of jobs, which end with the run's id here. So a run waits for the others of its name as for runs in ``after``, however
they end, and its job for jobs in Slurm's queue that belong to other runs roots of the same account, or to scripts of
that name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import LaunchError, PathError, RunBusy, SlurmDown, SlurmtrainError
from slurmtrain.model.experiment.slurm_options import is_singleton
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.run.job_state import is_final
from slurmtrain.model.run.layout import RUN_ID, RunDir
from slurmtrain.model.run.lineage import (
    AFTER,
    EARLY,
    UPSTREAM,
    Upstream,
    describe_failure,
    describe_wait,
    standing,
    tree_order,
)
from slurmtrain.ops.shared.observe import ListedRuns, Observed, observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.upstreams import dependents_of, has_begun, read_upstreams
from slurmtrain.system.locks import locked

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run
    from slurmtrain.registry.rows import Listed

# Why Slurm does not start a job that is to look again later (squeue(1), JOB REASON CODES).
BEGIN_TIME = "BeginTime"


# --- one at a time ---------------------------------------------------------------------------------------------------


def active_namesakes(runs: ListedRuns, name: str) -> list[str]:
    """The ids of the ``runs`` with this ``name`` that have not ended."""
    return [run_id for run_id, row in runs.named([name]).items() if row.name == name and not row.ended]


@contextlib.contextmanager
def only_one(workspace: Workspace, specs: Collection[Spec]) -> Iterator[None]:
    """Let no other command create runs of the names of these specs, as far as they are singletons.

    Args:
        workspace: where the runs are.
        specs: the specs of the runs that are about to be created.
    """
    with contextlib.ExitStack() as locks:
        # In one order, so that two commands cannot wait for each other.
        for name in sorted({spec.name for spec in specs if is_singleton(spec.slurm)}):
            # The lock's file is in the runs root, which may not exist yet.
            workspace.prepare()
            locks.enter_context(locked(workspace.root.name_lock(name)))
        yield


def claim_name(
    workspace: Workspace, spec: Spec, run_id: str, locks: contextlib.ExitStack, names: dict[str, str] | None = None
) -> None:
    """Let a run be started again, as far as others of its name allow that if it is a singleton.

    Args:
        workspace: where it is.
        spec: its spec.
        run_id: its id.
        locks: receives the lock of the name.
        names: the runs that this command starts again already, by their names; the run is added to it.

    Raises:
        RunBusy: another run of the name is started, or has not ended.
    """
    if not is_singleton(spec.slurm):
        return
    rule, names = "'slurm.dependency: singleton' lets one of them run at a time", {} if names is None else names
    if spec.name in names:
        raise RunBusy(
            f"run {names[spec.name]} of the same name is started, and {rule}: 'slurmtrain resume {run_id}' once that "
            "has ended"
        )
    # Whoever holds it may wait for the lock of a run that this command holds.
    if locks.enter_context(locked(workspace.root.name_lock(spec.name), wait=False)) is None:
        raise RunBusy(f"another command is just starting a run of the name {spec.name}; try again in a moment")
    active = active_namesakes(observe(workspace, ask_slurm=False).runs, spec.name)
    others = [each for each in active if each != run_id]
    if others:
        raise RunBusy(
            f"run {run_id} cannot start now: run {others[0]} of the same name has not ended, and {rule}: "
            f"'slurmtrain wait {others[0]}', or cancel it"
        )
    names[spec.name] = run_id


def jobs_of_namesakes(workspace: Workspace, spec: Spec) -> list[str]:
    """The jobs of this account, of no run in this runs root, that the job of a run must wait for as a singleton.

    Args:
        workspace: where the run is, whose namesakes there are its upstreams.
        spec: its spec.

    Raises:
        LaunchError: Slurm does not say which there are.
    """
    if not is_singleton(spec.slurm):
        return []
    queue = workspace.scheduler.queue()
    if not queue.answered:
        raise LaunchError(
            f"'slurm.dependency: singleton' waits for other jobs of the name {spec.name}, and Slurm does not say which "
            f"there are: {queue.problem}; try again later"
        )
    waits: dict[str, None] = {}
    for job in queue.jobs.values():
        name, _, run_id = job.name.rpartition("-")
        is_run = name == spec.name and RUN_ID.fullmatch(run_id) is not None
        is_here = is_run and (workspace.root.run(run_id).path.exists() or workspace.root.array(run_id).path.exists())
        if not is_final(job.state) and (is_run or job.name == spec.name) and not is_here:
            # Of an array all elements: their names are the same.
            waits[job.id.partition("_")[0]] = None
    return list(waits)


# --- ends ------------------------------------------------------------------------------------------------------------


def end_blocked(workspace: Workspace, run_ids: Iterable[str]) -> dict[str, str]:
    """End the waiting runs on Slurm among these that can never start, and runs that wait for them in turn.

    Args:
        workspace: Where they are.
        run_ids: Runs; the registry is up to date about them and the runs that they wait for.

    Returns:
        Why, by the ids of the runs that it has ended.
    """
    ended: dict[str, str] = {}
    jobs: list[str] = []
    candidates = list(run_ids)
    while candidates:
        blocked = {run_id: why for run_id in candidates if (why := _end_if_blocked(workspace, run_id, jobs))}
        ended |= blocked
        if blocked:
            observe(workspace, list(blocked), ask_slurm=False)
        # What waits for these can never start either.
        candidates = [run_id for run_id in dependents(workspace, blocked) if run_id not in ended]
    if jobs:
        # If this is killed, or Slurm does not answer: what starts sees that the run is over, and ends at once.
        with contextlib.suppress(SlurmDown):
            workspace.scheduler.cancel(jobs, force=False)
    return ended


def dependents(workspace: Workspace, run_ids: Collection[str]) -> list[str]:
    """The runs that start after any of these, and exist."""
    ids = dict.fromkeys(each for run_id in run_ids for each in dependents_of(workspace.root.run(run_id)))
    present = workspace.present(ids)
    return [run_id for run_id in ids if run_id in present]


def observe_upstreams(workspace: Workspace, directory: RunDir, *, ask_slurm: bool = True) -> None:
    """Bring what is known of the runs that a run starts after up to date.

    Args:
        workspace: Where they are.
        directory: The run's.
        ask_slurm: Ask Slurm, if it may know more about any of them.
    """
    ids = [upstream.run for upstream in read_upstreams(directory)]
    if ids:
        observe(workspace, ids, ask_slurm=ask_slurm)


def upstream_problem(workspace: Workspace, directory: RunDir) -> str:
    """Why a run cannot start, as far as the registry knows its upstreams; empty if it may."""
    upstreams = read_upstreams(directory)
    if not upstreams or has_begun(directory):
        return ""
    return standing(upstreams, upstream_runs(workspace, upstreams)).problem


def upstream_runs(workspace: Workspace, upstreams: Collection[Upstream]) -> Mapping[str, Run]:
    """The runs among these that exist, by id, as the registry has them."""
    ids = {upstream.run for upstream in upstreams}
    present = workspace.present(ids)
    return {run_id: run for run_id, run in workspace.store.load_all(ids).items() if run_id in present}


def _end_if_blocked(workspace: Workspace, run_id: str, jobs: list[str]) -> str:
    """End a waiting run if it can never start, and add its job to ``jobs``; returns why, or nothing."""
    directory = workspace.root.run(run_id)
    with contextlib.suppress(PathError):
        if not upstream_problem(workspace, directory):
            return ""
        with locked(directory.lock, wait=False) as lock:
            # Its holder is starting or ending it: a later command looks again.
            if lock is None:
                return ""
            # Again: somebody may have started the other run meanwhile.
            observe_upstreams(workspace, directory, ask_slurm=False)
            observe(workspace, [run_id], ask_slurm=False)
            run = workspace.store.load(run_id)
            problem = upstream_problem(workspace, directory)
            if problem and run is not None and _waits(run):
                # Imported here: most commands end nothing.
                from slurmtrain.model.run.events.command_events import UpstreamFailed
                from slurmtrain.runtime.job import lease

                newest = run.newest
                assert newest is not None
                ended = UpstreamFailed(job_id=newest.job_id, restart=newest.restart, reason=problem)
                with contextlib.suppress(OSError), workspace.journal(directory, "chain") as journal:
                    journal.write(ended)
                    lease.close(directory, None, "failed")
                jobs.append(newest.job_id)
                return problem
    return ""


def _waits(run: Run) -> bool:
    """Whether a run waits in Slurm's queue."""
    newest = run.newest
    if newest is None or run.executor != "slurm" or run.ended or run.unreadable or not newest.job_id:
        return False
    return newest.restarted_by is not None or (newest.state in ("pending", "requeued") and not newest.hosts)


# --- jobs ------------------------------------------------------------------------------------------------------------


def unfinished_upstream_jobs(run: RunDir) -> list[str]:
    """The jobs that must end before a job of this run starts."""
    upstreams = read_upstreams(run)
    if not upstreams or has_begun(run):
        return []
    from slurmtrain.runtime.upstreams import unfinished_jobs

    return unfinished_jobs(run, upstreams)


def earlier_elements(run: Run) -> list[str]:
    """The elements of job arrays that earlier submissions of a run became: its newest job must wait for them.

    Slurm compares the names of jobs for ``--dependency=singleton`` (sbatch(1)), and an array's name differs from the
    name of a run's own job. A pack is left out: its job goes on with other runs.

    Args:
        run: The run; its newest submission has a job of its own, or is about to get it.
    """
    newest = run.newest
    before = [attempt for attempt in run.attempts if newest is not None and attempt.submission != newest.submission]
    return list(dict.fromkeys(each.job_id for each in before if "_" in each.job_id and each.pack < 2))


def move_dependents(workspace: Workspace, runs: Iterable[RunDir]) -> list[str]:
    """Let the waiting jobs of all runs that start after any of these wait for the newest jobs of these; returns notes.

    Args:
        workspace: Where they are.
        runs: Runs that have just got jobs.
    """
    return _move(workspace, list(dict.fromkeys(run_id for run in runs for run_id in dependents_of(run))))


def move_late(workspace: Workspace, run_ids: Iterable[str]) -> list[str]:
    """Let jobs that look again later whether it is their turn start as soon as it is; returns notes.

    Whoever has submitted another job for an upstream may have been killed before it moved the jobs behind it, and
    nobody moves them if an upstream ends without another job.

    Args:
        workspace: Where they are.
        run_ids: Runs whose jobs Slurm starts at a later time; what is known of them and their upstreams is up to date.
    """
    due = [run_id for run_id in run_ids if _is_late(workspace, run_id)]
    notes = _move(workspace, due)
    if due:
        workspace.scheduler.forget()
    return notes


def _is_late(workspace: Workspace, run_id: str) -> bool:
    """Whether a run that looks again later may start, or has a job to wait for instead."""
    directory, run = workspace.root.run(run_id), workspace.store.load(run_id)
    with contextlib.suppress(PathError):
        upstreams = read_upstreams(directory)
        if run is not None and upstreams and not has_begun(directory) and _was_early(run):
            stands = standing(upstreams, upstream_runs(workspace, upstreams))
            waits = [] if stands.is_ready else upstream_runs(workspace, stands.waits).values()
            jobs = [workspace.scheduler.queue().job(each.newest.job_id) for each in waits if each.newest is not None]
            return stands.is_ready or any(job is not None and not is_final(job.state) for job in jobs)
    return False


def _move(workspace: Workspace, run_ids: Sequence[str]) -> list[str]:
    """Let the jobs of runs wait for their upstreams' jobs, if they still wait at all; returns notes."""
    from slurmtrain.slurm.parse import join_elements
    from slurmtrain.slurm.requeue import move_behind

    moves: dict[tuple[str, bool], dict[str, str]] = {}
    upstream_jobs: dict[tuple[str, ...], Sequence[str]] = {}
    notes = []
    for run_id in run_ids:
        try:
            move = _move_of(workspace.root.run(run_id), upstream_jobs)
        except PathError as error:
            notes.append(_describe_failure([run_id], error))
            continue
        if move is not None:
            moves.setdefault(move[1], {})[move[0]] = run_id
    for (dependency, at_once), jobs in moves.items():
        for elements in join_elements(jobs):
            try:
                move_behind(elements, dependency, at_once=at_once)
            except SlurmDown as error:
                array = elements.partition("_")[0]
                ids = [run_id for job_id, run_id in jobs.items() if job_id.partition("_")[0] == array]
                notes.append(_describe_failure(ids, error))
    return notes


def _describe_failure(run_ids: Sequence[str], error: SlurmtrainError) -> str:
    more = f" and {len(run_ids) - 1} more" if len(run_ids) > 1 else ""
    return (
        f"the job of run {run_ids[0]}{more} could not be put behind the jobs of earlier runs ({error}): "
        "if it starts too early, it goes back into the queue"
    )


def _move_of(
    directory: RunDir, upstream_jobs: dict[tuple[str, ...], Sequence[str]]
) -> tuple[str, tuple[str, bool]] | None:
    """The waiting job of a run, what it is to wait for, and whether for no time any more; None if it has none.

    ``upstream_jobs``: jobs of the upstreams, by the upstreams' ids: the runs of a sweep share them. Raises PathError.
    """
    from slurmtrain.ops.shared.next_attempts import current_plan
    from slurmtrain.runtime.job.run_reader import read_run
    from slurmtrain.runtime.upstreams import unfinished_jobs
    from slurmtrain.slurm.request import dependency_of

    # Of thousands that are being submitted, none has a job yet.
    if not any(directory.submissions.glob("*")) or has_begun(directory):
        return None
    run = read_run(directory)
    newest = run.newest
    if newest is None or run.executor != "slurm" or not newest.job_id:
        return None
    if newest.state not in ("pending", "requeued") and newest.restarted_by != "slurm":
        return None
    upstreams = read_upstreams(directory)
    key = tuple(upstream.run for upstream in upstreams)
    if key not in upstream_jobs:
        upstream_jobs[key] = unfinished_jobs(directory, upstreams)
    after = [*upstream_jobs[key], *earlier_elements(run)]
    has_predecessor = len({attempt.job_id for attempt in run.attempts if attempt.job_id}) > 1
    dependency = dependency_of(current_plan(directory, run), after, singleton=has_predecessor)
    # One that has not started yet may have to wait for a time that its spec says.
    return newest.job_id, (dependency, _was_early(run))


def _was_early(run: Run) -> bool:
    """Whether the last start of a run was before its turn: its job may wait for the time to look again."""
    return next((attempt.cause for attempt in reversed(run.attempts) if attempt.cause), None) == EARLY


# --- what people see of chains ---------------------------------------------------------------------------------------

# How many runs of a chain, or of a family, are listed.
_MOST_RUNS = 100
# The states of a run that may wait for others.
WAITING = frozenset({"created", "pending", "requeued"})


def upstreams_of(directory: RunDir) -> list[Upstream]:
    """The runs that one starts after; empty if that cannot be read."""
    from slurmtrain.runtime.upstreams import read_upstreams

    with contextlib.suppress(PathError):
        return read_upstreams(directory)
    return []


def describe_waits(workspace: Workspace, listed: Listed) -> str:
    """What a run waits for, such as ``after pretrain (running, step 120)``, or why it never starts; empty if it may."""
    if not _waits_for_runs(workspace, listed):
        return ""
    from slurmtrain.model.query.comparison import count_states

    upstreams = upstreams_of(workspace.root.run(listed.id))
    runs = workspace.store.listed([upstream.run for upstream in upstreams])
    for each in upstreams:
        listed_upstream = runs.get(each.run)
        if listed_upstream is None and not each.any:
            return f"cannot start: the directory of run {each} was deleted"
        if listed_upstream and listed_upstream.ended and listed_upstream.state != "completed" and not each.any:
            return f"cannot start: {describe_failure(each, listed_upstream.state, listed_upstream.reason)}"
    waits: dict[str, list[Listed]] = {}
    for each in upstreams:
        if each.run in runs and not runs[each.run].ended:
            waits.setdefault(each.name, []).append(runs[each.run])
    phrases = [
        # A run knows those that it waits for by a name, which may be a sweep's.
        describe_wait(name, of_name[0].state, of_name[0].row["step"])
        if len(of_name) == 1
        else f"after {name} ({count_states([run.state for run in of_name])})"
        for name, of_name in waits.items()
    ]
    return ", ".join(phrases[:3]) + (f" and {len(phrases) - 3} more" if len(phrases) > 3 else "")


def _waits_for_runs(workspace: Workspace, listed: Listed) -> bool:
    """Whether a run starts after others, and has not begun."""
    if listed.state not in WAITING or not any(parent.get("relation") == AFTER for parent in listed.parents):
        return False
    return not workspace.root.run(listed.id).upstream_facts.exists()


def chain_json(workspace: Workspace, run_id: str) -> dict[str, Any]:
    """The runs that one starts after, and the runs that start after it, as ``show --json`` has them."""
    directory = workspace.root.run(run_id)
    upstreams = upstreams_of(directory)
    after = dependents(workspace, [run_id])
    if not upstreams and not after:
        return {"after": [], "before": [], "chain": []}
    tree = tree_order(chains_of(workspace, [run_id], _MOST_RUNS), [run_id])
    runs = observe(workspace, [*(upstream.run for upstream in upstreams), *after, *tree], ask_slurm=False).runs
    return {
        "after": [
            {**_chain_facts(runs.fetch([each.run]), each.run), "condition": "afterany" if each.any else "afterok"}
            for each in upstreams
        ],
        "before": [_chain_facts(runs.fetch([each]), each) for each in after],
        "chain": [{**_chain_facts(runs.fetch([each]), each), "depth": depth} for each, depth in tree.items()],
    }


def chains_of(workspace: Workspace, run_ids: Sequence[str], most: int | None = None) -> dict[str, list[str]]:
    """For these runs, all before and after them, and all before and after these: the runs that each starts after.

    Args:
        workspace: Where they are.
        run_ids: The runs.
        most: The greatest number of runs; None: all. Runs that are left out stand nowhere in the result.
    """
    above: dict[str, list[str]] = {}
    queue = list(run_ids)[:most]
    while queue:
        above |= {run_id: [each.run for each in upstreams_of(workspace.root.run(run_id))] for run_id in queue}
        related = dict.fromkeys([*(each for run_id in queue for each in above[run_id]), *dependents(workspace, queue)])
        queue = [run_id for run_id in related if run_id not in above]
        queue = queue if most is None else queue[: max(0, most - len(above))]
    return {run_id: [each for each in upper if each in above] for run_id, upper in above.items()}


def _chain_facts(runs: Mapping[str, Listed], run_id: str) -> dict[str, Any]:
    listed = runs.get(run_id)
    if listed is None:
        return {"id": run_id, "name": None, "state": None, "step": None}
    return {"id": run_id, "name": listed.name, "state": listed.state, "step": listed.row["step"]}


def open_dependents(workspace: Workspace, observed: Observed, run_ids: Sequence[str]) -> list[str]:
    """The runs that have not ended and start after any of these, directly or in turn.

    Args:
        workspace: Where they are.
        observed: The runs as observed.
        run_ids: The runs.
    """
    queue, following = list(run_ids), dict.fromkeys(run_ids)
    while queue:
        queue = [each for each in dependents(workspace, queue) if each not in following]
        following |= dict.fromkeys(queue)
    listed = observed.runs.fetch(each for each in following if each not in run_ids)
    return [run_id for run_id, run in listed.items() if not run.ended]


def open_upstreams(workspace: Workspace, runs: Mapping[str, Listed]) -> list[str]:
    """The runs that any of these still waits for, and the runs that these wait for in turn.

    Args:
        workspace: Where they are.
        runs: The runs by id, as observed.
    """
    queue: Mapping[str, Listed] = runs
    above: dict[str, Listed] = {}
    while waiting := [run for run in queue.values() if _waits_for_runs(workspace, run)]:
        ids = {each.run for run in waiting for each in upstreams_of(workspace.root.run(run.id))}
        queue = workspace.store.listed(ids - above.keys() - runs.keys())
        above |= queue
    return [run_id for run_id, run in above.items() if not run.ended]


def describe_blocked(workspace: Workspace, run_ids: Sequence[str]) -> Iterator[str]:
    """A line for each of these runs that has ended because one that it waited for did."""
    if run_ids:
        for run_id, listed in observe(workspace, run_ids, ask_slurm=False).runs.fetch(run_ids).items():
            if listed.row["cause"] == UPSTREAM:
                yield f"run {run_id} is {listed.state}: {listed.reason}"


# --- lineage ---------------------------------------------------------------------------------------------------------


def lineage_json(workspace: Workspace, run_id: str) -> list[dict[str, Any]]:
    """The family of a run in the order of a tree, as ``show --json`` has it; empty if it has none.

    Each has its ``depth``, and in ``parents`` how it comes from others; if there are too many, only the nearest are
    there.

    Args:
        workspace: Where the runs are.
        run_id: The run.
    """
    # At most so many, the nearest first; None for a run that is not known any more.
    family: dict[str, Listed | None] = {}
    queue = [run_id]
    while queue:
        listed = workspace.store.listed(queue)
        family |= {each: listed.get(each) for each in queue}
        related: dict[str, None] = {}
        for each in queue:
            related |= dict.fromkeys(parent["run"] for parent in _known_parents(family[each]))
            related |= dict.fromkeys(workspace.store.children(each))
        queue = [each for each in related if each not in family][: max(0, _MOST_RUNS - len(family))]
    if len(family) < 2:
        return []
    above = {
        each: [parent["run"] for parent in _known_parents(run) if parent["run"] in family]
        for each, run in family.items()
    }
    return [
        {
            "id": each,
            "name": None if run is None else run.name,
            "state": None if run is None else run.state,
            "depth": depth,
            "parents": _known_parents(run),
        }
        for each, depth in tree_order(above, [run_id]).items()
        for run in (family[each],)
    ]


def _known_parents(listed: Listed | None) -> list[dict[str, Any]]:
    return [] if listed is None else [parent for parent in listed.parents if isinstance(parent.get("run"), str)]
