"""More nodes for a run while it runs: node 0 requests them, and says when ranks should stop so that newcomers can join.

A thread asks Slurm and looks at files; the agent itself never waits for either. The second job has the run's id in its
name, so that whoever goes on with the run finds it, whatever was killed in between: node 0 cancels all jobs of that
name before it requests any and when the attempt ends, and so do commands that end the run or see that it has ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurmtrain.errors import LaunchError, PathError, SlurmtrainError
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.interruption.members import (
    Newcomer,
    Stage,
    choose_newcomers,
    is_worthwhile,
    pause_before_request,
)
from slurmtrain.model.run.events.agent_events import NodesLeft, NodesRequested, RanksRestarted
from slurmtrain.model.run.job_state import base
from slurmtrain.model.run.layout import AttemptDir, SubmissionDir, split_attempt
from slurmtrain.model.run.run import GROW
from slurmtrain.runtime.environment.node import Node
from slurmtrain.runtime.environment.process_limits import soft_limit_of_ranks
from slurmtrain.runtime.environment.variables import EXTENDS, scrubbed, take_variable
from slurmtrain.runtime.job import lease
from slurmtrain.slurm.parse import read_job, second_job_name
from slurmtrain.slurm.requeue import add_nodes, expanded, inherited_options
from slurmtrain.slurm.slurm_commands import run_command
from slurmtrain.system.files import make_directory, read_json, write_json
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import block_signals

# How often node 0 looks at the files of newcomers, and writes its own.
_LOOK_S = 2.0
# How often Slurm is asked about a second job without agents yet.
_ASK_S = 60.0
# A newcomer that has not announced itself again for so long is gone, or was suspended.
_SILENCE_S = 20.0
# What stopping and starting ranks costs, in times of a start: they also save, and have a preflight.
_STOPS = 2.0
# How long an agent waits for the scheduler before it exits.
_CLOSE_S = 5.0
_WAITING = frozenset({"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED"})


@dataclass(slots=True)
class _Waiting:
    """When a newcomer was first and last seen to live, by the monotonic clock, and its last count."""

    newcomer: Newcomer
    since: float
    at: float
    count: int


class Growth:
    """Gets more nodes for an attempt, from the first start of its ranks to its end."""

    def __init__(
        self, attempt: AttemptDir, requests: SlurmNodes, *, job_id: str, first: int, most: int, ends_at: float | None
    ) -> None:
        """Nothing is requested before :meth:`ranks_started`.

        ``attempt``: an attempt with the job ``job_id``. ``requests``: the scheduler. ``first``: the number of the first
        newcomer. ``most``: how many nodes the run can use. ``ends_at``: the attempt's time limit, by the monotonic
        clock; None: it has none.
        """
        self._attempt = attempt
        self._requests = requests
        self._job_id = job_id
        self._most = most
        self._ends_at = ends_at
        # What the thread and the agent share, under the lock: the ranks' nodes; the second job, when Slurm was asked
        # about it, how many there were, when the last was over, and whether a person has cancelled one.
        self._nodes = most
        self._stage: Stage | None = None
        self._second_job, self._asked_at = "", 0.0
        self._requested, self._over_at, self._is_refused = 0, 0.0, False
        self._waiting: dict[int, _Waiting] = {}
        self._joined: set[int] = set()
        # Nodes of the newest stage that take no part any more, and nodes that never should take part again.
        self._left: set[str] = set()
        self._unfit: set[str] = set()
        self._events: list[NodesRequested] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._next = first
        self._count = 0
        self._cost_s = 0.0

    # --- the agent ----------------------------------------------------------------------------------------------------

    def ranks_started(self, nodes: int) -> None:
        """Ranks have been started on so many ``nodes``."""
        with self._lock:
            self._nodes = nodes
        if self._thread is None and nodes < self._most:
            self._thread = threading.Thread(target=self._run, name="growth", daemon=True)
            self._thread.start()

    def ranks_began(self, seconds: float) -> None:
        """Ranks have begun to train so many ``seconds`` after they were started: a stop costs about twice that."""
        with self._lock:
            self._cost_s = max(self._cost_s, _STOPS * seconds)

    def take_events(self) -> list[NodesRequested]:
        """What is to be journaled since the last call."""
        with self._lock:
            events, self._events = self._events, []
            return events

    def newcomers(self) -> list[Newcomer]:
        """The newcomers that the ranks should stop for now; none if it is better to train on."""
        now = time.monotonic()
        with self._lock:
            waiting = {number: now - each.since for number, each in self._waiting.items()}
            chosen = choose_newcomers(
                waiting, [each.newcomer for each in self._waiting.values()], self._most - self._nodes
            )
            left_s = None if self._ends_at is None else self._ends_at - now
            more = self._nodes + len(chosen)
            return chosen if is_worthwhile(self._nodes, more, cost_s=self._cost_s, left_s=left_s) else []

    def admit(self, stage: Stage) -> None:
        """Let the agents in the roster of a ``stage`` begin. Raises PathError, OSError."""
        with self._lock:
            self._stage = stage
            # Until ranks have been started on them: their nodes are not missing any more.
            self._nodes = min(self._most, len(stage.roster))
            self._joined |= set(stage.roster)
            self._left = set()
            for number in stage.roster:
                self._waiting.pop(number, None)
            self._count += 1
            count = self._count
        admit(self._attempt, stage, count)

    def nodes_left(self, job_id: str, hosts: Collection[str], *, unfit: bool = False) -> None:
        """Nodes of a second job take no part any more: the job is over, or ends now.

        Args:
            job_id: That job.
            hosts: Their names.
            unfit: The preflight failed with them: they are not requested again.
        """
        with self._lock:
            self._left.update(hosts)
            if unfit:
                self._unfit.update(hosts)
            if self._second_job in ("", job_id):
                self._request_is_over(time.monotonic())

    def note_unfit(self, journal: Journal, stage: Stage) -> None:
        """Note that a ``stage`` could not begin because of its newcomers, without which the attempt goes on.

        ``journal``: node 0's.
        """
        why = "the preflight with the new nodes failed"
        newcomers = [number for number in stage.roster if number not in stage.before]
        # Their agents have journaled an end, which is not the attempt's.
        following = RanksRestarted(
            round=stage.round + 1, members=list(stage.before), cause=GROW, why=why, lost=newcomers, joined=newcomers
        )
        journal.write(following)
        for job_id, hosts in stage.newcomers().items():
            journal.write(NodesLeft(job_id=job_id, hosts=hosts, why=why))
            self.nodes_left(job_id, hosts, unfit=True)

    def end(self) -> None:
        """Cancel what waits in the queue, without waiting for that: the attempt ends."""
        self._over.set()

    def join(self) -> None:
        """Wait some seconds for that. A requeue within a preemption's grace comes first."""
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # Left by an earlier attempt whose node 0 was killed.
        with contextlib.suppress(SlurmtrainError):
            self._requests.cancel_all()
        while not self._over.is_set():
            with contextlib.suppress(SlurmtrainError, OSError):
                self._pulse()
                self._look()
                self._ask()
            self._over.wait(_LOOK_S)
        with contextlib.suppress(SlurmtrainError):
            self._requests.cancel_all()

    def _pulse(self) -> None:
        """Show newcomers that somebody waits for them."""
        with self._lock:
            self._count += 1
            stage, count = self._stage, self._count
            # Under the lock: an older stage must not replace the newest one.
            admit(self._attempt, stage, count)

    def _look(self) -> None:
        """Note which newcomers are there."""
        now, announced = time.monotonic(), read_newcomers(self._attempt)
        with self._lock:
            for number, (newcomer, count) in announced.items():
                if number not in self._joined:
                    earlier = self._waiting.setdefault(number, _Waiting(newcomer, now, now, count))
                    if count != earlier.count:
                        earlier.count, earlier.at = count, now
            for number, each in list(self._waiting.items()):
                if number not in announced or now - each.at > _SILENCE_S:
                    del self._waiting[number]

    def _ask(self) -> None:
        """Request nodes if some are missing and no job waits for them, or see what has become of that job."""
        now = time.monotonic()
        with self._lock:
            missing = self._most - self._nodes - len(self._waiting)
            job_id, asked_at = self._second_job, self._asked_at
            has_agents = any(each.newcomer.job_id == job_id for each in self._waiting.values())
            joined = bool(job_id) and self._stage is not None and job_id in self._stage.jobs
            is_due = now - self._over_at >= pause_before_request(self._requested)
        if job_id:
            if joined or (not has_agents and now - asked_at >= _ASK_S and self._is_over(job_id)):
                with self._lock:
                    self._request_is_over(now)
        elif missing > 0 and is_due and not self._is_refused:
            self._request(missing, now)

    def _is_over(self, job_id: str) -> bool:
        """Whether a second job will start no agent any more. If a person has cancelled it, there will be no other."""
        name = base(self._requests.record(job_id).get("JobState", ""))
        with self._lock:
            self._asked_at = time.monotonic()
            self._is_refused |= name == "CANCELLED"
        return name not in _WAITING

    def _request(self, nodes: int, now: float) -> None:
        limit_s = None if self._ends_at is None else self._ends_at - now
        extension = Extension(self._attempt.path.name, self._next)
        with self._lock:
            hosts = () if self._stage is None else self._stage.hosts
            without = sorted({*filter(None, hosts)} - self._left | self._unfit)
        self._next += nodes
        try:
            job_id = self._requests.request(self._job_id, extension, nodes, limit_s, without)
            event = NodesRequested(job_id=job_id, nodes=nodes)
        except SlurmtrainError as error:
            job_id, event = "", NodesRequested(nodes=nodes, problem=str(error))
        with self._lock:
            self._second_job, self._asked_at = job_id, now
            self._events.append(event)
            if not job_id:
                self._request_is_over(now)

    def _request_is_over(self, now: float) -> None:
        """There is no request any more. The caller holds the lock."""
        self._second_job = ""
        self._requested += 1
        self._over_at = now


