"""The node agent: one process per node, from the start of an attempt to its end.

submitit runs :func:`run_node` as a task on every node. The pickled task holds no state of the run: the agent reads its
plan from the submission's directory and writes its own journal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Thread

from slurmtrain.errors import SlurmtrainError
from slurmtrain.model.experiment.chain import fill
from slurmtrain.model.experiment.launcher import NodePlace
from slurmtrain.model.experiment.plan import fill_command
from slurmtrain.model.experiment.sections import NSYS
from slurmtrain.model.interruption.exit_report import AttemptOutcome, ExitReport
from slurmtrain.model.interruption.members import Stage
from slurmtrain.model.interruption.policy import Decision, Newest, PriorEnd
from slurmtrain.model.run.events.agent_events import (
    CodePrepared,
    ConnectionsRefused,
    LeftoversKilled,
    NodeEnded,
    RendezvousReady,
    SurplusStart,
)
from slurmtrain.model.run.layout import AttemptDir, SubmissionDir
from slurmtrain.model.run.lineage import EARLY, UPSTREAM
from slurmtrain.runtime.agent.finish import AttemptFinish, JobQueue, ask_policy, forbid_requeue, state_of_finished_run
from slurmtrain.runtime.agent.helpers import STOPPED_S, NodeHelpers, Teller, wait_for_others
from slurmtrain.runtime.agent.job_query import JobQuery
from slurmtrain.runtime.agent.node_round import Begin, MoreNodes, RoundConfig
from slurmtrain.runtime.agent.node_start import CheckpointFinder, NodeStart, enter_pack, link_log, time_limit_lead
from slurmtrain.runtime.agent.nsys import under_nsys
from slurmtrain.runtime.agent.rounds import Rounds
from slurmtrain.runtime.agent.script_metrics import MetricsProcess, send_live
from slurmtrain.runtime.agent.workers import RankPlacement, RankProcesses
from slurmtrain.runtime.environment.node import Node, pop_coordinator_endpoints, read_plan, this_node
from slurmtrain.runtime.environment.process_limits import raise_soft_limit
from slurmtrain.runtime.environment.ranks import facts_for_command, set_mlflow_run, set_worker_environment
from slurmtrain.runtime.environment.setup_script import (
    TEARDOWN_S,
    python_of_ranks,
    take_setup_failure,
    use_variables_of_ranks,
)
from slurmtrain.runtime.environment.variables import SETUP_DIR, SETUP_FAILED, environment_of_agent, is_extension
from slurmtrain.runtime.job import lease
from slurmtrain.runtime.job.lease import end_processes_of_setup
from slurmtrain.runtime.job.signals import StopFlag
from slurmtrain.runtime.job.torch_private import check_version
from slurmtrain.runtime.peers.channel import Refusals
from slurmtrain.runtime.preflight.entry import PreflightHost, open_link, report_unfit, run_preflight
from slurmtrain.runtime.preflight.facts.cpus import set_binding
from slurmtrain.runtime.preflight.facts.environment_facts import NotedNode, note_environment
from slurmtrain.runtime.preflight.participant import PreflightOutcome
from slurmtrain.runtime.upstreams import read_facts
from slurmtrain.system import inherited
from slurmtrain.system.files import make_directory, write_atomically
from slurmtrain.system.interpreter import GROWTH, leave_quickly, load_plugin, print_utf8
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import become_subreaper

# How long a very short attempt waits until its environment is noted.
_NOTE_S = 1.0
# Causes after which the scheduler should see the job as completed, not failed.
_NO_FAILURE = frozenset({"completed", "cancelled", "timeout", "preempted", EARLY})
# Why a start of a job is surplus, by the state of its run.
_ALREADY = {
    "completed": "the run has completed already",
    "cancelled": "the run was cancelled already",
    "failed": "the run has failed already",
    lease.REPLACED: "the run continues with another job",
}


def run_node(submission_dir: str, queue: JobQueue | None = None) -> None:
    """Run this node's part of an attempt, then exit: with 1 if it failed and will not restart, else with 0.

    Under Slurm, nodes other than node 0 always exit with 0: on any other code srun would end node 0's agent, which may
    be busy requeuing the job. ``submission_dir``: the submission's. ``queue``: the scheduler that can restart the job,
    if there is one.
    """
    began = time.monotonic()
    leave_quickly()
    print_utf8()
    inherited.enter_agent()
    flag = StopFlag()
    # A spec may have sbatch send SIGUSR1, instead of SIGUSR2, before the time limit.
    flag.install(signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    # What ranks start must remain a descendant of this process, which has to end it.
    become_subreaper()
    raise_soft_limit()
    attempt, node, stage = _place_of_agent(SubmissionDir(Path(submission_dir)), flag)
    make_directory(attempt.path)
    with Journal(attempt.node_journal(node.index)) as journal:
        state = state_of_finished_run(attempt, node)
        if state is not None:
            journal.write(SurplusStart(why=_ALREADY.get(state, f"the run is {state} already")))
            if node.index == 0 and queue is not None:
                forbid_requeue(queue, attempt, node)
            sys.exit(0)
        agent = NodeAgent(attempt, node, journal, flag, began, queue)
        try:
            # Runs that share a job have one node, and nobody can be asked for more of this machine.
            if agent.spec.resources.grow and node.index == 0 and queue is not None and not node.launch.pack:
                agent.growth = load_plugin(GROWTH, "slurm").make_growth(attempt, node, agent.spec, began)
            outcome = agent.run(stage)
        except SlurmtrainError as error:
            report = ExitReport(cause="crash", reason=str(error), failed_at=time.time())
            outcome = AttemptOutcome(report, report)
        except Exception as error:
            # A bug in slurmtrain: the traceback goes to the agent's log, its summary to the journal.
            # Or a person has renamed the runs root while this agent was about to read or write there.
            summary = f"the node agent failed: {type(error).__name__}: {error}"
            reason = "; ".join(filter(None, (summary, agent.displacement())))
            RankProcesses().kill()
            with contextlib.suppress(Exception):
                agent.tear_down_node()
            journal.write(NodeEnded(cause="crash", reason=reason, failed_at=time.time()))
            raise
        if agent.tear_down_node() and node.index == 0 and outcome.node_report.cause not in (EARLY, UPSTREAM):
            # Slurm would end their agents with this one. Agents that have met in rounds have waited there.
            wait_for_others(attempt, node.count, lambda: flag.raised is not None)
        # Ended rounds have left nothing, but one that failed in an unforeseen way may have.
        RankProcesses().kill()
        agent.end_processes_of_setup()
        starts_again = agent.finish(outcome)
    succeeded = outcome.node_report.cause in _NO_FAILURE or starts_again
    sys.exit(0 if succeeded or (node.index != 0 and queue is not None) else 1)


def _place_of_agent(submission: SubmissionDir, flag: StopFlag) -> tuple[AttemptDir, Node, Stage]:
    """The attempt that this agent is part of, which may be of another job; exits if that has no use for it."""
    node = this_node(submission)
    if not is_extension():
        return submission.run.attempt(node.job_id, node.restart), node, Stage.first(node.count)
    if os.environ.get(SETUP_FAILED):
        sys.exit(f"slurmtrain: 'setup' failed: {os.environ[SETUP_FAILED]}")
    # They lead to node 0 of this job, not to the attempt's.
    pop_coordinator_endpoints()
    growth = load_plugin(GROWTH, "slurm")
    extension = growth.pop_extension()
    admission = growth.wait_for_admission(submission, node, extension, lambda: flag.raised is not None)
    if admission is None:
        sys.exit(0)
    return admission.attempt, admission.node, admission.stage


class NodeAgent:
    """This node's agent, which hosts the rounds of ranks (:class:`~.rounds.Rounds`)."""

    def __init__(
        self, attempt: AttemptDir, node: Node, journal: Journal, flag: StopFlag, began: float, queue: JobQueue | None
    ) -> None:
        """For ``node`` in an ``attempt``. Raises SlurmtrainError if this node cannot read the submission's plan.

        ``journal``: this node's. ``flag``: set by a signal to this process. ``began``: when this process started, by
        the monotonic clock. ``queue``: the job's scheduler, if any.
        """
        self.attempt = attempt
        self.node = node
        self.journal = journal
        self.flag = flag
        submission = attempt.run.submission(node.submission)
        plan = read_plan(submission.plan)
        if plan is None:
            raise SlurmtrainError(f"there is no plan at {submission.plan}; is the run directory visible on this node?")
        self.plan = plan.for_node(node.index)
        self.checkpoints = CheckpointFinder(attempt, self.plan, journal, node.launch.since)
        self._preflight: PreflightOutcome | None = None
        self._at = node
        self.spec = self.plan.spec
        self.growth: MoreNodes | None = None
        self._rounds_begun = 0
        self._resumed = Newest()
        history = node.launch.history
        # Node 0 asks on behalf of all nodes: queries from a thousand of them would overload Slurm's controller.
        read_record = (lambda: queue.record(node.job_id)) if queue is not None and node.index == 0 else None
        self.query = JobQuery(read_record, history.grace_s if history else None)
        self._refusals = Refusals()
        self._finish = AttemptFinish(attempt, node, journal, queue, self.query)
        self._live: MetricsProcess | None = None
        self.helpers = NodeHelpers(self.plan.spec, attempt, node.index, journal)
        self._environment: Thread | None = None
        self._teller = Teller(attempt.run, node.launch.notify if node.index == 0 else "")
        self._is_told = False
        self._start = NodeStart(self, began)

    def run(self, stage: Stage) -> AttemptOutcome:
        """Run this node's part of the attempt from a ``stage`` on, and return its report. Raises SlurmtrainError."""
        submission = self.attempt.run.submission(self.node.submission)
        enter_pack(submission, self.node, self.plan.spec.resources.gpus_per_node)
        report = self._start.begin(is_first=stage.round == 0) or take_setup_failure(self.plan, self.attempt)
        if report is not None:
            return AttemptOutcome(report, report)
        if self.node.index == 0:
            # Before the preflight: what the server needs to answer costs no time then.
            self._live = send_live(submission, self.node.launch.mlflow, live=self.plan.spec.tracking.live)
        check_version()
        # Whatever happens meanwhile, the copy is complete before this attempt ends: another one may write there then.
        with ThreadPoolExecutor(1, "code") as beside:
            code = beside.submit(self._prepare_code)
            outcome: AttemptOutcome | Stage = stage
            while isinstance(outcome, Stage):
                outcome = self._run_stage(outcome, code.result)
        return outcome

    def _run_stage(self, stage: Stage, wait_for_code: Callable[[], None]) -> AttemptOutcome | Stage:
        """Run a part of the attempt with an unchanging set of nodes. Raises SlurmtrainError.

        ``wait_for_code``: raises what has kept this node from preparing the code.
        """
        self._at = self.node.at(stage)
        attempt = replace(self.attempt, round=stage.round)
        host = PreflightHost(flag=self.flag, refusals=self._refusals, finish=wait_for_code)
        preflight = run_preflight(attempt, self._at, self.plan, self.journal, host)
        failed = isinstance(preflight, ExitReport) or preflight.problem is not None or preflight.master is None
        if failed and self.node.index in stage.before and self.flag.raised is None:
            # With the newcomers it cannot go on, but without them it did.
            if self.growth is not None:
                self.growth.note_unfit(self.journal, stage)
            return stage.without_newcomers()
        if isinstance(preflight, ExitReport):
            return AttemptOutcome(preflight, preflight)
        if preflight.problem is not None or preflight.master is None:
            report = report_unfit(preflight, self.plan.spec, is_node_0=self.node.index == 0)
            return AttemptOutcome(report, report)
        self._preflight = preflight
        return self._train(stage, preflight, preflight.master)

    def finish(self, outcome: AttemptOutcome) -> bool:
        """Journal the end, and restart the job if the policy says so; returns whether it restarts."""
        if self._refusals.count:
            self.journal.write(
                ConnectionsRefused(
                    node=self.node.index,
                    count=self._refusals.count,
                    addresses=[address for address, _ in self._refusals.by_address.most_common()],
                )
            )
        if self.growth is not None:
            # The job must not compete with its own second one.
            self.growth.end()
        requeue = self.plan.spec.requeue
        if self._environment is not None:
            # Mostly it ended long ago; a slow file system must not delay a requeue.
            self._environment.join(_NOTE_S)
        self._finish.keep_nodes(outcome.attempt_report, self.plan.spec, self._start.at, self.flag)
        starts_again = self._finish.finish(outcome, requeue, self._resumed, self.checkpoints.newest)
        in_grace = self.flag.raised is not None
        if self._live is not None:
            self._live.end(in_grace=in_grace)
        if self.growth is not None:
            self.growth.join()
        # Last, and never before a restart: the next start tells of this one's end.
        is_over = lease.ended_as(self.attempt.run, self.node.submission) is not None
        if not starts_again and (is_over or (self.node.executor == "local" and not in_grace)):
            self._teller.end(in_grace=in_grace)
        return starts_again

    def end_processes_of_setup(self) -> None:
        """End what setup has left running on the first node, unless other runs of the job need it too."""
        if self.node.index == 0 and self.plan.spec.setup and self.node.launch.pack is None:
            killed = end_processes_of_setup(self.attempt)
            if killed:
                self.journal.write(LeftoversKilled(killed=killed))

    def displacement(self) -> str:
        """What has happened to the run's directory meanwhile, as a sentence without a full stop; mostly empty."""
        return self._finish.displacement()

    def _prepare_code(self) -> None:
        """Make the run's own copy of its code, on node 0, without which no node passes the preflight."""
        code = self.plan.code
        if code is not None and self.node.index == 0:
            from slurmtrain.runtime.code.code_copy import link_results, make_tree

            if make_tree(self.attempt.run, code):
                self.journal.write(CodePrepared(snapshot=code.hash, files=code.files))
            link_results(self.plan, self.attempt.run)

    # --- ranks ------------------------------------------------------------------------------------------------------

    def _train(self, stage: Stage, preflight: PreflightOutcome, master: tuple[str, int]) -> AttemptOutcome | Stage:
        """Join the other agents of a ``stage`` at ``master``, and run rounds of ranks with them until it ends."""
        # The port was bound during the preflight, so no other process can have taken it since.
        link = open_link(preflight, master[0], self._at, self._refusals, lambda: self.flag.raised is not None)
        self.journal.write(
            RendezvousReady(
                node=self.node.index, master_addr=master[0], master_port=master[1], interface=preflight.interface
            )
        )
        if not self._is_told:
            self._is_told = True
            self._teller.begin()
        spec = self.plan.spec
        lead_s, limit_s = time_limit_lead(spec, self.node.launch.history), spec.resources.time
        config = RoundConfig(
            attempt=self.attempt,
            spec=spec,
            stage=stage,
            node=self._at.index,
            job_id=self.node.job_id,
            restart=self.node.restart,
            hosts=self._at.hosts,
            address=master[0],
            reserved=preflight.reserved,
            deadline=None if limit_s is None else self._start.at + limit_s - lead_s,
            lead_s=lead_s,
        )
        try:
            outcome = Rounds(config, self, link).run()
        finally:
            link.close()
        if self.node.index == 0:
            self.checkpoints.note_newest()
        if outcome is None:
            report = self._start.report_early_signal()
            return AttemptOutcome(report, report)
        return outcome

    def find_checkpoint(self) -> tuple[str | None, Newest]:
        """The checkpoint that ranks of the next round resume from, None for the beginning, and its description."""
        self._rounds_begun += 1
        # Even if the run was told to start from the beginning, later rounds resume from what the first one saved.
        from_start = self.node.from_start and self._rounds_begun == 1
        self.checkpoints.resumed_at = None
        choose = self.checkpoints.choose_start if from_start else self.checkpoints.choose
        resume_from, self._resumed = choose()
        return resume_from, self._resumed

    def set_up_node(self) -> ExitReport | None:
        """Run what the spec has this node run before its ranks, once; returns a report if that fails."""
        use_variables_of_ranks(os.environ)
        return self.helpers.set_up(self._directory(), lambda: self.flag.raised is not None)

    def tear_down_node(self, until: float | None = None) -> bool:
        """Run what the spec has this node run at the end, once; returns whether that is anything.

        ``until``: when it has to end, by the monotonic clock; None: after the usual time.
        """
        if until is None:
            until = time.monotonic() + (TEARDOWN_S if self.flag.raised is None else STOPPED_S)
        use_variables_of_ranks(os.environ)
        directory = self._directory()
        return self.helpers.tear_down(directory if directory.is_dir() else self.attempt.run.path, until)

    def find_mlflow_run(self) -> str | None:
        """The id of the run on an MLflow server; None if it has none, or that takes too long."""
        return self._live.wait_for_run(give_up=lambda: self.flag.raised is not None) if self._live else None

    def prepare_ranks(self, placement: RankPlacement, begin: Begin, board: str) -> list[str]:
        """Set the environment and working directory that ranks inherit; returns their command. Raises SlurmtrainError.

        ``placement``: which ranks. ``begin``: the state that they begin with. ``board``: the path of the board for
        heartbeats.
        """
        assert self._preflight is not None
        place = NodePlace(
            node_rank=placement.place,
            ranks=placement.ranks,
            interface=self._preflight.interface,
            address=self._preflight.address,
            master_addr=placement.config.address,
            master_port=placement.port,
            hostfile=str(self.attempt.hostfile(self.node.index)),
        )
        if begin.mlflow_run_id is not None:
            set_mlflow_run(self.node.launch.mlflow, begin.mlflow_run_id)
        facts = read_facts(self.attempt.run)
        spec = self.plan.spec
        use_variables_of_ranks(os.environ)
        plan = self.plan.with_python(python_of_ranks(self.plan))
        env = {name: str(value) for name, value in fill(spec.env, facts).items()}
        set_worker_environment(
            replace(plan, spec=replace(spec, params=fill(spec.params, facts), env=env)),
            placement.attempt,
            self._at,
            place,
            resume_from=begin.resume_from,
            heartbeat=board,
        )
        set_binding(spec.resources, self._at)
        make_directory(self.attempt.logs, private=True)
        if place.node_rank == 0:
            log = self.attempt.node_log(self.node.index) if spec.per_node else self.attempt.rank_log(0)
            if problem := link_log(self.plan, self.attempt, self.node.job_id, log):
                print(f"slurmtrain: {problem}", flush=True)
        if self._environment is None:
            environ = dict(environment_of_agent())
            node = NotedNode(self.attempt.run, self.node.index, plan, environ)
            self._environment = note_environment(self.journal, node)
        directory = self._directory()
        try:
            os.chdir(directory)
        except OSError as error:
            raise SlurmtrainError(f"cannot enter the working directory {directory}: {error.strerror}") from error
        placeholders = facts_for_command(
            self.attempt.run, self.node.attempt, begin.resume_from, place if spec.per_node else None
        )
        if spec.per_node:
            slots = zip(placement.members, place.ranks.counts, strict=True)
            lines = "".join(f"node-{node} slots={count}\n" for node, count in slots)
            write_atomically(Path(place.hostfile), lines.encode())
        words = [str(fill(word, facts)) for word in fill_command(plan, placeholders)]
        if plan.code is not None:
            from slurmtrain.runtime.code.code_copy import translate_command

            words = translate_command(plan, self.attempt.run, words)
        if spec.profile is not None and spec.profile.tool == NSYS:
            words = under_nsys(words, self.attempt, per_node=spec.per_node)
        return words

    def _directory(self) -> Path:
        """Where the command runs: where setup has gone, if it has; in the run's copy of the code, if that has it."""
        directory, place = self.plan.working_directory(self.attempt.run.code), os.environ.get(SETUP_DIR)
        if not place or self.plan.code is None:
            return Path(place or directory)
        from slurmtrain.runtime.code.code_copy import CodeCopy

        return Path(CodeCopy(self.plan.code, self.attempt.run).translate(place))

    def ask_policy(self, latest: PriorEnd) -> Decision:
        """What to do after an end that has just happened."""
        displacement = self.displacement()
        if displacement:
            # Its files would be made anew where the run was. Commands start it again, where it is now.
            return Decision("stop", displacement)
        return ask_policy(self.attempt, latest, self.plan.spec.requeue)
