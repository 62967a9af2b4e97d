"""Submitting to Slurm: what it costs, what a person is told, and a run that only checks its nodes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.fakeslurm import SlurmCommands
from helpers.simulated_run import RUN_ID, SimulatedRun, make_test_plan
from helpers.workspaces import submit

from slurmtrain.errors import PathError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.ops.preflight import submit_preflight
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.command_script import check_script


@pytest.fixture
def slurm(slurm: SlurmCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    monkeypatch.chdir(tmp_path)
    return slurm


def calls(slurm: SlurmCommands) -> dict[str, int]:
    return {name: len(slurm.calls(name)) for name in ("scontrol", "sinfo", "sbatch") if slurm.calls(name)}


def script(workspace: Workspace) -> str:
    """The batch script of the only job array."""
    [path] = workspace.root.arrays.glob("*/submitit/8_submission.sh")
    return path.read_text()


def plan_of(workspace: Workspace, run_id: str) -> Plan:
    return Plan.from_json(json.loads(workspace.root.run(run_id).plan.read_text()))


def blame(workspace: Workspace, host: str) -> None:
    """A run that no command has read yet, and that has found something against a node."""
    run = SimulatedRun(workspace.root.run(RUN_ID), now=time.time()).created().started(host=host)
    run.node("preflight", blamed=True, findings=[{"check": "disk", "status": "fail", "summary": "no room"}])


def test_a_sweep_asks_for_partitions_once_where_nothing_is_known_against_any_node(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    submit(workspace, spec, sweep=["params.a=1,2,3"], executor="slurm")
    assert calls(slurm) == {"scontrol": 2, "sbatch": 1}
    assert "--exclude" not in script(workspace)


def test_what_another_run_has_just_found_counts_and_costs_one_question_more(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    blame(workspace, "n1")
    run_ids, notes, _ = submit(workspace, spec, sweep=["params.a=1,2,3"], executor="slurm")
    assert calls(slurm) == {"scontrol": 2, "sinfo": 1, "sbatch": 1}
    assert "#SBATCH --exclude=n1\n" in script(workspace)
    assert [note for note in notes if "excluded" in note] == [
        "excluded, because a preflight failed there: n1 (disk: no room, 0 min ago); 'slurmtrain nodes' shows more"
    ]
    [journal] = workspace.root.run(run_ids[0]).journals.glob("submit-*.jsonl")
    assert '"without":["n1"]' in journal.read_text()


@pytest.mark.parametrize("where", ["environment", "spec"])
def test_obsolete_variables_are_pointed_out(
    workspace: Workspace, slurm: SlurmCommands, spec: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "environment":
        monkeypatch.setenv("NCCL_TREE_THRESHOLD", "0")
    overrides = ["env.NCCL_TREE_THRESHOLD=0"] if where == "spec" else []
    _, notes, _ = submit(workspace, spec, overrides, executor="slurm")
    assert [note for note in notes if note.startswith("NCCL_TREE_THRESHOLD has no effect since NCCL 2.5")]
    assert len(slurm.calls("sbatch")) == 1


# --- checks alone -------------------------------------------------------------------------------------------------


def test_a_preflight_alone_is_a_short_run_that_does_nothing_and_leaves_no_node_out(
    workspace: Workspace, slurm: SlurmCommands
) -> None:
    blame(workspace, "n1")
    run_id, _ = submit_preflight(workspace, None, ["preflight.dns=off"], nodes=3, executor="slurm")
    plan = plan_of(workspace, run_id)
    assert (plan.spec.name, Path(plan.spec.command).name) == ("preflight", "true")
    assert (plan.spec.resources.nodes.to_dict(), plan.spec.resources.time) == (3, 600)
    assert (plan.spec.preflight.exclude, plan.spec.preflight.dns.level) == (False, "off")
    assert not plan.spec.requeue.enabled
    assert not plan.spec.tracking.mlflow.enabled
    assert calls(slurm) == {"scontrol": 1, "sbatch": 1}


def test_a_preflight_of_a_spec_takes_what_it_says_of_nodes_and_checks(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    spec.write_text(
        "name: big\ncommand: python -c pass {resume_from}\n"
        "params: {lr: 1}\nresources: {nodes: 2, cpus_per_proc: 4, time: '2-00'}\nslurm: {partition: spot}\n"
        "preflight: {shm: {level: fail, min_gb: 8}}\ncheckpoint: {glob: 'x-*.pt'}\nenv: {A: b, HUB_TOKEN: hunter2}\n"
        "setup: [module load cuda]\nsweep: {params.lr: [1, 2]}\n"
    )
    run_id, _ = submit_preflight(workspace, spec, ["slurm.qos=high"], nodes=None, executor="slurm")
    submitted_spec = plan_of(workspace, run_id).spec
    assert (submitted_spec.name, submitted_spec.params, submitted_spec.checkpoint.glob) == ("preflight", {}, None)
    resources = submitted_spec.resources
    assert (resources.nodes.to_dict(), resources.cpus_per_proc, resources.time) == (2, 4, 600)
    assert (submitted_spec.slurm, submitted_spec.setup) == ({"partition": "spot", "qos": "high"}, ("module load cuda",))
    assert (submitted_spec.preflight.shm.level, submitted_spec.preflight.shm.min_gb) == ("fail", 8)
    [call] = slurm.calls("sbatch")
    assert (submitted_spec.env["A"], call.env["HUB_TOKEN"]) == ("b", "hunter2")
    run = workspace.root.run(run_id)
    assert not any(b"hunter2" in path.read_bytes() for path in run.path.rglob("*") if path.is_file())


# --- scripts that are not there ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python trian.py --lr 1", "there is no script {dir}/trian.py; did you mean 'train.py'?"),
        (
            "python3 -u scripts/other.py",
            "there is no script {dir}/scripts/other.py; paths in 'command' are relative to",
        ),
    ],
)
def test_a_script_that_is_not_there_is_told_before_anything_is_created(
    workspace: Workspace, spec: Path, monkeypatch: pytest.MonkeyPatch, command: str, message: str
) -> None:
    monkeypatch.chdir(spec.parent)
    (spec.parent / "train.py").touch()
    spec.write_text(f"command: {command}\n")
    with pytest.raises(PathError) as raised:
        submit(workspace, spec, executor="local")
    assert message.format(dir=spec.parent) in str(raised.value)
    assert workspace.run_ids() == []


@pytest.mark.parametrize(
    "command",
    [
        "python -m json.tool",
        "python -c train.py",
        "python {script}.py",
        "bash train.py",
        "python -X dev gone.py",
        "python gone",
    ],
)
def test_what_python_runs_is_not_guessed(command: str, tmp_path: Path) -> None:
    check_script(in_directory(tmp_path, command=command), "local")
    # Lines of setup may make a script.
    check_script(in_directory(tmp_path, command="python gone.py", setup=["cd /elsewhere"]), "local")


def in_directory(path: Path, **keys: Any) -> Plan:
    return replace(make_test_plan(**keys), workdir=str(path))
