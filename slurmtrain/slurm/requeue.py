"""Requeuing a job in Slurm so that it restarts: later, or on other nodes.

What Slurm allows, seen on 22.05: a job's excluded nodes (ExcNodeList) can be changed while it is pending, never while
it runs; it is pending as soon as it is requeued, even if its tasks still exist. A requeued job restarts after a delay
(AuthInfo's cred_expire), and not before its last task is gone. So if the agent is killed between the requeue and the
update, the worst case is that the job restarts on the same nodes, and is requeued once more. It is never held for ever,
as one requeued by ``requeuehold`` would be. ``incomplete`` keeps a job that a person cancels from restarting.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmtrain.errors import SlurmDown
from slurmtrain.model.hostlist import compress_hostlist, expand_hostlist
from slurmtrain.model.run.job_state import HELD_BY_USER
from slurmtrain.model.run.layout import SubmissionDir
from slurmtrain.runtime.job import lease
from slurmtrain.slurm.parse import NODE_FORMAT, describe_after, read_job, read_nodes
from slurmtrain.slurm.site import describe_too_few
from slurmtrain.slurm.slurm_commands import is_installed, run_command
from slurmtrain.system.files import write_json
from slurmtrain.system.process import block_signals

# Slurm kills a job's processes KillWait (30 s by default) after its requeue: all commands must be done by then.
_PATIENCE_S = 5.0
# Seconds between tries of a change: all of them together are far less than KillWait.
_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.0)
# sbatch options, which may be missing from the batch script if they came from the environment, and their record fields.
_OPTIONS = {"partition": "Partition", "account": "Account", "qos": "QOS", "reservation": "Reservation",
            "constraint": "Features"}  # fmt: skip
# What sbatch says if no nodes are left that could ever run a job, or if it rejects the list of nodes.
_IMPOSSIBLE = ("node configuration", "node count", "invalid node name", "more processors requested")
# Slurm sends it to all processes of a requeued job, where it would end the next command.
_DISTURBING = frozenset((signal.SIGTERM,))


class SlurmQueue:
    """Slurm's queue, as a node agent uses it for its own job (``slurmtrain.runtime.agent.finish.JobQueue``)."""

    def record(self, job_id: str) -> Mapping[str, str]:
        """What Slurm knows about the job, field by field. Raises SlurmDown."""
        with block_signals(_DISTURBING):
            return read_job(_ask_soon("scontrol", "show", "job", job_id))

    def exclusion_problem(self, job_id: str, without: Sequence[str]) -> str | None:
        """Why the job ``job_id`` could not restart without the nodes ``without``; None if it could, or if unknown."""
        try:
            job = read_job(run_command("scontrol", "show", "job", job_id))
            if "0" in (job.get("Requeue"), job.get("BatchFlag")):
                return f"its job may not be requeued (Requeue={job.get('Requeue')})"
            excluded = add_nodes(job.get("ExcNodeList", ""), without)
            script = run_command("scontrol", "write", "batch_script", job_id, "-")
            options = inherited_options(job, script)
            try:
                # Slurm tries it with the job's own script.
                run_command("sbatch", "--test-only", f"--exclude={excluded}", *options, stdin=script)
                return None
            except SlurmDown as error:
                message = str(error).removeprefix("sbatch: ")
            impossible = any(words in message.lower() for words in _IMPOSSIBLE)
            why = _missing_nodes(job, excluded, without) or (f"Slurm says: {message}" if impossible else None)
        except SlurmDown:
            return None
        return f"{', '.join(without)} cannot be excluded: {why}" if why else None

    def requeue_job(self, job_id: str, without: Sequence[str], delay_s: float, intent: Path) -> None:
        """Requeue the job ``job_id``. Raises SlurmDown.

        It restarts without the nodes ``without``, and not before ``delay_s`` seconds have passed. If Slurm requeues the
        job but does not exclude the nodes, the job is held. In a container there may be no scontrol: then the file
        ``intent`` asks the batch script, which runs outside, for the requeue only.
        """
        if not is_installed("scontrol"):
            write_json(intent, {"requeue": job_id})
            return
        with block_signals(_DISTURBING):
            excluded = ""
            if without:
                job = read_job(_ask_soon("scontrol", "show", "job", job_id))
                excluded = add_nodes(job.get("ExcNodeList", ""), without)
            _ask_soon("scontrol", "requeue", "incomplete", job_id)
            if delay_s > 0:
                # A job that restarts without the delay is no reason to fail.
                with contextlib.suppress(SlurmDown):
                    _update(job_id, f"StartTime=now+{math.ceil(delay_s)}")
            if not without:
                return
            try:
                # Only after the requeue: the excluded nodes of a running job cannot be changed.
                _update(job_id, f"ExcNodeList={excluded}")
            except SlurmDown:
                # It would start on the same nodes: a person, or the next command, releases it.
                with contextlib.suppress(SlurmDown):
                    _ask_soon("scontrol", "hold", job_id)
                raise

    def put_back(self, job_id: str, after: Sequence[str], delay_s: float, intent: Path) -> None:
        """Requeue the job ``job_id``, which started before its turn, also if it may not be requeued. Raises SlurmDown.

        It restarts once the jobs ``after`` are over that are in the queue; if none is, not before ``delay_s`` seconds
        have passed. ``intent``: as for :meth:`requeue_job`.
        """
        if not is_installed("scontrol"):
            write_json(intent, {"requeue": job_id})
            return
        with block_signals(_DISTURBING):
            queued: list[str] = []
            with contextlib.suppress(SlurmDown):
                # The leader of a heterogeneous job is listed as 7+0.
                listed = _ask_soon("squeue", "--me", "--noheader", "--array", "--format=%i").split() if after else []
                present = {each.removesuffix("+0") for each in listed}
                queued = [each for each in after if each in present]
            is_forbidden = False
            try:
                _ask_soon("scontrol", "requeue", "incomplete", job_id)
            except SlurmDown:
                is_forbidden = read_job(_ask_soon("scontrol", "show", "job", job_id)).get("Requeue") == "0"
                if not is_forbidden:
                    raise
                _ask_soon("scontrol", "update", f"JobId={job_id}", "Requeue=1")
                _ask_soon("scontrol", "requeue", "incomplete", job_id)
            # Without this, the job starts too early once more, which costs some seconds.
            with contextlib.suppress(SlurmDown):
                later = f"Dependency={describe_after(queued)}" if queued else f"StartTime=now+{math.ceil(delay_s)}"
                _update(job_id, later)
            if is_forbidden:
                with contextlib.suppress(SlurmDown):
                    _update(job_id, "Requeue=0")

    def forbid_requeue(self, job_id: str, intent: Path) -> None:
        """Keep Slurm from ever starting the job ``job_id`` again by itself.

        If this cannot be done from here, the file ``intent`` asks the batch script for it.
        """
        with block_signals(_DISTURBING):
            try:
                _ask_soon("scontrol", "update", f"JobId={job_id}", "Requeue=0")
            except SlurmDown:
                write_json(intent, {"forbid_requeue": job_id})