def make_growth(attempt: AttemptDir, node: Node, spec: Spec, began: float) -> Growth:
    """What gets more nodes for an attempt, on its node 0.

    Args:
        attempt: The attempt.
        node: This node.
        spec: The run's.
        began: When the attempt began, by the monotonic clock.
    """
    ends_at = None if spec.resources.time is None else began + spec.resources.time
    requests, most = SlurmNodes(spec.name, attempt.run.id), spec.resources.nodes.max
    return Growth(attempt, requests, job_id=node.job_id, first=node.count, most=most, ends_at=ends_at)


# --- the files by which they find each other --------------------------------------------------------------------------
# A newcomer writes its own file, and again every few seconds: the count in it shows node 0 that it lives. Node 0 does
# the same with the file of admission, which also says who takes part in the newest stage. Only files of the run's user
# count, and nobody else can enter the run's directory; what the agents then tell each other is authenticated.


_TYPES = {"count": "int"}


def announce(attempt: AttemptDir, newcomer: Newcomer, count: int) -> None:
    """Say that an agent could join an attempt. Raises PathError, OSError.

    Args:
        attempt: The attempt.
        newcomer: The agent.
        count: How often it has said so.
    """
    make_directory(attempt.newcomers)
    write_json(attempt.newcomer(newcomer.number), {**newcomer.to_dict(), "count": count})


