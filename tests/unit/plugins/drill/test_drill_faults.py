"""Which processes a fault hits, on this machine and on Slurm's nodes; without a run that trains."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from helpers.checkpoints import make_run
from helpers.fakeslurm import SlurmCommands
from helpers.simulated_run import ELSEWHERE

from slurmtrain.errors import RunBusy, SlurmDown, UserError
from slurmtrain.model.run.events.agent_events import AgentStarted, WorkersStarted
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.drill import faults
from slurmtrain.plugins.drill.faults import SaveWatch
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import Process, identify


def note_ranks(run: RunDir, node: int, ranks: dict[int, dict[str, Any]], *, host: str = "elsewhere") -> None:
    """Journal the ranks that the agent of a node has started, and its own start unless ``make_run`` did: node 0's."""
    with Journal(AttemptDir(run.attempts / "1.0").node_journal(node)) as journal:
        if node:
            process = {**ELSEWHERE, "host": host, "pid": 50 + node}
            fields = {"node": node, "nodes": 2, "host": host, "process": process, "submission": 1, "attempt": 1}
            journal.write(AgentStarted(**fields, executor="local"))
        if ranks:
            journal.write(WorkersStarted(processes={str(rank): ranks[rank] for rank in ranks}))


def load_run(workspace: Workspace, run: RunDir, executor: str = "local") -> Run:
    return replace(observe_run(workspace, run.id, ask_slurm=False), executor=executor)


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes to send signals to."""
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def identity(process: subprocess.Popen[bytes]) -> Process:
    process_identity = identify(process.pid)
    assert process_identity is not None
    return process_identity


@pytest.mark.parametrize(
    ("name", "agent_ends_by", "rank_ends_by"),
    [
        ("preempt", signal.SIGTERM, None),
        ("timeout", signal.SIGUSR2, None),
        ("agent", signal.SIGKILL, None),
        ("rank", None, signal.SIGKILL),
        ("all", signal.SIGKILL, signal.SIGKILL),
    ],
)
def test_a_local_fault_hits_its_target_and_no_other_process(
    workspace: Workspace,
    sleepers: list[subprocess.Popen[bytes]],
    name: str,
    agent_ends_by: signal.Signals | None,
    rank_ends_by: signal.Signals | None,
) -> None:
    agent, rank = sleepers
    run = make_run(workspace.root.path, process=identity(agent).to_dict())
    note_ranks(run, 0, {0: identity(rank).to_dict()})
    hit = faults.inject(workspace, load_run(workspace, run), name)
    assert (hit.fault, hit.attempt, hit.restarts) == (name, "1.0", 0)
    for process, expected in ((agent, agent_ends_by), (rank, rank_ends_by)):
        if expected is not None:
            assert process.wait(60) == -expected
        else:
            assert process.poll() is None


def test_all_ranks_are_killed_as_soon_as_a_save_is_under_way(
    workspace: Workspace, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    agent, rank = sleepers
    run = make_run(workspace.root.path, process=identity(agent).to_dict())
    note_ranks(run, 0, {0: identity(rank).to_dict()})
    watch = SaveWatch(None, run.checkpoints)
    assert faults.inject_in_save(workspace, load_run(workspace, run), watch, timeout_s=0.1) is None
    assert rank.poll() is None
    half = run.checkpoints / ".1.0-step-5"
    half.mkdir(parents=True)
    hit = faults.inject_in_save(workspace, load_run(workspace, run), watch, timeout_s=60)
    assert (hit.fault, hit.target, hit.half_written) == ("save", "the rank", [str(half)])
    assert rank.wait(60) == -signal.SIGKILL
    assert agent.poll() is None


def test_in_slurm_the_process_groups_of_all_ranks_are_killed_in_a_save(
    workspace: Workspace, slurm: SlurmCommands, two_nodes: RunDir
) -> None:
    watch = SaveWatch(None, two_nodes.checkpoints)
    (two_nodes.checkpoints / ".1.0-step-5").mkdir(parents=True)
    faults.inject_in_save(workspace, load_run(workspace, two_nodes, "slurm"), watch, timeout_s=60)
    [call] = slurm.calls("srun")
    assert call.args[-3:] == ["KILL", "elsewhere:-10,-11", "other:-12,-13"]


def test_a_hang_stops_a_rank_without_ending_it(workspace: Workspace, sleepers: list[subprocess.Popen[bytes]]) -> None:
    agent, rank = sleepers
    run = make_run(workspace.root.path, process=identity(agent).to_dict())
    note_ranks(run, 0, {0: identity(rank).to_dict()})
    faults.inject(workspace, load_run(workspace, run), "hang")
    assert os.WIFSTOPPED(os.waitpid(rank.pid, os.WUNTRACED)[1])


def test_processes_that_have_ended_or_run_elsewhere_are_not_signalled(
    workspace: Workspace, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    agent, rank = sleepers
    run = make_run(workspace.root.path, process=identity(agent).to_dict())
    with pytest.raises(RunBusy, match="is not training"):
        faults.inject(workspace, load_run(workspace, run), "rank")
    note_ranks(run, 0, {0: {**identity(rank).to_dict(), "start": 1}})
    with pytest.raises(RunBusy, match="rank 0 had ended"):
        faults.inject(workspace, load_run(workspace, run), "rank")
    note_ranks(run, 0, {0: ELSEWHERE})
    with pytest.raises(UserError, match="drill there"):
        faults.inject(workspace, load_run(workspace, run), "rank")


@pytest.fixture
def two_nodes(workspace: Workspace) -> RunDir:
    run = make_run(workspace.root.path)
    note_ranks(run, 0, {0: {**ELSEWHERE, "pid": 10}, 1: {**ELSEWHERE, "pid": 11}})
    note_ranks(run, 1, {2: {**ELSEWHERE, "pid": 12}, 3: {**ELSEWHERE, "pid": 13}}, host="other")
    return run


@pytest.mark.parametrize(("name", "number"), [("preempt", "TERM"), ("timeout", "USR2")])
def test_an_announced_fault_is_sent_to_the_steps_of_the_job_by_scancel(
    workspace: Workspace, slurm: SlurmCommands, two_nodes: RunDir, name: str, number: str
) -> None:
    hit = faults.inject(workspace, load_run(workspace, two_nodes, "slurm"), name)
    assert [call.args for call in slurm.calls("scancel")] == [[f"--signal={number}", "1"]]
    assert hit.target == "all 2 agents"


@pytest.mark.parametrize(
    ("name", "nodes", "number", "pids"),
    [
        ("rank", "other", "KILL", ["other:13"]),
        ("hang", "other", "STOP", ["other:-13"]),
        ("agent", "other", "KILL", ["other:51"]),
        ("all", "elsewhere,other", "KILL", ["elsewhere:10,11,5", "other:12,13,51"]),
    ],
)
def test_an_unannounced_fault_is_sent_by_a_step_inside_the_job(
    workspace: Workspace, slurm: SlurmCommands, two_nodes: RunDir, name: str, nodes: str, number: str, pids: list[str]
) -> None:
    faults.inject(workspace, load_run(workspace, two_nodes, "slurm"), name)
    [call] = slurm.calls("srun")
    assert {"--jobid=1", "--overlap", f"--nodelist={nodes}", f"--nodes={len(pids)}"} <= set(call.args)
    assert call.args[-1 - len(pids) :] == [number, *pids]
    assert slurm.calls("scancel") == []


def test_a_step_that_fails_is_an_error_unless_it_may_have_died_with_its_job(
    workspace: Workspace, slurm: SlurmCommands, two_nodes: RunDir
) -> None:
    slurm.fails("srun", "srun: error: Unable to create step")
    run = load_run(workspace, two_nodes, "slurm")
    with pytest.raises(SlurmDown, match="Unable to create step"):
        faults.inject(workspace, run, "rank")
    assert faults.inject(workspace, run, "all").target == "all of its processes"


def test_a_step_signals_only_the_processes_of_its_own_node(sleepers: list[subprocess.Popen[bytes]]) -> None:
    local, remote = sleepers
    pids = [f"n10:{remote.pid}", f"n1:{local.pid}"]
    subprocess.run(["sh", "-c", faults._ON_A_NODE, "sh", "KILL", *pids], env={"SLURMD_NODENAME": "n1"}, check=True)
    assert local.wait(60) == -signal.SIGKILL
    assert remote.poll() is None
