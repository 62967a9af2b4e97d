"""What an agent does before its node can have ranks: it takes its turn, sets up the node, links the log.

It also finds the checkpoint that they resume from.
"""

from __future__ import annotations

import contextlib
import getpass
import glob
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import PathError, SlurmtrainError
from slurmtrain.model.experiment.checkpoint import OWN, WEIGHTS
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.slurm_options import fill_log
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.interruption.exit_report import ExitReport, report_signal
from slurmtrain.model.interruption.interval import InterruptionStats
from slurmtrain.model.interruption.policy import Newest, prior_ends, suspects
from slurmtrain.model.run.events.agent_events import AgentStarted, LeftoversKilled, WaitingForRun
from slurmtrain.model.run.events.checkpoint_events import CheckpointFound, CheckpointPassedOver
from slurmtrain.model.run.layout import AttemptDir, SubmissionDir, checkpoint_step
from slurmtrain.model.run.lineage import EARLY, UPSTREAM, describe_wait
from slurmtrain.runtime.checkpoint.checkpoint_files import newest_published, start_point
from slurmtrain.runtime.environment.node import Node, cpus_of_job
from slurmtrain.runtime.environment.variables import take_gpus
from slurmtrain.runtime.job import lease
from slurmtrain.runtime.job.lease import kill_leftovers
from slurmtrain.runtime.job.run_reader import read_run
from slurmtrain.runtime.upstreams import has_begun, read_upstreams
from slurmtrain.system.files import describe_os_error, write_atomically
from slurmtrain.system.inherited import expand_home
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import this_process

if TYPE_CHECKING:
    from slurmtrain.runtime.agent.agent import NodeAgent
    from slurmtrain.runtime.checkpoint.external import ExternalCheckpoint, Search

# How long before the time limit ranks are asked to stop: this, or a tenth of the limit if that is less. If saves are
# known to take longer: twice the time of a save (one may already be in progress) plus a margin, but at most a quarter
# of the limit.
_TIME_LIMIT_LEAD_S = 30.0
_SAVE_MARGIN_S = 10.0


