"""What attempts had on their nodes, from journals and the run's directory, and what differed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.fakeslurm import FakeScheduler
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.workspaces import make_workspace

from slurmtrain.cli.status_commands import print_run
from slurmtrain.model.environment import Package, Software
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.run_details import newest_environment, show_json
from slurmtrain.ops.shared.workspace import Workspace

MACHINE = {"cpu": "EPYC", "cores": "64"}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path, FakeScheduler())


def kept(directory: RunDir, torch: str) -> str:
    """The hash of an environment with this version of torch, which the run's directory has."""
    software = Software("/venv/bin/python", "3.11", {"torch": Package(torch)})
    directory.software("x").parent.mkdir(exist_ok=True)
    directory.software(software.hash).write_text(software.to_text())
    return software.hash


def note(run: SimulatedRun, node: int, software: str, **fields: Any) -> None:
    facts = {"versions": {"python": "3.11"}, "machine": MACHINE, "variables": {}, **fields}
    run.node("environment", node, node=node, software=software, **facts)


def facts_of(workspace: Workspace) -> dict[str, Any]:
    observed = observe(workspace, ask_slurm=False)
    loaded = workspace.store.load(RUN_ID)
    assert loaded is not None
    return show_json(workspace, observed.runs[RUN_ID], loaded)


def test_show_says_what_a_later_attempt_had_that_the_first_had_not(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = workspace.root.run(RUN_ID)
    run = SimulatedRun(directory, spec={}).created().submitted().started(nodes=2)
    old, new = kept(directory, "2.12"), kept(directory, "2.13")
    note(run, 0, old)
    note(run, 1, old)
    run.later(10).stopped()
    run.job = "8"
    run.submitted(2).started(nodes=2, submission=2)
    note(run, 0, new, machine={**MACHINE, "cpu": "Xeon"})
    note(run, 1, old)
    facts = facts_of(workspace)
    first, second = (attempt["environment_changes"] for attempt in facts["attempts"])
    assert first == []
    assert second == [
        "packages differ from the first attempt: torch 2.12 -> 2.13",
        "machines differ from the first attempt: nodes 2 x (EPYC, 64 cores) -> 1 x (EPYC, 64 cores); "
        "1 x (Xeon, 64 cores)",
        "packages on node 1 differ from node 0: torch 2.13 -> 2.12",
    ]
    print_run(facts)
    assert "  environ   packages differ from the first attempt: torch 2.12 -> 2.13" in capsys.readouterr().out


def test_without_notes_of_nodes_there_is_what_it_was_submitted_from(workspace: Workspace) -> None:
    directory = workspace.root.run(RUN_ID)
    SimulatedRun(directory, spec={}).created().submitted().started()
    directory.environment.write_text("# /venv/bin/python, Python 3.11\ntorch==2.12\n")
    facts_of(workspace)
    loaded = workspace.store.load(RUN_ID)
    assert loaded is not None
    environment = newest_environment(workspace, loaded)
    assert environment.software == Software("/venv/bin/python", "3.11", {"torch": Package("2.12")})


@pytest.mark.parametrize("name", ["../../x", "", "missing"])
def test_a_list_of_packages_that_is_not_there_is_not_known(workspace: Workspace, name: str) -> None:
    directory = workspace.root.run(RUN_ID)
    run = SimulatedRun(directory, spec={}).created().submitted().started()
    note(run, 0, name)
    facts_of(workspace)
    loaded = workspace.store.load(RUN_ID)
    assert loaded is not None
    assert newest_environment(workspace, loaded).software is None
