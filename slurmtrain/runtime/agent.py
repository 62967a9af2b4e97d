"""The node agent: one process a node, from the start of an attempt to its last word.

submitit runs :func:`run_node` as a task on every node. Nothing of the run's state is in its pickle: the agent reads
its plan from the attempt's directory, and says what happens in a journal of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.layout import AttemptDir, SubmissionDir
from slurmtrain.model.plan import Plan, fill_command
from slurmtrain.runtime import context, handover, lease
from slurmtrain.runtime.checkpointfiles import newest_published
from slurmtrain.runtime.context import Node
from slurmtrain.runtime.ending import Ending, StopRequest, decide
from slurmtrain.runtime.signals import StopFlag
from slurmtrain.system.files import make_directory, read_json
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import identify, myself

if TYPE_CHECKING:
    from slurmtrain.runtime.preflight import Outcome

_TURN_POLL_S = 0.5
# How long before the time limit workers are asked to stop: at most this, at most a tenth of the limit.
_TIME_LIMIT_LEAD_S = 30.0


class Queue(Protocol):
    """What an agent can ask of the scheduler for its own job."""

    def objection(self, job_id: str, without: Sequence[str]) -> str | None:
        """Why the job could not start again without these hosts, in words; None if it could."""

    def put_back(self, job_id: str, without: Sequence[str]) -> None:
        """Put the job back into the queue, to start again without these hosts. Raises SlurmtrainError.

        The scheduler ends what runs of the job meanwhile; this returns when all has been asked for.
        """


def run_node(submission_dir: str, queue: Queue | None = None) -> None:
    """Run this node's part of an attempt, then exit: with 0 where it completed or was stopped, else with 1.

    ``queue``: the scheduler that can start the job again, if there is one.
    """
    began = time.monotonic()
    flag = StopFlag()
    flag.install(signal.SIGINT, signal.SIGHUP)
    submission = SubmissionDir(Path(submission_dir))
    node = context.this_node(submission)
    attempt = submission.run.attempt(node.job_id, node.restart)
    make_directory(attempt.path)
    with Journal(attempt.node_journal(node.index)) as journal:
        try:
            ending = _Agent(attempt, node, journal, flag, began).run()
        except SlurmtrainError as error:
            ending = Ending(cause="crash", reason=str(error), failed_at=time.time())
        except Exception as error:
            said = f"the node agent failed: {type(error).__name__}: {error}"
            journal.write("end", cause="crash", reason=said, failed_at=time.time(), failures=[])
            raise
        started_again = _end(ending, node, journal, queue)
    # Where a node fails with another code than 0, srun kills the others, who may be busy putting the job back.
    waits = ending.cause == "preflight" and (node.index != 0 or started_again)
    sys.exit(0 if ending.cause in ("completed", "cancelled", "timeout") or waits else 1)


def _end(ending: Ending, node: Node, journal: Journal, queue: Queue | None) -> bool:
    """Say the last word, and have the job start again on other nodes where that may help; returns whether it will."""
    without = ending.without if queue is not None else ()
    reason = ending.reason
    if without and queue is not None:
        objection = queue.objection(node.job_id, without)
        if objection is None:
            journal.write("requeue", exclude=list(without), why=reason)
        else:
            reason, without = f"{reason}; {objection}", ()
    journal.write(
        "end",
        cause=ending.cause,
        reason=reason,
        failed_at=ending.failed_at,
        cascade=ending.cascade,
        signal=ending.signal,
        failures=list(ending.failures),
    )
    if not without or queue is None:
        return False
    try:
        queue.put_back(node.job_id, without)
    except SlurmtrainError as error:
        journal.write("requeue_failed", reason=str(error))
        return False
    return True


class _Agent:
    def __init__(self, attempt: AttemptDir, node: Node, journal: Journal, flag: StopFlag, began: float) -> None:
        self._attempt = attempt
        self._node = node
        self._journal = journal
        self._flag = flag
        self._began = began
        self._plan = _read_plan(attempt.run.submission(node.submission))

    def run(self) -> Ending:
        nodes = self._plan.spec.resources.nodes
        self._journal.write(
            "agent",
            node=self._node.index,
            nodes=nodes,
            host=self._node.name(nodes),
            process=myself().plain(),
            executor=self._node.executor,
            submission=self._node.submission,
            attempt=self._node.attempt,
        )
        if not self._may_start():
            return Ending(cause="cancelled", reason="a later attempt has taken over", failed_at=time.time())
        self._wait_for_turn()
        if self._flag.raised is not None:
            return self._stopped_early()
        return self._train(nodes)

    def _stopped_early(self) -> Ending:
        said = self._flag.raised
        assert said is not None
        why = f"stopped by {said.name} before it began"
        return Ending(cause="cancelled", reason=why, failed_at=time.time(), signal=said.name)

    def _may_start(self) -> bool:
        submission = self._node.submission
        if self._node.index == 0:
            return lease.claim(self._attempt, submission)
        return lease.granted_to(self._attempt.run) == submission

    def _wait_for_turn(self) -> None:
        """In a local sweep, wait until the run before this one has ended."""
        after = self._node.launch.after
        if after is None or not after[1].alive():
            return
        self._journal.write("waiting", run=after[0])
        while after[1].alive() and self._flag.raised is None:
            time.sleep(_TURN_POLL_S)
        self._began = time.monotonic()

    def _train(self, nodes: int) -> Ending:
        # Here, not above: these import torch, and a run may have to wait for its turn for hours.
        from slurmtrain.runtime.assembly import assemble

        checked = assemble(self._attempt, self._node, self._plan, self._journal, self._flag)
        if isinstance(checked, Ending):
            return checked
        index = self._node.index
        if checked.problem is not None or checked.master is None:
            return self._refused(checked)
        from slurmtrain.runtime.rendezvous import meet
        from slurmtrain.runtime.workers import Workers

        point = meet(checked.master, index, nodes, checked.listener)
        self._journal.write(
            "rendezvous", node=index, master_addr=point.address, master_port=point.port, interface=checked.interface
        )
        if index == 0:
            point.store.set("resume_from", self._resume_from() or "")
        resume_from = point.store.get("resume_from").decode() or None
        argv = self._prepare(resume_from, checked)
        workers = Workers(
            argv=argv,
            count=self._plan.spec.resources.local_world_size,
            attempt=self._attempt,
            point=point,
            node=index,
            nodes=nodes,
            local_addr=checked.address,
            flag=self._flag,
            deadline=self._deadline(),
            started=lambda pids: self._note_workers(pids, resume_from),
            stopping=self._note_stop,
        )
        workers.peers.gather("here", given_up=lambda: self._flag.raised is not None)
        if self._flag.raised is not None:
            return self._stopped_early()
        workers.run()
        if index == 0:
            self._note_found()
        workers.leave()
        return decide(workers.exits(), workers.request, index)

    def _refused(self, checked: Outcome) -> Ending:
        """The nodes are not fit to train. Node 0 has the reason; what the others say follows from it."""
        without = checked.blamed if self._node.index == 0 and self._plan.spec.preflight.exclude else ()
        return Ending(
            cause="preflight",
            reason=checked.problem or "the nodes found no place to meet",
            failed_at=time.time(),
            cascade=self._node.index != 0,
            without=tuple(without),
        )

    def _prepare(self, resume_from: str | None, checked: Outcome) -> list[str]:
        """Set the workers' environment and directory, and return what they run."""
        context.set_worker_environment(
            self._plan,
            self._attempt,
            self._node,
            resume_from=resume_from,
            interface=checked.interface,
            address=checked.address,
        )
        make_directory(self._attempt.logs)
        try:
            os.chdir(self._plan.workdir)
        except OSError as error:
            raise SlurmtrainError(
                f"cannot enter the working directory {self._plan.workdir}: {error.strerror}"
            ) from error
        facts = context.facts_for_command(self._attempt.run, self._node.attempt, resume_from)
        return fill_command(self._plan, facts)

    def _resume_from(self) -> str | None:
        """The newest complete checkpoint to go on from: of the script's own kind, or of ours."""
        if self._node.from_start:
            return None
        if self._plan.spec.checkpoint.glob is None:
            published = newest_published(self._attempt.run.checkpoints)
            return str(published) if published else None
        found = self._note_found()
        return str(found.path) if found else None

    def _note_found(self) -> handover.Found | None:
        """Journal the newest checkpoint of the script's own kind, where the spec says how to find one."""
        pattern = self._plan.spec.checkpoint.glob
        if pattern is None:
            return None
        path = handover.absolute(pattern, self._plan.workdir, self._attempt.run)
        found = handover.newest(path, self._node.launch.since)
        if found is not None:
            self._journal.write("found", **found.plain())
        return found

    def _deadline(self) -> float | None:
        limit = self._plan.spec.resources.time
        return None if limit is None else self._began + limit - min(_TIME_LIMIT_LEAD_S, limit / 10)

    def _note_workers(self, pids: Mapping[int, int], resume_from: str | None) -> None:
        processes = {str(rank): process.plain() for rank, pid in pids.items() if (process := identify(pid))}
        self._journal.write("workers", processes=processes, resume_from=resume_from)

    def _note_stop(self, request: StopRequest) -> None:
        self._journal.write("stopping", cause=request.cause, why=request.why)


def _read_plan(submission: SubmissionDir) -> Plan:
    data = read_json(submission.plan)
    if data is None:
        raise SlurmtrainError(f"there is no plan at {submission.plan}; is the run directory visible on this node?")
    try:
        return Plan.from_json(data)
    except (ValueError, KeyError) as error:
        raise SlurmtrainError(f"{submission.plan} cannot be read: {error}") from error