class NodeStart:
    """The part of an attempt on this node before it can have ranks."""

    def __init__(self, agent: NodeAgent, at: float) -> None:
        """Nothing happens before :meth:`begin`. ``agent``: this node's. ``at``: when it started."""
        self._agent = agent
        self.at = at
        """From when on the time limit counts, by the monotonic clock."""
        # What this process keeps locked until it ends.
        self._slot = contextlib.ExitStack()

    def begin(self, *, is_first: bool) -> ExitReport | None:
        """Journal that this node is present, and wait until it may begin. Returns a report if it may not.

        Raises PathError and LaunchError. ``is_first``: the attempt begins; otherwise this node joins it.
        """
        agent, node = self._agent, self._agent.node
        nodes = node.count
        agent.journal.write(
            AgentStarted(
                node=node.index,
                nodes=nodes,
                host=node.name(nodes),
                process=this_process().to_dict(),
                executor=node.executor,
                submission=node.submission,
                attempt=node.attempt,
                partition=node.partition or None,
            )
        )
        if not is_first:
            agent.helpers.expect_teardown()
            return self.report_early_signal() if agent.flag.raised is not None else None
        # Node 0 acquires the run's lease for all nodes.
        submission = node.submission
        if node.index == 0:
            may_start = lease.acquire(agent.attempt, submission)
        else:
            may_start = lease.granted_to(agent.attempt.run) == submission
        if not may_start:
            return ExitReport(cause="cancelled", reason="a later attempt has taken over", failed_at=time.time())
        if node.executor == "slurm":
            # Its setup has run in the batch script.
            agent.helpers.expect_teardown()
        # First, as a run that waits for others must not hold a slot.
        report = self._wait_for_upstreams()
        if report is not None:
            return report
        if node.executor == "local":
            from slurmtrain.runtime.agent.local_slots import wait_for_slot

            resources = agent.plan.spec.resources
            self._slot = wait_for_slot(agent.attempt, node, resources, agent.journal, self._is_stopped)
            self.at = time.monotonic()
        if agent.flag.raised is None:
            agent.helpers.expect_teardown()
        # This attempt holds the lease, so nothing of an earlier one may train on.
        killed = kill_leftovers(agent.attempt.run, except_of=agent.attempt)
        if killed:
            agent.journal.write(LeftoversKilled(killed=killed))
        return self._run_setup()

    def _run_setup(self) -> ExitReport | None:
        """On this machine, run the spec's ``setup``. Returns a report if that may not be, or does not end."""
        agent, node = self._agent, self._agent.node
        limit_s = agent.plan.spec.resources.time
        until = None if limit_s is None else self.at + limit_s - time_limit_lead(agent.plan.spec, node.launch.history)

        def is_late() -> bool:
            return until is not None and time.monotonic() >= until

        if node.executor == "local" and agent.plan.spec.setup and agent.flag.raised is None:
            from slurmtrain.runtime.agent.helpers import run_setup

            run_setup(agent.plan, agent.attempt, node, lambda: self._is_stopped() or is_late())
        if agent.flag.raised is not None:
            return self.report_early_signal()
        if node.executor == "local" and is_late():
            reason = "the time limit was reached while 'setup' ran"
            return ExitReport(cause="timeout", reason=reason, failed_at=time.time())
        return None

    def _wait_for_upstreams(self) -> ExitReport | None:
        """Wait until the runs that this one starts after have ended; returns a report if it may not begin.

        Under Slurm only node 0 looks, and only for a moment: then its job goes back into the queue.
        """
        agent, node = self._agent, self._agent.node
        run, local = agent.attempt.run, node.executor == "local"
        upstreams = read_upstreams(run) if local or node.index == 0 else []
        if upstreams and not has_begun(run):
            from slurmtrain.runtime.upstreams import wait_for_upstreams

            stands = wait_for_upstreams(
                run,
                upstreams,
                patient=local,
                note=lambda each: agent.journal.write(WaitingForRun(run=each.run)),
                give_up=self._is_stopped,
            )
            if agent.flag.raised is not None:
                return self.report_early_signal()
            if not stands.is_ready:
                waits = ", ".join(describe_wait(each.name, "has not ended", None) for each in stands.waits)
                cause = UPSTREAM if stands.problem else EARLY
                return ExitReport(cause=cause, reason=stands.problem or waits, failed_at=time.time())
            # Its time of waiting is no part of its time limit.
            self.at = time.monotonic() if local else self.at
        try:
            if upstreams:
                from slurmtrain.runtime.upstreams import take_from_upstreams

                take_from_upstreams(run, agent.plan.spec, upstreams, is_node_0=node.index == 0)
        except SlurmtrainError as error:
            return ExitReport(cause=UPSTREAM, reason=str(error), failed_at=time.time())
        return None

    def _is_stopped(self) -> bool:
        return self._agent.flag.raised is not None

    def report_early_signal(self) -> ExitReport:
        """The report of an attempt that a signal has ended before it had ranks."""
        assert self._agent.flag.name is not None
        return report_signal(self._agent.flag.name, at=time.time(), before_start=True)


def time_limit_lead(spec: Spec, history: InterruptionStats | None) -> float:
    """How many seconds before the time limit the ranks are asked to stop.

    Args:
        spec: The run's.
        history: How long its saves take; None: unknown.
    """
    limit_s = spec.resources.time
    if limit_s is None:
        return 0.0
    if spec.requeue.lead is not None:
        return float(spec.requeue.lead)
    save_s = history.save_s if history and history.save_s else 0.0
    needed_s = min(2 * save_s + _SAVE_MARGIN_S, limit_s / 4) if save_s else 0.0
    return max(min(_TIME_LIMIT_LEAD_S, limit_s / 10), needed_s)


# --- runs that share a job --------------------------------------------------------------------------------------------
# The agents of a pack are the tasks of one step, so a signal of Slurm's reaches all of them. A cancel of one run cannot
# use one: the command closes the lease of the run, which its agent reads every few seconds.


_POLL_S = 2.0


def enter_pack(submission: SubmissionDir, node: Node, gpus: int) -> None:
    """Take this run's share of the job, and watch for its cancel. Nothing is done for a run with a job of its own.

    Args:
        submission: directory of the run's submission.
        node: this node.
        gpus: how many GPUs the run has.

    Raises:
        LaunchError: the job has too few GPUs.
    """
    pack, slot = node.launch.pack, node.launch.slot
    if pack is None:
        return
    if not pack.share_gpu:
        take_gpus(gpus, slot)
    cores = own_cores(sorted(os.sched_getaffinity(0)), cpus_of_job(), pack, slot)
    # Cores may have gone offline, and another run may use the same ones: both cost speed only.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)

    def watch_for_cancel() -> None:
        while True:
            time.sleep(_POLL_S)
            with contextlib.suppress(OSError, SlurmtrainError):
                if lease.ended_as(submission.run, submission.number) == "cancelled":
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

    threading.Thread(target=watch_for_cancel, daemon=True).start()