class PackQueue:
    """The queue of one run of a pack (``slurmtrain.runtime.agent.finish.JobQueue``), which shares its job with others.

    None of them may requeue the job, or forbid that, while others train. Each leaves a file in the directory of its
    attempt; the batch script goes on once all agents have ended, and requeues the job if any of them wants that
    (``templates/batch.sh.j2``). The agents of runs that are over then end at once. If the batch script is killed before
    that, the job is over, and commands start the runs again one by one, as with any job that was not requeued.
    """

    def __init__(self, submission: SubmissionDir) -> None:
        """``submission``: directory of the run's submission."""
        self._submission = submission
        self._queue = SlurmQueue()

    def record(self, job_id: str) -> Mapping[str, str]:
        """What Slurm knows about the job, unless only this run was cancelled. Raises SlurmDown."""
        if lease.ended_as(self._submission.run, self._submission.number) == "cancelled":
            return {"JobState": "CANCELLED"}
        return self._queue.record(job_id)

    def exclusion_problem(self, _job_id: str, _without: Sequence[str]) -> str | None:
        """Nothing: a run that must not start on some nodes leaves the job (``AttemptFinish``)."""
        return None

    def requeue_job(self, job_id: str, _without: Sequence[str], _delay_s: float, intent: Path) -> None:
        """Have the batch script requeue the job once all of its agents have ended.

        Args:
            job_id: the job.
            _without: none: a run that must not start on some nodes leaves the job.
            _delay_s: not used, since it would delay other runs.
            intent: the file that the batch script looks for.
        """
        write_json(intent, {"requeue": job_id})

    def forbid_requeue(self, job_id: str, intent: Path) -> None:
        """Have the batch script keep Slurm from starting the job again, if no run of the pack is to go on.

        Args:
            job_id: the job.
            intent: the file that the batch script looks for.
        """
        write_json(intent, {"forbid_requeue": job_id})

    def put_back(self, job_id: str, _after: Sequence[str], delay_s: float, intent: Path) -> None:
        """As :meth:`requeue_job`: runs that start after others share no job.

        Args:
            job_id: the job.
            _after: not used.
            delay_s: not used either.
            intent: the file that the batch script looks for.
        """
        self.requeue_job(job_id, (), delay_s, intent)