def withdraw(attempt: AttemptDir, number: int) -> None:
    """Remove the file of the newcomer with this ``number`` from an ``attempt``."""
    with contextlib.suppress(OSError):
        attempt.newcomer(number).unlink(missing_ok=True)


def read_newcomers(attempt: AttemptDir) -> dict[int, tuple[Newcomer, int]]:
    """All newcomers of an ``attempt`` and how often each has announced itself, by their numbers."""
    announced: dict[int, tuple[Newcomer, int]] = {}
    with contextlib.suppress(OSError):
        for path in sorted(attempt.newcomers.glob("*.json")):
            # A file that is somebody else's, or damaged, announces nobody.
            with contextlib.suppress(PathError, KeyError, TypeError, ValueError):
                plain = read_json(path, types=_TYPES)
                if plain is not None and attempt.newcomer(int(plain["number"])) == path:
                    announced[int(plain["number"])] = Newcomer.from_dict(plain), int(plain["count"])
    return announced


def admit(attempt: AttemptDir, stage: Stage | None, count: int) -> None:
    """Say who takes part in an attempt. Raises PathError, OSError.

    Args:
        attempt: The attempt.
        stage: Its newest stage; None: the first one, which nobody was admitted to.
        count: How often node 0 has said so.
    """
    write_json(attempt.admission, {"count": count, "stage": None if stage is None else stage.to_dict()})


