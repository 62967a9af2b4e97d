"""Which runs a run comes from, and which come from it."""

from __future__ import annotations

from typing import Any

from helpers.simulated_run import SimulatedRun, make_test_plan

from slurmtrain.cli.status_commands import print_run
from slurmtrain.model.run.lineage import AFTER, FORK, RERUN, Parent
from slurmtrain.model.run.run import replace
from slurmtrain.ops.shared.observe import observe, rebuild
from slurmtrain.ops.shared.run_details import show_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.tracking.to_mlflow.sending import Origin, lasting_tags

PARENT, CHILD, OTHER = "0123456780", "0123456781", "0123456782"


def add(workspace: Workspace, run_id: str, *parents: Parent) -> SimulatedRun:
    """A run that has been submitted and comes from others."""
    created: dict[str, Any] = {"name": "digits", "executor": "slurm"}
    if parents:
        created["parents"] = [parent.to_dict() for parent in parents]
    run = SimulatedRun(workspace.root.run(run_id), job=run_id)
    return run.write("journal/created.jsonl", "created", **created).submitted()


def shown(workspace: Workspace, run_id: str) -> dict[str, Any]:
    observed = observe(workspace, ask_slurm=False)
    run = workspace.store.load(run_id)
    assert run is not None
    return show_json(workspace, observed.runs[run_id], run)


def test_a_run_names_where_it_comes_from_and_what_came_from_it_also_after_a_rebuild(
    workspace: Workspace, capsys: Any
) -> None:
    add(workspace, PARENT)
    add(workspace, CHILD, Parent(PARENT, FORK, 40), Parent(OTHER, AFTER))
    add(workspace, OTHER, Parent(PARENT, RERUN))
    for _ in range(2):
        runs = {run_id: shown(workspace, run_id) for run_id in (PARENT, CHILD, OTHER)}
        assert runs[PARENT]["parents"] == runs[CHILD]["children"] == []
        assert runs[PARENT]["children"] == [
            {"run": CHILD, "relation": "fork", "step": 40}, {"run": OTHER, "relation": "rerun", "step": None}
        ]  # fmt: skip
        assert runs[CHILD]["parents"] == [
            {"run": PARENT, "relation": "fork", "step": 40}, {"run": OTHER, "relation": "after", "step": None}
        ]  # fmt: skip
        assert runs[OTHER]["children"] == [{"run": CHILD, "relation": "after", "step": None}]
        print_run(runs[CHILD])
        assert f"fork of {PARENT} at step 40\n" in capsys.readouterr().out
        print_run(runs[PARENT])
        assert f"{CHILD} (fork at step 40), {OTHER} (rerun)" in capsys.readouterr().out
        rebuild(workspace)


def test_a_family_of_several_generations_is_a_tree(workspace: Workspace, capsys: Any) -> None:
    grandchild, rerun, gone = "0123456783", "0123456784", "0123456789"
    add(workspace, PARENT, Parent(gone, RERUN))
    add(workspace, CHILD, Parent(PARENT, FORK, 40))
    add(workspace, OTHER, Parent(PARENT, AFTER))
    add(workspace, grandchild, Parent(CHILD, FORK, 60), Parent(OTHER, AFTER))
    add(workspace, rerun, Parent(grandchild, RERUN))
    facts = shown(workspace, CHILD)
    tree = [(each["id"], each["depth"]) for each in facts["lineage"]]
    assert tree == [(gone, 0), (PARENT, 1), (CHILD, 2), (OTHER, 2), (grandchild, 3), (rerun, 4)]
    print_run(facts)
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("lineage") + 1 :][:6] == [
        f"  {gone}  deleted",
        f"    {PARENT}  digits  pending  rerun of {gone}",
        f"      {CHILD}  digits  pending  fork of {PARENT} at step 40  <",
        f"      {OTHER}  digits  pending  after {PARENT}",
        f"        {grandchild}  digits  pending  fork of {CHILD} at step 60; after {OTHER}",
        f"          {rerun}  digits  pending  rerun of {grandchild}",
    ]


def test_mlflow_is_told_where_a_run_comes_from_without_nesting_it() -> None:
    run, spec = SimulatedRun().submitted().run, make_test_plan().spec
    assert not any("parent" in tag for tag in lasting_tags(run, Origin(), spec, "/r"))
    parents = [Parent(PARENT, FORK, 40).to_dict(), Parent(OTHER, AFTER).to_dict()]
    tags = lasting_tags(replace(run, parents=parents), Origin(), spec, "/r")
    assert tags["slurmtrain.parents"] == f"fork of {PARENT} at step 40; after {OTHER}"
    assert tags["slurmtrain.parent_run_id"] == PARENT
    assert "mlflow.parentRunId" not in tags
