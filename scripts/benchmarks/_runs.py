"""Run directories as left by submit, agents and sessions, written by the same modules but without fsyncs."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

from _measure import ROOT

from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.events.agent_events import AgentStarted, NodeEnded, RendezvousReady, WorkersStarted
from slurmtrain.model.run.events.checkpoint_events import CheckpointSaved
from slurmtrain.model.run.events.command_events import RunCreated, Submitted, Submitting
from slurmtrain.model.run.events.rank_events import SessionStarted, TrainingStarted
from slurmtrain.model.run.layout import RunDir, RunsRoot, run_id
from slurmtrain.ops.shared.next_attempts import run_settings
from slurmtrain.ops.submit import load
from slurmtrain.runtime.job.metrics import MetricsFile
from slurmtrain.system.files import DIRECTORY_MODE
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import Process, this_process

SPEC = ROOT / "experiments" / "digits" / "digits.yaml"
STEPS = 20


def make_runs(root: Path, *, ended: int, running: int = 0, jobs: Sequence[str] = ()) -> None:
    """This many ended local runs, newer ones that are running, and a pending one for each Slurm job."""
    [planned] = load(SPEC, [f"params.steps={STEPS}"], []).runs
    spec, plan = SPEC.read_text(), json.dumps(planned.plan.to_json(), indent=1)
    now_ms, numbers = time.time_ns() // 1_000_000, random.Random(0)
    count = ended + running + len(jobs)
    for index in range(count):
        run = RunsRoot(root).run(run_id(now_ms - (count - index) * 60_000, numbers.getrandbits(10)))
        submission = run.submission(1)
        for folder in (run.journals, run.attempts, run.checkpoints, submission.path):
            folder.mkdir(mode=DIRECTORY_MODE, parents=True)
        run.spec.write_text(spec)
        for path in (run.plan, submission.plan):
            path.write_text(plan)
        if index < ended + running:
            _write_local(run, planned.plan, ended=index < ended)
        else:
            _write_waiting(run, planned.plan, jobs[index - ended - running])


def _write_created(run: RunDir, plan: Plan, executor: str) -> None:
    settings = run_settings(plan)
    # Every run has a learning rate of its own, so that a column shows what differs.
    settings["params"] = {**settings["params"], "lr": round(int(run.id[-4:], 36) / 36**4, 4)}
    with Journal(run.journals / "created.jsonl", durable=False) as journal:
        journal.write(
            RunCreated(name=plan.spec.name, plan_hash=plan.hash, executor=executor, by="bench@here", **settings)
        )


def _write_waiting(run: RunDir, plan: Plan, job_id: str) -> None:
    _write_created(run, plan, "slurm")
    with Journal(run.journals / "submit.jsonl", durable=False) as journal:
        journal.write(Submitting(submission=1, attempt=1, executor="slurm", host=this_process().host))
        journal.write(Submitted(submission=1, job_id=job_id))


def _write_local(run: RunDir, plan: Plan, *, ended: bool) -> None:
    """One attempt on this machine that has ended or is halfway through."""
    job_id, bench = f"local-{run.id[-6:]}", this_process()
    attempt = run.attempt(job_id, 0)
    attempt.path.mkdir(mode=DIRECTORY_MODE)
    # No process of this boot started at its first clock tick, so a run that has ended is never found alive.
    process = (Process(bench.host, bench.boot, bench.pid, 1) if ended else bench).to_dict()
    _write_created(run, plan, "local")
    with Journal(run.journals / "submit.jsonl", durable=False) as journal:
        journal.write(Submitting(submission=1, job_id=job_id, attempt=1, executor="local", host=bench.host))
        journal.write(Submitted(submission=1, job_id=job_id, process=process))
    with (
        Journal(attempt.node_journal(0), durable=False) as agent,
        Journal(attempt.rank_journal(0), durable=False) as rank,
    ):
        agent.write(AgentStarted(node=0, nodes=1, host=bench.host, process=process, submission=1, attempt=1))
        agent.write(RendezvousReady(node=0, master_addr="127.0.0.1", master_port=29500, interface="lo"))
        agent.write(WorkersStarted(processes={"0": process, "1": process}))
        rank.write(SessionStarted(step=0, world_size=2, device="cpu"))
        rank.write(TrainingStarted(total_steps=STEPS))
        metrics = MetricsFile(attempt.metrics)
        for step in range(1, STEPS + 1 if ended else STEPS // 2):
            metrics.write(step, {"loss": 2.3 / step, "lr": 0.05, "test_accuracy": 1 - 0.5 / step})
        metrics.close()
        saved = STEPS if ended else STEPS // 2
        rank.write(CheckpointSaved(step=saved, path=f"checkpoints/step-{saved}", bytes=840_000, seconds=0.02))
        if ended:
            agent.write(NodeEnded(cause="completed"))