def read_admission(attempt: AttemptDir) -> tuple[Stage | None, int]:
    """The newest stage of an ``attempt``, None if nobody has joined it, and how often node 0 has said so; 0: never."""
    with contextlib.suppress(PathError, KeyError, TypeError, ValueError):
        plain: Mapping[str, Any] | None = read_json(attempt.admission, types=_TYPES)
        if plain is not None:
            stage = plain.get("stage")
            return None if stage is None else Stage.from_dict(stage), int(plain["count"])
    return None, 0


# --- an agent of a second job -----------------------------------------------------------------------------------------
# The variable EXTENDS, which node 0 of that attempt has set for the job, names the attempt and the number of the job's
# first agent. The agent leaves, and with it the job ends, as soon as nobody waits for it any more: a signal has come,
# the run is over or has another attempt, or node 0 no longer looks for newcomers.


# How often an agent announces itself, and looks whether it is admitted.
_ANNOUNCE_S = 2.0
_ADMISSION_POLL_S = 0.5
# For how long node 0 may not have looked for newcomers: it does every few seconds, but a file server may be slow.
_NODE_0_SILENCE_S = 90.0


@dataclass(frozen=True, slots=True)
class Extension:
    """What a second job is for: the attempt ``<job id>.<restart>``, and the number of the job's first agent there."""

    attempt: str
    first: int

    def __str__(self) -> str:
        return f"{self.attempt}:{self.first}"


def pop_extension() -> Extension:
    """What this agent's job is for, according to its environment. Raises LaunchError if that says something else."""
    text = take_variable(EXTENDS)
    attempt, _, first = text.rpartition(":")
    if split_attempt(attempt) is None or not first.isdecimal():
        raise LaunchError(f"{EXTENDS} is {text!r}, which names no attempt; it is set by slurmtrain alone")
    return Extension(attempt, int(first))


@dataclass(frozen=True, slots=True)
class Admission:
    """Where a newcomer takes part: in a ``stage`` of an ``attempt``, as a ``node`` of it."""

    attempt: AttemptDir
    node: Node
    stage: Stage


def wait_for_admission(
    submission: SubmissionDir, node: Node, extension: Extension, give_up: Callable[[], bool]
) -> Admission | None:
    """Announce this agent to the attempt that it could join, and wait until it is admitted. Raises PathError, OSError.

    Args:
        submission: The run's submission, which both jobs have in common.
        node: This node of the second job.
        extension: What that job is for.
        give_up: Whether a signal has come.

    Returns:
        Where it takes part; None if nobody needs it.
    """
    job_id, restart = split_attempt(extension.attempt) or ("", 0)
    attempt = submission.run.attempt(job_id, restart)
    number = extension.first + node.index
    newcomer = Newcomer(number=number, host=node.host, job_id=node.job_id, job_nodes=node.count)
    heard, heard_at, count, announced_at = 0, time.monotonic(), 0, 0.0

    def goes_on() -> bool:
        with contextlib.suppress(PathError):
            return lease.holds(attempt) and lease.ended_as(attempt.run, node.submission) is None
        return False

    try:
        while not give_up() and goes_on():
            now = time.monotonic()
            if now - announced_at >= _ANNOUNCE_S:
                count, announced_at = count + 1, now
                announce(attempt, newcomer, count)
            stage, pulse = read_admission(attempt)
            if stage is not None and stage.place_of(number) is not None:
                own = replace(node, index=number, count=len(stage.roster), job_id=job_id, restart=restart)
                return Admission(attempt, own, stage)
            heard, heard_at = (pulse, now) if pulse != heard else (heard, heard_at)
            if now - heard_at > _NODE_0_SILENCE_S:
                return None
            time.sleep(_ADMISSION_POLL_S)
        return None
    finally:
        withdraw(attempt, number)


