"""Reconciling: observe everything, finish what was left half-done, mirror to the tracking store."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from slurmtrain.errors import PathError, RequestRefused, SlurmDown, SlurmtrainError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.interruption.policy import decision
from slurmtrain.model.run.events.agent_events import JobRequeue, RequeueFailed
from slurmtrain.model.run.events.command_events import JobReplaced
from slurmtrain.model.run.job_state import WAITING, base, is_final
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.lineage import AFTER
from slurmtrain.model.run.run import Run
from slurmtrain.ops.cancel import end_idle, finish_cancel
from slurmtrain.ops.shared.local_jobs import alive
from slurmtrain.ops.shared.mirroring import mirror_runs
from slurmtrain.ops.shared.next_attempts import (
    HeldRun,
    NewAttempt,
    SweepLimit,
    after_oom_overrides,
    check_executor,
    current_plan,
    hold,
    next_attempt,
)
from slurmtrain.ops.shared.observe import Observed, is_file_check_due, observe
from slurmtrain.ops.shared.shared_jobs import group_attempts, is_needed_by_others
from slurmtrain.ops.shared.start import start
from slurmtrain.ops.shared.start_order import BEGIN_TIME, end_blocked, move_late
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.environment.process_limits import make_room
from slurmtrain.runtime.job.lease import kill_leftovers, runs_with_processes
from slurmtrain.slurm.parse import second_jobs
from slurmtrain.system.interpreter import NOTICES, SEARCHES, load_plugin
from slurmtrain.system.locks import locked

if TYPE_CHECKING:
    from slurmtrain.ops.query.trials import Advance
    from slurmtrain.registry.rows import Listed
    from slurmtrain.specfile import PlannedRun


# A submission takes far less than this from creating its directory to locking it.
_UNBORN_S = 5.0


@dataclass(slots=True)
class Synced:
    """The findings and actions of a sync, by run id.

    ``searched``: all runs of the searches that it looked at. ``pruned``: the runs among them that were pruned.
    """

    observed: Observed
    started: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    mirrored: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    searched: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)


def sync(workspace: Workspace, only: Collection[str] | None = None, *, track: bool = True) -> Synced:
    """Bring registry, runs and tracking store into agreement. This is idempotent.

    Args:
        workspace: Where the runs are.
        only: Observe and act on these runs only.
        track: Also send what is new to the tracking store.
    """
    doing = _Sync(workspace, only)
    doing.remove_unborn()
    doing.advance_searches()
    if not doing.synced.observed.runs:
        return doing.synced
    # Before anything is started: a new attempt must not meet processes that ranks of the last one have left.
    doing.end_leftovers()
    doing.finish_submissions()
    doing.finish_cancels()
    acted = [*doing.synced.started, *doing.synced.cancelled, *doing.restart_interrupted()]
    doing.end_idle()
    doing.finish_chains()
    doing.end_second_jobs()
    doing.observe_again([*acted, *doing.synced.ended])
    if track:
        doing.mirror()
        doing.notify()
    return doing.synced


class _Sync:
    """One sync: a look at the runs, and what is done about them. ``only``: the runs to act on; None: all."""

    def __init__(self, workspace: Workspace, only: Collection[str] | None) -> None:
        self._workspace = workspace
        self._only = only
        self.synced = Synced(observe(workspace, only, thorough=only is not None or is_file_check_due(workspace)))

    def _load(self, run_id: str) -> Run | None:
        """A run as it was last read; None if it is unknown, or cannot be read now: then nothing may be done with it."""
        run = self._workspace.store.load(run_id)
        return None if run is None or run.unreadable else run

    def _among(self, run_ids: Collection[str]) -> Collection[str]:
        return run_ids if self._only is None else [run_id for run_id in run_ids if run_id in self._only]

    def _open_runs(self) -> Sequence[tuple[str, Listed]]:
        """The runs that have not ended: of thousands, few."""
        runs = self.synced.observed.runs
        return list(runs.fetch(self._among(runs.worth_listing(0))).items())

    def observe_again(self, run_ids: Collection[str]) -> None:
        """Look at runs that were acted upon; earlier findings stay reported."""
        if run_ids:
            runs = observe(self._workspace, run_ids, ask_slurm=False).runs
            self.synced.observed = replace(self.synced.observed, runs=runs)

    # --- what other commands left undone ------------------------------------------------------------------------------

    def remove_unborn(self) -> None:
        """Remove run directories whose submission died before they were complete: their lock is free.

        Recent ones are left alone: their submission may be about to take the lock.
        """
        for directory in self._workspace.unborn():
            with contextlib.suppress(OSError, PathError):
                if time.time() - directory.path.stat().st_mtime > _UNBORN_S:
                    with locked(directory.lock, wait=False) as dead:
                        if dead is not None:
                            shutil.rmtree(directory.path, ignore_errors=True)

    def advance_searches(self) -> None:
        """End runs that the pruners of searches would end, and submit the next runs of searches."""
        if not self._workspace.root.searches.is_dir():
            return
        advanced: Advance = load_plugin(SEARCHES, "advance_all")(self._workspace, self._only)
        synced = self.synced
        synced.searched += advanced.runs
        synced.pruned += [*advanced.pruned, *advanced.ending]
        synced.started += advanced.created
        synced.notes += advanced.notes
        synced.problems += advanced.problems
        self.observe_again([*advanced.created, *advanced.ending])

    def end_leftovers(self) -> None:
        """Kill what the ranks of local runs have left running on this machine if their agent was killed."""
        with_processes = self._among(runs_with_processes())
        for run_id in self.synced.observed.runs.index_of(with_processes) if with_processes else ():
            run = self._load(run_id)
            if run is None or run.executor != "local" or run.newest is None or not run.newest.ended:
                continue
            if _is_gone(run) and (killed := kill_leftovers(self._workspace.root.run(run_id))):
                killed_text = ", ".join(killed)
                self.synced.notes.append(
                    f"run {run_id}: killed processes that its last attempt had left running: {killed_text}"
                )

    def end_second_jobs(self) -> None:
        """Cancel jobs that wait for more nodes of a run that does not run: its node 0 was killed before it could."""
        if self._workspace.scheduler.answered_at is None:
            return  # Slurm was not asked: then no run is open, and such a job ends by itself as soon as it starts
        queue = self._workspace.scheduler.queue()
        jobs = second_jobs([job for job in queue.jobs.values() if not is_final(job.state)])
        for run_id in self.synced.observed.runs.index_of(self._among(list(jobs))) if jobs else ():
            run = self._load(run_id)
            if run is None or run.state == "running":
                continue
            # A job of the person's own may have the id in its name.
            job_ids = [job.id for job in second_jobs(jobs[run_id], run.name).get(run_id, ())]
            if not job_ids:
                continue
            jobs_text = f"job {', '.join(job_ids)}"
            try:
                self._workspace.scheduler.cancel(job_ids, force=False)
                self.synced.notes.append(f"run {run_id}: cancelled {jobs_text}, which waited for more nodes for it")
            except SlurmDown as error:
                self.synced.problems.append(f"run {run_id}: {jobs_text} still waits for more nodes for it: {error}")

    def finish_cancels(self) -> None:
        """End runs whose cancellation was requested by a command that was then killed."""
        wished = [
            run_id
            for run_id, listed in self._open_runs()
            if listed.row["cancelled"] and not (listed.ended or listed.unreadable)
        ]
        try:
            ended = finish_cancel(self._workspace, wished)
            self.synced.cancelled += [run_id for run_id, run in ended.items() if run.ended]
        except (SlurmtrainError, OSError) as error:
            self.synced.problems.append(str(error))

    def end_idle(self) -> None:
        """End runs that have been idle for longer than their specs allow."""
        try:
            ended = end_idle(self._workspace, dict(self._open_runs()))
        except (SlurmtrainError, OSError) as error:
            self.synced.problems.append(str(error))
            return
        self.synced.ended += ended
        self.synced.notes += [f"run {run_id} was ended: {why}" for run_id, why in ended.items()]
        # Before chains: nothing that waits for one of these will start.
        self.observe_again(list(ended))

    def finish_chains(self) -> None:
        """End runs that wait for one that will not complete, and start runs whose turn it is."""
        waiting = {
            run_id: listed
            for run_id, listed in self._open_runs()
            if listed.state in ("pending", "requeued") and any(each.get("relation") == AFTER for each in listed.parents)
        }
        ended = end_blocked(self._workspace, waiting)
        self.synced.ended += ended
        self.synced.notes += [f"run {run_id} was ended: {why}" for run_id, why in ended.items()]
        later = [
            run_id
            for run_id, listed in waiting.items()
            if listed.live is not None and listed.live.code == BEGIN_TIME and run_id not in ended
        ]
        self.synced.notes += move_late(self._workspace, later)

    def mirror(self) -> None:
        """Send what is new to the tracking store."""
        runs = self.synced.observed.runs
        outcome = mirror_runs(self._workspace, runs.fetch(self._among(runs.behind())))
        self.synced.mirrored += outcome.mirrored
        self.synced.problems += outcome.problems
        self.synced.notes += outcome.notes
        self.observe_again(outcome.mirrored)

    def notify(self) -> None:
        """Tell people what is new about runs, as the configuration says."""
        if self._workspace.config.notify:
            try:
                after_sync = load_plugin(NOTICES, "after_sync")
                self.synced.problems += after_sync(self._workspace, self.synced.observed.runs)
            except (SlurmtrainError, OSError) as error:
                self.synced.problems.append(f"notifications failed: {error}")

    # --- first attempts -----------------------------------------------------------------------------------------------

    def finish_submissions(self) -> None:
        """Start runs whose submission was killed between creating the run and starting its job.

        On Slurm, runs that request the same share a job array.
        """
        # Oldest first: a run is created after the runs that it waits for.
        created = sorted(
            run_id for run_id, listed in self._open_runs() if listed.state == "created" and not listed.row["cancelled"]
        )
        make_room(len(created))
        with contextlib.ExitStack() as locks:
            attempts: list[NewAttempt] = []
            # The run of each local sweep that was started last.
            last: dict[str, str] = {}
            for run_id in created:
                held = hold(self._workspace.root.run(run_id), locks)
                if held is None:
                    continue
                # Under the lock: another command may just have started it.
                observe(self._workspace, [run_id])
                run = self._load(run_id)
                if run is None or run.state != "created":
                    continue
                try:
                    plan = current_plan(held.directory, run)
                    check_executor(self._workspace, run.executor, [plan])
                    attempt = next_attempt(self._workspace, held, run, _replan(plan), last.get(run.sweep or ""))
                except (SlurmtrainError, OSError) as error:
                    self.synced.problems.append(f"run {run_id} cannot be started: {error}")
                    continue
                if attempt.executor == "slurm":
                    attempts.append(attempt)
                    continue
                self._start_first([attempt], SweepLimit())
                if attempt.turn is not None:
                    last[attempt.turn.sweep] = run_id
            for group, limit in group_attempts(self._workspace, attempts):
                self._start_first(group, limit)

    def _start_first(self, group: Sequence[NewAttempt], limit: SweepLimit) -> None:
        """Start first attempts that share a submission; ``limit``: how many may run at once, and share a job."""
        run_ids = [each.run.id for each in group]
        try:
            notes = start(self._workspace, group, command="sync", at_once=limit.parallel, pack=limit.pack)
        except (SlurmtrainError, OSError) as error:
            self.synced.problems.append(f"run {', '.join(run_ids)} cannot be started: {error}")
            return
        self.synced.notes += notes
        self.synced.started += run_ids

    # --- further attempts ---------------------------------------------------------------------------------------------

    def restart_interrupted(self) -> list[str]:
        """Restart runs whose agents could not requeue their jobs; returns the runs that were acted upon."""
        acted = []
        for run_id, listed in self._open_runs():
            if listed.state != "requeued" or listed.row["cancelled"]:
                continue
            run, held = self._load(run_id), ""
            if listed.live is not None:
                from slurmtrain.ops.shared.slurm_jobs import holder

                held = holder(listed.live)
            if run is None or not (held or (_is_due(run) and _is_gone(run))):
                if run is not None and run.executor == "local" and run.newest and _is_due(run) and alive(run) is None:
                    host = next(str(process["host"]) for process in run.newest.processes)
                    self.synced.notes.append(
                        f"run {run.id} was interrupted on {host}: call 'slurmtrain sync' there to start it again"
                    )
                continue
            try:
                if self._start_again(run_id, held):
                    acted.append(run_id)
            except (SlurmtrainError, OSError) as error:
                self.synced.problems.append(f"run {run_id} cannot be started again: {error}")
        return acted

    def _start_again(self, run_id: str, held: str) -> bool:
        """Restart or release one run if due; returns whether anything was done. Raises a SlurmtrainError on failure."""
        workspace, directory = self._workspace, self._workspace.root.run(run_id)
        with contextlib.ExitStack() as locks:
            held_run = hold(directory, locks)
            # 'wait' syncs up to five times a second: what has failed is retried only as often as Slurm is asked.
            if held_run is None or not workspace.scheduler.should_retry(run_id):
                return False
            # Under the lock, runs are read again: another command may just have started this one.
            observe(workspace, [run_id], ask_slurm=False)
            run = self._load(run_id)
            if run is None or run.cancelled:
                return False
            if held in ("slurm", "admin") and _replace_job(workspace, directory, run, held):
                observe(workspace, [run_id], ask_slurm=False)
                run = self._load(run_id)
            if run is not None and _is_due(run) and _is_gone(run):
                self._submit_again(held_run, run)
                return True
            if run is not None and held == "user" and _release_job(workspace, directory, run):
                self.synced.released.append(run_id)
                return True
        return False

    def _submit_again(self, held: HeldRun, run: Run) -> None:
        """Submit the next attempt of a run, without the nodes that earlier ones excluded; or give the run up.

        Raises a SlurmtrainError if a later try may succeed.
        """
        workspace, newest = self._workspace, run.newest
        assert newest is not None
        planned = _replan(current_plan(held.directory, run), after_oom_overrides(run))
        try:
            if newest.cause == "preflight" and not planned.plan.spec.preflight.exclude:
                raise RequestRefused("preflight.exclude is false")
            attempt = next_attempt(workspace, held, run, planned)
            check_executor(workspace, run.executor, [planned.plan])
            if run.executor == "slurm" and not is_needed_by_others(workspace, run):
                # A replaced job is still there if Slurm did not answer, or if the command was killed; if it waits, the
                # next one would wait for it forever ("singleton").
                queue = workspace.scheduler.queue()
                if not queue.answered:
                    raise SlurmDown(queue.problem)
                job = queue.job(newest.job_id)
                if job is not None and base(job.state) in WAITING:
                    workspace.scheduler.cancel([job.id], force=False)
            excluded = {host for a in run.attempts if a.submission == newest.submission for host in a.excluded}
            attempt = replace(attempt, excluded_nodes=sorted(excluded), inherited=newest.inherited)
            self.synced.notes += start(workspace, [attempt], command="sync")
        except RequestRefused as error:
            with workspace.journal(held.directory, "sync") as journal:
                why = f"it cannot start again: {error}"
                journal.write(RequeueFailed(job_id=newest.job_id, restart=newest.restart, reason=why))
            return
        self.synced.started.append(run.id)


def _is_due(run: Run) -> bool:
    """Whether a command must restart the run, and the delay after the failure is over."""
    newest = run.newest
    return newest is not None and newest.restarted_by == "sync" and time.time() >= (newest.again_at or 0.0)


def _is_gone(run: Run) -> bool:
    """Whether nothing of the last attempt is left here: a local one journals its end a moment before it exits."""
    return run.executor != "local" or alive(run) is False


def _replan(plan: Plan, overrides: Sequence[str] = ()) -> PlannedRun:
    # Imported here: hardly any sync starts anything.
    from slurmtrain.slurm.slurm_commands import read_options
    from slurmtrain.specfile import replan

    return replan(plan, overrides, read_options)


def _replace_job(workspace: Workspace, directory: RunDir, run: Run, held: str) -> bool:
    """End a job, to replace it, that Slurm holds after too many starts and that its user cannot release.

    Source: MaxBatchRequeue in slurm.conf(5); that ``scontrol release`` is refused was observed on 26.05. ``held``: who
    holds it according to Slurm. Raises SlurmDown.
    """
    newest, before = run.newest, next(reversed(run.attempts[:-1]), None)
    if newest is None or newest.hosts or before is None or before.job_id != newest.job_id:
        return False
    if held == "admin":
        from slurmtrain.slurm.site import read_cluster

        if newest.restart < read_cluster(workspace.scheduler.config()).max_requeues:
            return False  # Slurm has no reason to hold it yet
    if before.policy is None or not decision(run.attempts[:-1], run.checkpoints).again:
        return False
    # Journaled first: a job that a kill then leaves waiting is cancelled before the next is submitted.
    why = "Slurm holds its job because it was started too often"
    with workspace.journal(directory, "sync") as journal:
        journal.write(JobReplaced(job_id=newest.job_id, restart=newest.restart, why=why))
    workspace.scheduler.cancel([newest.job_id], force=False)
    return True


def _release_job(workspace: Workspace, directory: RunDir, run: Run) -> bool:
    """Release a job that was held because it could not be requeued properly."""
    # The last start of the newest job that failed its preflight, if none has begun since.
    refused = None
    for attempt in reversed(run.attempts):
        if run.newest is None or attempt.job_id != run.newest.job_id or attempt.submission != run.newest.submission:
            break
        if attempt.excluded:
            refused = attempt
        if attempt.excluded or attempt.hosts:
            break
    if refused is None:
        return False
    from slurmtrain.slurm.requeue import release_held

    if not release_held(refused.job_id, refused.excluded, always=bool(refused.requeue_problem)):
        return False
    with workspace.journal(directory, "sync") as journal:
        journal.write(
            JobRequeue(job_id=refused.job_id, restart=refused.restart, exclude=refused.excluded, why=refused.reason)
        )
    workspace.scheduler.forget()
    return True