def own_cores(cores: list[int], of_job: int | None, pack: Pack, slot: int) -> list[int]:
    """The cores that one run of a pack uses.

    If Slurm binds each task to its own cores, or confines no job at all, they stay as they are: the cores of a node may
    then belong to other jobs.

    Args:
        cores: cores that this process may use, ascending.
        of_job: how many of the node's the job has; None: unknown.
        pack: how the job is shared.
        slot: the number of this run, from 0.
    """
    share = len(cores) // pack.runs
    if len(cores) != of_job or not share:
        return cores
    return cores[slot * share : (slot + 1) * share]


# --- a link of the user's own to the log of each attempt: the key ``log`` --------------------------------------------
def log_facts(name: str, job_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The values of a pattern's letters.

    Args:
        name: The spec's name: the job's name ends with the run's id.
        job_id: The job's, of an element of an array ``<array>_<index>``.
        environ: The variables that Slurm gives the job.
    """
    array, _, index = job_id.partition("_")
    user = ""
    with contextlib.suppress(KeyError, OSError):
        user = getpass.getuser()
    return {
        "x": name,
        # Of an element, Slurm has another number for it alone.
        "j": environ.get("SLURM_JOB_ID", job_id) if index else job_id,
        "A": array,
        "a": index or "0",
        "u": user,
        "N": os.uname().nodename.partition(".")[0],
        "n": "0",
        "t": "0",
    }


def link_log(plan: Plan, attempt: AttemptDir, job_id: str, log: Path) -> str:
    """Let the link that the ``plan`` asks for lead to a ``log``; returns why it does not, or nothing.

    A file, and the link of another run, are left as they are.

    Args:
        plan: The run's.
        attempt: The attempt, which notes where the link is: it goes with the run.
        job_id: The id of its job.
        log: The log.
    """
    if plan.spec.log is None:
        return ""
    try:
        path = Path(plan.workdir, expand_home(fill_log(plan.spec.log, log_facts(plan.spec.name, job_id, os.environ))))
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.readlink() if path.is_symlink() else None
        if target is None and path.exists():
            return f"log: {path} exists already and was left as it is; the log is {log}"
        if target is not None and not target.is_relative_to(attempt.run.path):
            return f"log: {path} already links to {target} of another run and was left as it is; the log is {log}"
        write_atomically(attempt.log_link, os.fsencode(path), private=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.unlink(missing_ok=True)
        beside.symlink_to(log)
        beside.replace(path)
    except (OSError, PathError) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else str(error)
        return f"log: {plan.spec.log}: {why}; the log is {log}"
    return ""


# --- the checkpoint that ranks resume from ----------------------------------------------------------------------------


class CheckpointFinder:
    """Finds the checkpoints of a run on behalf of its agent, and journals a script's own."""

    def __init__(self, attempt: AttemptDir, plan: Plan, journal: Journal, since: float | None) -> None:
        """For an ``attempt`` of a run with this ``plan``.

        ``journal``: its agent's. ``since``: a script's own checkpoints count only if they are newer (seconds since
        1970).
        """
        self._attempt = attempt
        self._plan = plan
        self._journal = journal
        self._since = since
        self.resumed_at: float | None = None
        """When what was chosen last was saved by the script, in seconds since 1970; None if it saved nothing."""
        # Why ranks do not resume from some: by fingerprint, and by path and time of saving.
        self._suspects: Mapping[str, str] = {}
        self._damaged: Mapping[tuple[str, float], str] = {}

    @cached_property
    def _search(self) -> Search | None:
        """Where the script's own checkpoints are: known once the run has its copy of the code. None if it has none."""
        if self._plan.spec.checkpoint.glob is None:
            return None
        # Late, here and below: a run whose scripts have no checkpoints of their own needs none of their formats.
        from slurmtrain.runtime.checkpoint.external import Search

        return Search.from_plan(self._plan, self._attempt.run, self._since)

    def choose(self) -> tuple[str | None, Newest]:
        """The checkpoint that the next ranks resume from: its path, and its description.

        The path is None for the beginning, or if the script looks itself. For a script's own checkpoints, the chosen
        one and those that are passed over are journaled.
        """
        if self._search is None:
            published = newest_published(self._attempt.run.checkpoints) or start_point(self._attempt.run)
            return str(published) if published else None, self.newest()
        if self._plan.spec.checkpoint.format == OWN:
            return None, self._note(self._select()[0])
        run = read_run(self._attempt.run)
        self._suspects = suspects(prior_ends(run.attempts, run.checkpoints))
        self._damaged = {
            (each.path, each.saved_at): "'slurmtrain verify' found it damaged"
            for each in run.checkpoints
            if each.on_disk and not each.complete
        }
        checkpoint, passed_over = self._select()
        if checkpoint is None:
            return self.choose_start()
        for each, fingerprint, why in passed_over:
            self._journal.write(
                CheckpointPassedOver(path=str(each.path), step=each.step, fingerprint=fingerprint, why=why)
            )
        return str(checkpoint.path) if checkpoint else None, self._note(checkpoint)

    def choose_start(self) -> tuple[str | None, Newest]:
        """The checkpoint of another run that the run begins with, as :meth:`choose` returns one."""
        run = self._attempt.run
        if self._search is None:
            start = start_point(run)
            return str(start) if start else None, self._at_start(start)
        from slurmtrain.runtime.checkpoint.external import newest

        pattern = str(Path(glob.escape(str(run.start))) / "*")
        start_of_script = newest(replace(self._search, pattern=pattern, since=None))
        return str(start_of_script.path) if start_of_script else None, self._note(start_of_script)

    def _at_start(self, start: Path | None) -> Newest:
        """Where training begins with another run's checkpoint."""
        spec = self._plan.spec.start_from
        if start is None or (spec is not None and spec.load == WEIGHTS):
            return Newest()
        return Newest(checkpoint_step(start.name) or 0)

    def newest(self) -> Newest:
        """The newest checkpoint that is not passed over."""
        if self._search is None:
            published = newest_published(self._attempt.run.checkpoints)
            if published is None:
                return self._at_start(start_point(self._attempt.run))
            return Newest(checkpoint_step(published.name) or 0)
        return _newest_of(self._select()[0])

    def note_newest(self) -> None:
        """Journal the newest of the script's own checkpoints, if it has any."""
        if self._search is not None:
            self._note(self._select()[0])

    def _select(self) -> tuple[ExternalCheckpoint | None, list[tuple[ExternalCheckpoint, str | None, str]]]:
        """The newest complete checkpoint to resume from, and the ones that are passed over for it, with the reasons.

        If all are suspected, the newest of them is returned, and none is passed over.
        """
        from slurmtrain.runtime.checkpoint.external import find_checkpoints

        assert self._search is not None
        complete = [each for each in find_checkpoints(self._search) if each.complete]
        passed_over: list[tuple[ExternalCheckpoint, str | None, str]] = []
        for checkpoint in complete:
            fingerprint = checkpoint.fingerprint() if self._suspects else None
            why = self._suspects.get(fingerprint or "") or self._damaged.get(
                (str(checkpoint.path), checkpoint.saved_at)
            )
            if why is None:
                return checkpoint, passed_over
            passed_over.append((checkpoint, fingerprint, why))
        return (complete[0] if complete else None), []

    def _note(self, checkpoint: ExternalCheckpoint | None) -> Newest:
        """Journal a checkpoint that was found; returns its description."""
        self.resumed_at = checkpoint.saved_at if checkpoint is not None else None
        newest = _newest_of(checkpoint)
        if checkpoint is not None:
            self._journal.write(
                CheckpointFound(
                    path=str(checkpoint.path),
                    step=checkpoint.step,
                    bytes=checkpoint.bytes,
                    saved_at=checkpoint.saved_at,
                    format=checkpoint.format,
                    fingerprint=newest.fingerprint,
                    step_from=checkpoint.step_from,
                )
            )
        return newest


def _newest_of(checkpoint: ExternalCheckpoint | None) -> Newest:
    return Newest() if checkpoint is None else Newest(checkpoint.step or 0, checkpoint.fingerprint())
