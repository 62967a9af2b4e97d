"""The node ledger of a runs root: what counts, forgiving, and the nodes that a submission goes without."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from helpers.fakeslurm import FakeScheduler
from helpers.simulated_run import RUN_ID, SimulatedRun, make_test_plan
from helpers.workspaces import make_workspace

from slurmtrain.errors import LaunchError, RequestRefused, UserError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.shared.ledger_file import Exclusions, exclusions, forgive, listed, nodes_json
from slurmtrain.ops.shared.observe import observe, rebuild
from slurmtrain.ops.shared.workspace import Workspace

HOUR = 3600.0


@pytest.fixture
def slurm() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def workspace(tmp_path: Path, slurm: FakeScheduler) -> Workspace:
    return make_workspace(tmp_path, slurm)


def plan(nodes: int = 1, **keys: Any) -> Plan:
    return make_test_plan(resources={"nodes": nodes}, **keys)


def against(workspace: Workspace, *hosts: str, ago: float = 60.0, run_id: str = RUN_ID, job: str = "7") -> RunDir:
    """A run whose preflight has blamed these nodes."""
    directory = workspace.root.run(run_id)
    failed_at = time.time() - ago
    run = SimulatedRun(directory, job=job, now=failed_at - 10).created()
    for node, host in enumerate(("n0", *hosts)):
        finding = {"check": "clock", "status": "fail", "summary": f"{node} s ahead", "evidence": {"offset_ms": node}}
        agent = {"node": node, "nodes": len(hosts) + 1, "host": host, "executor": "slurm", "submission": 1}
        run.node("agent", node, at=failed_at - 1, **agent, attempt=1)
        run.node("preflight", node, at=failed_at, blamed=node > 0, findings=[finding] if node else [])
        run.ended("preflight", node, at=failed_at, reason="x", failed_at=failed_at, cascade=node > 0)
    observe(workspace, ask_slurm=False)
    return directory


def states(workspace: Workspace) -> list[tuple[str, str]]:
    return [(entry.host, state) for entry, state in listed(workspace)]


# --- forgiving ----------------------------------------------------------------------------------------------------


def test_what_is_forgiven_stays_forgiven_after_a_rebuild_and_later_findings_count(workspace: Workspace) -> None:
    against(workspace, "n1", "n2")
    assert forgive(workspace, ["n1"]) == ["n1"]
    assert states(workspace) == [("n1", "forgiven"), ("n2", "active")]
    rebuild(workspace)
    assert states(workspace) == [("n1", "forgiven"), ("n2", "active")]
    against(workspace, "n1", ago=5, run_id="1123456789", job="8")
    assert states(workspace) == [("n1", "forgiven"), ("n2", "active"), ("n1", "active")]


def test_a_list_of_nodes_is_forgiven_at_once_in_a_private_journal_that_says_by_whom(workspace: Workspace) -> None:
    with pytest.raises(UserError, match="does not list n1; it is empty"):
        forgive(workspace, ["n1"])
    against(workspace, "n1", "n2", "n3")
    assert forgive(workspace, ["n[1-2]", "n1"]) == ["n1", "n2"]
    assert [host for host, state in states(workspace) if state == "active"] == ["n3"]
    [path] = workspace.root.nodes.glob("*.jsonl")
    assert '"host":"n1","by":"' in path.read_text()
    assert path.stat().st_mode & 0o77 == 0
    # A torn line forgives nothing.
    (workspace.root.nodes / "torn.jsonl").write_bytes(b'{"t":1,"kind":"forgiven","host":"n3","findi')
    assert ("n3", "active") in states(workspace)


@pytest.mark.parametrize(
    ("names", "message"),
    [(["n9", "n1"], "the node ledger does not list n9; it lists n1, n2"), (["n[1"], "its brackets do not match")],
)
def test_a_node_that_is_not_listed_is_an_error_and_nothing_is_forgiven(
    workspace: Workspace, names: list[str], message: str
) -> None:
    against(workspace, "n1", "n2")
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        forgive(workspace, names)
    assert states(workspace) == [("n1", "active"), ("n2", "active")]


# --- listing ------------------------------------------------------------------------------------------------------


def test_the_last_finding_of_each_node_is_listed_the_newest_first(workspace: Workspace) -> None:
    against(workspace, "n1", "n2", ago=2 * HOUR)
    against(workspace, "n1", ago=HOUR, run_id="1123456789", job="8")
    against(workspace, "n3", ago=25 * HOUR, run_id="2123456789", job="9")
    nodes = nodes_json(workspace, inactive_too=False)
    assert [(one["host"], one["run_id"], one["state"]) for one in nodes] == [
        ("n1", "1123456789", "active"),
        ("n2", "0123456789", "active"),
    ]
    assert nodes[0]["reason"] == "clock: 1 s ahead"
    assert nodes[0]["evidence"] == {"clock": {"offset_ms": 1}}
    assert nodes[0]["seen_at"] < nodes[0]["expires_at"]
    every = nodes_json(workspace, inactive_too=True)
    assert [(one["host"], one["state"]) for one in every] == [
        ("n1", "active"), ("n2", "active"), ("n1", "active"), ("n3", "expired"),
    ]  # fmt: skip


# --- submissions --------------------------------------------------------------------------------------------------


def test_nothing_is_asked_where_nothing_counts(workspace: Workspace, slurm: FakeScheduler) -> None:
    assert exclusions(workspace, plan(), (), slurm=True) == Exclusions()
    against(workspace, "n1", ago=25 * HOUR)
    assert exclusions(workspace, plan(), (), slurm=True) == Exclusions()
    assert slurm.questions == []
    for hours, nodes in ((24.0, ()), (26.0, ("n1",)), (0.0, ())):
        object.__setattr__(workspace.config, "node_expiry_hours", hours)
        assert exclusions(workspace, plan(), (), slurm=True).nodes == nodes


def test_nodes_of_the_ledger_are_left_out_with_a_word(workspace: Workspace, slurm: FakeScheduler) -> None:
    against(workspace, "n1", "n2", "stranger", ago=2 * HOUR + 60)
    left_out = exclusions(workspace, plan(), (), slurm=True)
    assert left_out.nodes == ("n1", "n2")
    assert left_out.notes == [
        "excluded, because a preflight failed there: n1 (clock: 1 s ahead, 2 h ago), n2 (clock: 2 s ahead, 2 h ago); "
        "'slurmtrain nodes' shows more"
    ]
    assert slurm.questions == ["sinfo"]


def test_the_oldest_finding_is_let_back_in_where_the_request_could_not_be_met(workspace: Workspace) -> None:
    against(workspace, "n1", ago=3 * HOUR)
    against(workspace, "n2", ago=60, run_id="1123456789", job="8")
    left_out = exclusions(workspace, plan(nodes=3), (), slurm=True)
    assert left_out.nodes == ("n2",)
    assert left_out.notes[1] == (
        "n1 is in the node ledger (clock: 1 s ahead, 3 h ago), but is used, because the request cannot be met without "
        "it "
        "(3 nodes are needed and 2 would be left)"
    )
    assert exclusions(workspace, plan(nodes=4), (), slurm=True).nodes == ()


@pytest.mark.parametrize("slurm_", [True, False])
def test_a_plan_that_wants_no_node_excluded_and_one_for_this_machine_get_all(
    workspace: Workspace, slurm: FakeScheduler, slurm_: bool
) -> None:
    against(workspace, "n1")
    submitted = plan(preflight={"exclude": False}) if slurm_ else plan()
    assert exclusions(workspace, submitted, (), slurm=slurm_) == Exclusions()
    assert slurm.questions == []


def test_a_slurm_that_does_not_answer_keeps_no_run_from_being_submitted(
    workspace: Workspace, slurm: FakeScheduler
) -> None:
    against(workspace, "n1")
    slurm.sinfo_problem = "sinfo: down"
    left_out = exclusions(workspace, plan(), (), slurm=True)
    assert (left_out.nodes, len(left_out.notes)) == ((), 1)
    with pytest.raises(LaunchError, match="sinfo: down"):
        exclusions(workspace, plan(), ("n1",), slurm=True)


def test_nodes_that_must_be_left_out_come_first_and_are_no_matter_of_the_ledger(workspace: Workspace) -> None:
    against(workspace, "n1")
    left_out = exclusions(workspace, plan(nodes=3), ("n2",), slurm=True)
    assert left_out.nodes == ("n2",)
    assert "n1 is in the node ledger" in left_out.notes[0]
    with pytest.raises(RequestRefused, match="n2, n3 cannot be excluded: 4 nodes are needed and 3 would be left"):
        exclusions(workspace, plan(nodes=4), ("n2", "n3"), slurm=True)


def test_nodes_that_must_be_left_out_are_where_only_slurm_can_tell_whether_they_can_be(workspace: Workspace) -> None:
    against(workspace, "n1")
    left_out = exclusions(workspace, plan(slurm={"reservation": "r"}), ("n2",), slurm=True)
    assert left_out.nodes == ("n2",)
    assert "only Slurm knows the nodes of slurm.reservation" in left_out.notes[0]
