"""What a drill hits, what it compares, and which specs it takes; without a run that trains."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.checkpoints import ELSEWHERE, end_run, make_checkpoints, make_run, small_objects
from helpers.fakeslurm import SlurmCommands

from slurmtrain.errors import RunBusy, SlurmDown, UserError
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.model.spec.spec import NAME_LIMIT
from slurmtrain.ops.drill import DrillOptions, drill
from slurmtrain.ops.shared import faults
from slurmtrain.ops.shared.checkpoints import loaded
from slurmtrain.ops.shared.compare import compare
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import Process, identify


def note_ranks(run: RunDir, node: int, ranks: dict[int, dict[str, Any]], *, host: str = "elsewhere") -> None:
    """Let the agent of a node, the first one of which is told of already, say which ranks it has started."""
    with Journal(AttemptDir(run.attempts / "1.0").node_journal(node)) as journal:
        if node:
            process = {**ELSEWHERE, "host": host, "pid": 50 + node}
            journal.write("agent", node=node, nodes=2, host=host, process=process, executor="local", submission=1)
        if ranks:
            journal.write("workers", processes={str(rank): one for rank, one in ranks.items()}, resume_from=None)


def known(workspace: Workspace, run: RunDir, executor: str = "local") -> Run:
    return replace(loaded(workspace, run.id), executor=executor)


# --- whom a fault hits ------------------------------------------------------------------------------------------------


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes to send signals to."""
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def who(process: subprocess.Popen[bytes]) -> Process:
    found = identify(process.pid)
    assert found is not None
    return found


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
def test_a_fault_here_hits_whom_it_is_meant_for(
    workspace: Workspace,
    sleepers: list[subprocess.Popen[bytes]],
    name: str,
    agent_ends_by: signal.Signals | None,
    rank_ends_by: signal.Signals | None,
) -> None:
    agent, rank = sleepers
    run = make_run(workspace.root.path, process=who(agent).to_dict())
    note_ranks(run, 0, {0: who(rank).to_dict()})
    hit = faults.inject(workspace, known(workspace, run), name)
    assert (hit.fault, hit.attempt, hit.restarts) == (name, "1.0", 0)
    for process, expected in ((agent, agent_ends_by), (rank, rank_ends_by)):
        if expected is not None:
            assert process.wait(60) == -expected
        else:
            assert process.poll() is None


def test_a_hang_stops_a_rank_that_can_go_on(workspace: Workspace, sleepers: list[subprocess.Popen[bytes]]) -> None:
    agent, rank = sleepers
    run = make_run(workspace.root.path, process=who(agent).to_dict())
    note_ranks(run, 0, {0: who(rank).to_dict()})
    faults.inject(workspace, known(workspace, run), "hang")
    assert os.WIFSTOPPED(os.waitpid(rank.pid, os.WUNTRACED)[1])


