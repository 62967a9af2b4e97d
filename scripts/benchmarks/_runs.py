"""Run directories as left by submit, agents and sessions, written by the same modules but without fsyncs."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def make_runs(root: Path, *, ended: int, jobs: Sequence[str] = (), sweep: str | None = None) -> None:
    """This many ended local runs, of this sweep if there is one, and a newer one that is pending for each Slurm job."""
    [planned] = load(SPEC, [f"params.steps={STEPS}"], []).runs
    spec, plan = SPEC.read_text(), json.dumps(planned.plan.to_json(), indent=1)
    now_ms, numbers = time.time_ns() // 1_000_000, random.Random(0)
    count = ended + len(jobs)
    for index in range(count):
        run = RunsRoot(root).run(run_id(now_ms - (count - index) * 60_000, numbers.getrandbits(10)))
        submission = run.submission(1)
        for folder in (run.journals, run.attempts, run.checkpoints, submission.path):
            folder.mkdir(mode=DIRECTORY_MODE, parents=True)
        run.spec.write_text(spec)
        for path in (run.plan, submission.plan):
            path.write_text(plan)
        if index < ended:
            _write_submitted(run, planned.plan, f"local-{run.id[-6:]}", "local", sweep)
            _write_ended(run)
        else:
            _write_submitted(run, planned.plan, jobs[index - ended], "slurm")


def _write_submitted(run: RunDir, plan: Plan, job_id: str, executor: str, sweep: str | None = None) -> None:
    settings = run_settings(plan)
    # Every run has a learning rate of its own, so that a column shows what differs.
    settings["params"] = {**settings["params"], "lr": round(int(run.id[-4:], 36) / 36**4, 4)}
    with Journal(run.journals / "created.jsonl", durable=False) as journal:
        journal.write(
            RunCreated(
                name=plan.spec.name, plan_hash=plan.hash, executor=executor, by="bench@here", sweep=sweep, **settings
            )
        )
    of_local = {"job_id": job_id} if executor == "local" else {}
    with Journal(run.journals / "submit.jsonl", durable=False) as journal:
        journal.write(Submitting(submission=1, attempt=1, executor=executor, host=this_process().host, **of_local))
        journal.write(Submitted(submission=1, job_id=job_id, process=_ended() if of_local else None))


def _ended() -> dict[str, Any]:
    """A process that is never found alive: none of this boot started at its first clock tick."""
    bench = this_process()
    return Process(bench.host, bench.boot, bench.pid, 1).to_dict()


def _write_ended(run: RunDir) -> None:
    """One attempt on this machine that has ended."""
    process = _ended()
    attempt = run.attempt(f"local-{run.id[-6:]}", 0)
    attempt.path.mkdir(mode=DIRECTORY_MODE)
    with (
        Journal(attempt.node_journal(0), durable=False) as agent,
        Journal(attempt.rank_journal(0), durable=False) as rank,
    ):
        agent.write(AgentStarted(node=0, nodes=1, host=process["host"], process=process, submission=1, attempt=1))
        agent.write(RendezvousReady(node=0, master_addr="127.0.0.1", master_port=29500, interface="lo"))
        agent.write(WorkersStarted(processes={"0": process, "1": process}))
        rank.write(SessionStarted(step=0, world_size=2, device="cpu"))
        rank.write(TrainingStarted(total_steps=STEPS))
        metrics = MetricsFile(attempt.metrics)
        for step in range(1, STEPS + 1):
            metrics.write(step, {"loss": 2.3 / step, "lr": 0.05, "test_accuracy": 1 - 0.5 / step})
        metrics.close()
        rank.write(CheckpointSaved(step=STEPS, path=f"checkpoints/step-{STEPS}", bytes=840_000, seconds=0.02))
        agent.write(NodeEnded(cause="completed"))
