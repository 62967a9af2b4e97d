"""What a node notes of its environment."""

from __future__ import annotations

import sys
from pathlib import Path

from slurmtrain.model.environment import Software
from slurmtrain.model.experiment.plan import make_plan
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.run.events.agent_events import EnvironmentNoted
from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.preflight.facts.environment_facts import NotedNode, measure_environment, note_environment
from slurmtrain.system.journal import Journal


def noted_node(run: RunDir, number: int = 0, **environ: str) -> NotedNode:
    run.path.mkdir(exist_ok=True)
    plan, _ = make_plan(Spec(name="n", command="x"), workdir="/w", python=sys.executable, template={})
    return NotedNode(run, number, plan, environ)


def test_a_node_notes_its_versions_machine_and_variables_and_the_packages_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "0123456789")
    variables = {"NCCL_DEBUG": "WARN", "NCCL_API_KEY": "abc", "HOME": "/root", "PYTHONPATH": f"{run.path}/code/x"}
    first, other = (measure_environment(noted_node(run, node, **variables)) for node in (0, 1))
    assert first.variables == {
        "NCCL_API_KEY": "<redacted>", "NCCL_DEBUG": "WARN", "PYTHONPATH": "{run_dir}/code/x",
    }  # fmt: skip
    assert {"python", "torch"} <= first.versions.keys()
    assert {"cpu", "cores", "kernel"} <= first.machine.keys()
    assert (first.software, first.machine) == (other.software, other.machine)
    [listed] = run.software("x").parent.iterdir()
    assert Software.from_text(listed.read_text()).hash == first.software == listed.stem
    assert EnvironmentNoted.from_json(first.to_json()) == first


def test_an_environment_that_cannot_be_noted_ends_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "0123456789")
    node = noted_node(run)
    run.path.rmdir()
    with Journal(tmp_path / "node-0.jsonl") as journal:
        note_environment(journal, node).join(60)
    assert not run.path.exists()
    assert not (tmp_path / "node-0.jsonl").exists()