# --- the second job ---------------------------------------------------------------------------------------------------
# It is submitted from node 0 of the run, with the batch script and the options of the run's job, so that it gets nodes
# of the same kind: only the number of nodes, the time limit and the name differ. It is never requeued: node 0 requests
# another one if the run still needs it.
#
# Slurm can also let a running job have the nodes of another one (``sbatch --dependency=expand``), but only where the
# site sets ``SchedulerParameters=permit_job_expansion``, and running steps do not get them.


_MINUTE_S = 60
# sbatch with the user's soft limit of open files, which Slurm hands on to the job: the agent's own is higher.
_SBATCH = ("bash", "-c", 'ulimit -S -n "$0" 2>/dev/null; exec sbatch "$@"')


class SlurmNodes:
    """Requests for more nodes of one run."""

    def __init__(self, name: str, run_id: str) -> None:
        """For the run with this ``name`` and id."""
        self._name = second_job_name(name, run_id)

    def request(
        self, job_id: str, extension: Extension, nodes: int, limit_s: float | None, without: Sequence[str]
    ) -> str:
        """Submit a second job like ``job_id``, and return its id. Raises SlurmDown.

        ``extension``: its purpose. ``nodes``: how many it should get at most. ``limit_s``: its time limit; None: the
        limit of ``job_id``. ``without``: nodes that it must not get, besides nodes that ``job_id`` has or excludes.
        """
        script = run_command("scontrol", "write", "batch_script", job_id, "-")
        job = read_job(run_command("scontrol", "show", "job", job_id))
        # A node may have room for two jobs.
        excluded = add_nodes(job.get("ExcNodeList", ""), [*expanded(job.get("NodeList", "")), *without])
        soft = soft_limit_of_ranks()
        # Options of the command line win over options in the script.
        options = [
            *inherited_options(job, script),
            f"--job-name={self._name}",
            f"--nodes=1-{nodes}" if nodes > 1 else "--nodes=1",
            f"--exclude={excluded}",
            "--no-requeue",
            # Instead of what the run's job waited for.
            f"--dependency=after:{job_id}",
            f"--export=ALL,{EXTENDS}={extension}",
            *(() if limit_s is None else (f"--time={max(1, math.ceil(limit_s / _MINUTE_S))}",)),
        ]
        # The batch script of an element finds its run by the element's index.
        _, underscore, index = job_id.partition("_")
        if underscore:
            options.append(f"--array={index}")
        limit = "unlimited" if soft < 0 else str(soft)
        # Not the environment of commands whose answers are read: the job would have its formats and locale.
        environ = scrubbed(os.environ)
        answer = run_command(*_SBATCH, limit, "--parsable", *options, stdin=script, environ=environ)
        return answer.strip().partition(";")[0] + underscore + index

    def cancel_all(self) -> None:
        """Cancel all second jobs of the run that have not ended. Raises SlurmDown."""
        # Slurm's SIGTERM to all processes of the run's job must not end it.
        with block_signals((signal.SIGTERM,)):
            run_command("scancel", "--me", f"--name={self._name}")

    def record(self, job_id: str) -> Mapping[str, str]:
        """What Slurm knows about a job, field by field. Raises SlurmDown."""
        return read_job(run_command("scontrol", "show", "job", job_id))
