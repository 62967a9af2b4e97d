"""Runs without a job, with real checkpoints, saved by the library itself in one or several processes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from helpers.simulated_run import ELSEWHERE, SimulatedRun
from slurmtrain.model.experiment.checkpoint import KeepSpec
from slurmtrain.model.run.events.agent_events import NodeEnded
from slurmtrain.model.run.journal_lines import payload_classes
from slurmtrain.model.run.layout import AttemptDir, RunDir, RunsRoot, checkpoint_name, run_id
from slurmtrain.runtime.checkpoint.saver import PublishPolicy, Save, Saver
from slurmtrain.runtime.checkpoint.state_dicts import Objects, Stateful
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.specfile import load_spec
from slurmtrain.system.files import write_json
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import this_process

ATTEMPT = "1.0"
_ALL = KeepSpec(last=1000)


# --- runs -------------------------------------------------------------------------------------------------------------


def make_run(
    runs: Path, *, attempt: str = ATTEMPT, process: Mapping[str, Any] = ELSEWHERE, **checkpoint: Any
) -> RunDir:
    """The directory of a local run in training, with a plan. ``checkpoint``: that section of its spec."""
    directory = RunsRoot(runs).run(run_id(1_700_000_000_000, 7))
    directory.path.mkdir(parents=True)
    spec = directory.path / "spec.yaml"
    spec.write_text(yaml.safe_dump({"name": "digits", "command": "python train.py", "checkpoint": checkpoint}))
    [planned] = load_spec(spec, cwd=runs, python="/usr/bin/python3").runs
    write_json(directory.plan, planned.plan.to_json())
    job, _, restart = attempt.rpartition(".")
    # Before anything that the test journals with the current time.
    run = SimulatedRun(directory, executor="local", job=job, now=time.time() - 60)
    run.created(name="digits", plan_hash="h", by="me").submitted(process=process, host=process["host"])
    run.started(int(restart), host=process["host"], process=dict(process))
    return directory


def gone() -> dict[str, Any]:
    """A process of this machine that has ended."""
    me = this_process()
    return {**me.to_dict(), "host": socket.gethostname(), "start": me.start + 1}


def end_run(run: RunDir, cause: str = "crash", *, reason: str = "", attempt: str = ATTEMPT) -> None:
    """Journal the end of a run's agent, with its reason."""
    with Journal(AttemptDir(run.attempts / attempt).node_journal(0)) as journal:
        journal.write(NodeEnded(cause=cause, reason=reason))


def write_rank_event(run: RunDir, kind: str, *, attempt: str = ATTEMPT, **fields: Any) -> None:
    """Write an event into rank 0's journal."""
    with Journal(AttemptDir(run.attempts / attempt).rank_journal(0)) as journal:
        event = payload_classes()[kind].from_json(fields)
        assert event is not None
        journal.write(event)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def small_objects() -> dict[str, Any]:
    """A model and its optimizer, which already has state."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def fill(objects: Mapping[str, Any], step: int) -> None:
    """Give every parameter of every module the value of the step, so that a checkpoint can be distinguished."""
    with torch.no_grad():
        for module in objects.values():
            for parameter in module.parameters() if isinstance(module, nn.Module) else ():
                parameter.fill_(float(step))


def make_checkpoints(
    run: RunDir,
    steps: Sequence[int],
    *,
    objects: Mapping[str, Stateful] | None = None,
    at_step: Callable[[Mapping[str, Any], int], None] = fill,
    metrics: Mapping[int, Mapping[str, float]] | None = None,
    keep: KeepSpec = _ALL,
    attempt: str = ATTEMPT,
    ranks: RankGroup | None = None,
    journaled: bool = True,
) -> list[Path]:
    """Save these steps as an attempt's ranks do; return the checkpoints' directories, in the order of ``steps``.

    ``at_step`` changes the objects before each save; ``metrics``: the latest ones, by step. ``ranks``: this process
    among those that save together, by default alone. ``journaled``: whether rank 0 journals its saves. The attempt
    gets the run's lease.
    """
    objects = small_objects() if objects is None else objects
    ranks = ranks or RankGroup(0, 1, torch.device("cpu"))
    place = AttemptDir(run.attempts / attempt)
    for folder in (place.path, run.checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    journal = None
    if ranks.rank == 0:
        write_json(run.lease, {"submission": 1, "attempt": attempt})
        journal = Journal(place.rank_journal(0) if journaled else run.path / "elsewhere.jsonl")
    saver = Saver(place, Objects(objects), PublishPolicy(keep=keep, plan_hash="h"), ranks, journal)
    for step in steps:
        at_step(objects, step)
        problem = saver.begin(Save(step=step, why="steps", metrics=(metrics or {}).get(step, {})))
        outcome = None if problem else saver.finish()
        assert outcome is not None, problem
        assert not outcome.problem, outcome.problem
    saver.close(failed=False)
    if journal is not None:
        journal.close()
    return [run.checkpoints / checkpoint_name(step) for step in steps]


# --- by several ranks -------------------------------------------------------------------------------------------------


def train_alike(model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    """Train a model, wrapped or not, on the same data on all ranks, so that the result is the same too."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.linspace(0, 1, 24).reshape(6, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return optimizer


def seeded_model() -> nn.Module:
    """The same model on every call; its rows are not a multiple of two, so that shards differ in size."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3))


def make_checkpoints_by_ranks(run: RunDir, strategies: Mapping[int, str], world_size: int = 2) -> None:
    """Train and save :func:`seeded_model` in that many processes. ``strategies``: by step, ``ddp`` or ``fsdp2``."""
    meeting = run.path / "meeting"
    # Torch is imported once for all of them.
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "slurmtrain.runtime.checkpoint.saver"])
    torch.multiprocessing.start_processes(
        _save_as_rank, (run, dict(strategies), world_size, meeting), nprocs=world_size, start_method="forkserver"
    )


def _save_as_rank(rank: int, run: RunDir, strategies: Mapping[int, str], world_size: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    # Otherwise gloo resolves this machine's host name, whatever it resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    for step, strategy in strategies.items():
        model: nn.Module = seeded_model()
        if strategy == "fsdp2":
            fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        else:
            model = DistributedDataParallel(model)
        objects = {"model": model, "optimizer": train_alike(model)}
        ranks = RankGroup(rank, world_size, torch.device("cpu"))
        make_checkpoints(run, [step], objects=objects, at_step=_as_it_is, ranks=ranks)
        ranks.close()
    dist.barrier()
    dist.destroy_process_group()


def _as_it_is(_objects: Mapping[str, Any], _step: int) -> None:
    """For objects that are saved exactly as they were trained."""