def move_behind(job_id: str, dependency: str, *, at_once: bool) -> None:
    """Change what a pending job waits for. Raises SlurmDown.

    Args:
        job_id: The job.
        dependency: As for sbatch; empty: nothing any more.
        at_once: Let it start as soon as that is over, whatever time it was to wait for.
    """
    begin = ("StartTime=now",) if at_once else ()
    run_command("scontrol", "update", f"JobId={job_id}", f"Dependency={dependency}", *begin)


def release_held(job_id: str, without: Sequence[str], *, always: bool) -> bool:
    """Release a job that its user holds; returns whether anything had to be done. Raises SlurmDown.

    ``job_id``: the job. ``without``: nodes that it must not start on. A job that already excludes them is released only
    with ``always``: a person may have held it.
    """
    job = read_job(run_command("scontrol", "show", "job", job_id))
    before = job.get("ExcNodeList", "")
    missing = not set(without) <= set(expanded(before))
    if job.get("JobState") != "PENDING" or job.get("Reason") not in HELD_BY_USER or not (missing or always):
        return False
    # Before the release, or it could start on them at once.
    if missing:
        run_command("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={add_nodes(before, without)}")
    run_command("scontrol", "release", job_id)
    return True


def _update(job_id: str, setting: str) -> None:
    """Change a pending job, retrying several times if necessary. Raises SlurmDown."""
    command = ("scontrol", "update", f"JobId={job_id}", setting)
    for pause in _PAUSES_S:
        with contextlib.suppress(SlurmDown):
            _ask_soon(*command)
            return
        time.sleep(pause)
    _ask_soon(*command)


def _ask_soon(*command: str) -> str:
    return run_command(*command, timeout_s=_PATIENCE_S)


def expanded(nodes: str) -> list[str]:
    """The names in a list of ``nodes``, in Slurm's notation; none if it cannot be parsed."""
    with contextlib.suppress(ValueError):
        return expand_hostlist(nodes)
    return []


def add_nodes(before: str, more: Sequence[str]) -> str:
    """A list of nodes with ``more`` of them; one that cannot be parsed is only extended, since Slurm wrote it."""
    try:
        return compress_hostlist({*expand_hostlist(before), *more})
    except ValueError:
        return ",".join([before, *more])


def inherited_options(job: Mapping[str, str], script: str) -> list[str]:
    """Options of sbatch that make another job ask for the same nodes as this one, besides the options in its script.

    Args:
        job: The fields of the job's record.
        script: Its batch script.
    """
    return [
        f"--{option}={job[field]}"
        for option, field in _OPTIONS.items()
        if field in job and f"#SBATCH --{option}=" not in script
    ]


def _missing_nodes(job: Mapping[str, str], excluded: str, without: Sequence[str]) -> str | None:
    """Which nodes the job would lack in its partitions, as far as can be counted."""
    nodes = read_nodes(run_command("sinfo", "--noheader", "--Node", f"--format={NODE_FORMAT}"))
    unknown = sorted(set(without) - {node.name for node in nodes})
    if unknown:
        return f"Slurm knows no node {', '.join(unknown)}"
    needed = job.get("NumNodes", "").partition("-")[0]
    partitions = [name for name in job.get("Partition", "").split(",") if name]
    if not (needed.isdigit() and partitions):
        return None
    left_out = set(expanded(excluded))
    usable = [node.partition for node in nodes if node.usable and node.name not in left_out]
    left = max(map(usable.count, partitions))
    return describe_too_few(int(needed), left) if left < int(needed) else None