def test_who_has_ended_or_is_elsewhere_is_not_hit(
    workspace: Workspace, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    agent, rank = sleepers
    run = make_run(workspace.root.path, process=who(agent).to_dict())
    with pytest.raises(RunBusy, match="does not train"):
        faults.inject(workspace, known(workspace, run), "rank")
    note_ranks(run, 0, {0: {**who(rank).to_dict(), "start": 1}})
    with pytest.raises(RunBusy, match="rank 0 had ended"):
        faults.inject(workspace, known(workspace, run), "rank")
    note_ranks(run, 0, {0: ELSEWHERE})
    with pytest.raises(UserError, match="drill there"):
        faults.inject(workspace, known(workspace, run), "rank")


@pytest.fixture
def two_nodes(workspace: Workspace) -> RunDir:
    run = make_run(workspace.root.path)
    note_ranks(run, 0, {0: {**ELSEWHERE, "pid": 10}, 1: {**ELSEWHERE, "pid": 11}})
    note_ranks(run, 1, {2: {**ELSEWHERE, "pid": 12}, 3: {**ELSEWHERE, "pid": 13}}, host="other")
    return run


@pytest.mark.parametrize(("name", "number"), [("preempt", "TERM"), ("timeout", "USR2")])
def test_what_is_announced_reaches_the_steps_of_the_job(
    workspace: Workspace, slurm: SlurmCommands, two_nodes: RunDir, name: str, number: str
) -> None:
    hit = faults.inject(workspace, known(workspace, two_nodes, "slurm"), name)
    assert [call.args for call in slurm.calls("scancel")] == [[f"--signal={number}", "1"]]
    assert hit.on == "all 2 agents"


@pytest.mark.parametrize(
    ("name", "nodes", "number", "words"),
    [
        ("rank", "other", "KILL", ["other:13"]),
        ("hang", "other", "STOP", ["other:13"]),
        ("agent", "other", "KILL", ["other:51"]),
        ("all", "elsewhere,other", "KILL", ["elsewhere:10,11,5", "other:12,13,51"]),
    ],
)
def test_what_is_not_is_done_by_a_step_inside_the_job(
    workspace: Workspace, slurm: SlurmCommands, two_nodes: RunDir, name: str, nodes: str, number: str, words: list[str]
) -> None:
    faults.inject(workspace, known(workspace, two_nodes, "slurm"), name)
    [call] = slurm.calls("srun")
    assert {"--jobid=1", "--overlap", f"--nodelist={nodes}", f"--nodes={len(words)}"} <= set(call.args)
    assert call.args[-1 - len(words) :] == [number, *words]
    assert slurm.calls("scancel") == []


def test_a_spare_node_has_no_rank_to_hit_and_its_agent_dies_with_all(
    workspace: Workspace, slurm: SlurmCommands
) -> None:
    run = make_run(workspace.root.path)
    note_ranks(run, 0, {0: {**ELSEWHERE, "pid": 10}})
    note_ranks(run, 1, {}, host="spare")
    for name in ("agent", "all"):
        faults.inject(workspace, known(workspace, run, "slurm"), name)
    assert [call.args[-2:] for call in slurm.calls("srun")] == [["KILL", "elsewhere:5"], ["elsewhere:10,5", "spare:51"]]


def test_a_run_is_not_hit_before_all_of_it_is_known(workspace: Workspace) -> None:
    run = make_run(workspace.root.path)
    note_ranks(run, 1, {2: {**ELSEWHERE, "pid": 12}}, host="other")
    place = faults.place_of(workspace, known(workspace, run))
    assert place is not None
    assert not place.complete
    note_ranks(run, 0, {0: ELSEWHERE, 1: ELSEWHERE})
    place = faults.place_of(workspace, known(workspace, run))
    assert place is not None
    assert place.complete


def test_a_step_that_cannot_be_started_is_told_but_where_it_dies_with_its_job(
    workspace: Workspace, slurm: SlurmCommands, two_nodes: RunDir
) -> None:
    slurm.fails("srun", "srun: error: Unable to create step")
    run = known(workspace, two_nodes, "slurm")
    with pytest.raises(SlurmDown, match="Unable to create step"):
        faults.inject(workspace, run, "rank")
    assert faults.inject(workspace, run, "all").on == "all of its processes"


def test_on_a_node_its_own_processes_alone_are_signalled(sleepers: list[subprocess.Popen[bytes]]) -> None:
    mine, others = sleepers
    words = [f"n10:{others.pid}", f"n1:{mine.pid}"]
    subprocess.run(["sh", "-c", faults._ON_A_NODE, "sh", "KILL", *words], env={"SLURMD_NODENAME": "n1"}, check=True)
    assert mine.wait(60) == -signal.SIGKILL
    assert others.poll() is None


# --- what runs have left ----------------------------------------------------------------------------------------------


def two_runs(workspace: Workspace, tmp_path: Path, change: float = 0.0, step: int = 10) -> tuple[Run, Run]:
    """Two runs that have saved the same model; the second with one weight that differs by ``change``."""
    torch.manual_seed(5)
    objects = small_objects()
    found = []
    for index in range(2):
        run = make_run(tmp_path / f"made-{index}")
        target = workspace.root.run(f"0123456{index}89")
        target.path.parent.mkdir(exist_ok=True)
        run.path.rename(target.path)
        if index:
            with torch.no_grad():
                objects["model"][0].weight[1, 2] += change
        make_checkpoints(target, [step if index else 10], objects=objects, at_step=lambda *_: None)
        end_run(target, "completed")
        found.append(loaded(workspace, target.id))
    return found[0], found[1]


def test_runs_that_hold_the_same_are_identical_though_their_random_states_differ(
    workspace: Workspace, tmp_path: Path
) -> None:
    import random

    one, other = two_runs(workspace, tmp_path)
    random.seed()
    found = compare(workspace, one, other)
    assert (found.identical, found.difference) == (True, None)


def test_the_largest_difference_is_told_with_its_place(workspace: Workspace, tmp_path: Path) -> None:
    one, other = two_runs(workspace, tmp_path, change=1e-3)
    found = compare(workspace, one, other)
    assert (found.identical, found.how, found.where) == (False, "values", "model.0.weight")
    assert found.difference is not None
    assert 0 < found.difference < 0.1


def test_checkpoints_of_other_steps_are_not_compared(workspace: Workspace, tmp_path: Path) -> None:
    found = compare(workspace, *two_runs(workspace, tmp_path, step=11))
    assert (found.identical, found.why) == (None, "they are of steps 10 and 11")


def test_a_run_without_a_checkpoint_cannot_be_compared(workspace: Workspace, tmp_path: Path) -> None:
    one, other = two_runs(workspace, tmp_path)
    for path in workspace.root.run(other.id).checkpoints.iterdir():
        path.rename(tmp_path / path.name)
    found = compare(workspace, one, other)
    assert found.identical is None
    assert "has left no checkpoint" in found.why


@pytest.mark.parametrize(("text", "identical"), [("same", True), ("other", False)])
def test_the_files_of_a_script_of_its_own_kind_are_compared(
    workspace: Workspace, tmp_path: Path, text: str, identical: bool
) -> None:
    runs = []
    for index, said in enumerate(("same", text)):
        run = make_run(tmp_path / f"made-{index}", glob="{checkpoint_dir}/ckpt-*")
        target = workspace.root.run(f"0123456{index}89")
        target.path.parent.mkdir(exist_ok=True)
        run.path.rename(target.path)
        (target.checkpoints / "ckpt-5").mkdir()
        (target.checkpoints / "ckpt-5" / "weights").write_text(said)
        runs.append(loaded(workspace, target.id))
    found = compare(workspace, *runs)
    assert (found.identical, found.how) == (identical, "files")


def test_an_object_of_a_rank_that_differs_is_told() -> None:
    from slurmtrain.ops.shared.compare import _differing

    one = {"cursor": [1, float("nan")], "mean": torch.zeros(2)}
    assert list(_differing(one, {"cursor": [1, float("nan")], "mean": torch.zeros(2)}, "x")) == []
    assert list(_differing(one, {"cursor": [2, float("nan")], "mean": torch.ones(2)}, "x")) == ["x.cursor.0", "x.mean"]


# --- which specs it takes ---------------------------------------------------------------------------------------------


def order(tmp_path: Path, **keys: Any) -> DrillOptions:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump({"name": "n" * NAME_LIMIT, "command": "true", **keys}))
    return DrillOptions(path=path, executor="local")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"checkpoint": {"glob": "out/ckpt-*.pt"}}, "begin the pattern with {checkpoint_dir}"),
        ({"params": {"a": 1}, "sweep": {"params.a": [1, 2]}}, "sweep of 2 runs"),
    ],
)
def test_specs_whose_runs_cannot_be_told_apart_are_refused_with_nothing_made(
    workspace: Workspace, tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as refused:
        drill(workspace, order(tmp_path, **keys), lambda _: None, lambda _: None)
    assert said in str(refused.value)
    assert not workspace.root.path.exists()


def test_runs_are_named_for_what_happens_to_them_and_hang_is_tried_where_it_is_asked_for(tmp_path: Path) -> None:
    from slurmtrain.ops.drill import _Planned

    planned = _Planned.of(order(tmp_path, requeue={"hang_after": 20}))
    assert list(planned.specs) == ["reference", "preempt", "timeout", "rank", "agent", "all", "hang"]
    names = [spec.runs[0].plan.spec.name for spec in planned.specs.values()]
    assert all(len(name) == NAME_LIMIT for name in names)
    assert [name.rpartition("-drill-")[2] for name in names] == list(planned.specs)
    assert "hang" not in _Planned.of(order(tmp_path)).specs
    assert list(_Planned.of(replace(order(tmp_path), faults=["hang", "hang"], twice=True)).specs) == [
        "reference", "again", "hang",
    ]  # fmt: skip
