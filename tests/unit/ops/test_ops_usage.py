"""What a run used, from its own files, in ``show`` and as columns of lists."""

from __future__ import annotations

import json
import re

import pytest
from helpers.simulated_run import RUN_ID, SimulatedRun

from slurmtrain.cli import main
from slurmtrain.ops.shared.workspace import Workspace


@pytest.fixture
def run(workspace: Workspace) -> SimulatedRun:
    """A completed run on two nodes, in two attempts."""
    resources = {"nodes": 2, "procs_per_node": 2, "cpus_per_proc": 4, "mem": "16GB", "time": "04:00:00"}
    sim = SimulatedRun(workspace.root.run(RUN_ID), spec={"name": "cnn", "resources": resources})
    assert sim._plan is not None
    sim.created(resources=sim._plan.content["resources"], params={}).submitted().started(nodes=2)
    sim.reached(5).later(600).stopped().later(60)
    sim.started(1, nodes=2).later(1200).ended("completed", restart=1).ended("completed", node=1, restart=1)
    for restart, most in ((0, 1500), (1, 3000)):
        for node in range(2):
            path = workspace.root.run(RUN_ID).attempt("7", restart).system_metrics(node)
            path.parent.mkdir(parents=True, exist_ok=True)
            figures = ({"job_memory_usage_megabytes": most - i - 99 * node, "job_cpu_cores": 1.5} for i in range(9))
            lines = [json.dumps({"t": 2000.0 + 15 * i, "step": i, "metrics": each}) for i, each in enumerate(figures)]
            path.write_text("\n".join([*lines, "torn"]))
    return sim


def test_show_and_columns_have_what_a_run_asked_for_and_used(
    workspace: Workspace, run: SimulatedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["--runs", str(workspace.root.path), *arguments])
        assert ended.value.code == 0
        return capsys.readouterr().out

    shown = json.loads(printed("show", RUN_ID, "--json"))["run"]
    assert shown["state"] == "completed"
    memory, cpus, gpus, time = shown["usage"]
    assert (memory["asked"], memory["used"], memory["suffices"]) == (16 << 30, 3e9, 3.5 * (1 << 30))
    assert (memory["request"], memory["unit"], memory["margin"]) == ("mem: 3.5GB", "bytes", 0.2)
    assert (cpus["asked"], cpus["used"], cpus["suffices"]) == (8, 1.5, 2)
    assert (gpus["asked"], gpus["used"], gpus["utilization"]) == (0, None, None)
    assert (time["asked"], time["unit"], time["suffices"]) == (14_400, "seconds", 1800)
    assert 1200 <= time["used"] <= 1220
    lines = printed("show", RUN_ID).splitlines()
    assert "memory      at most 2.79GB of 16GB of a node was in use: mem: 3.5GB would have sufficed" in lines
    assert "limit       the longest attempt ran for 20 min" in "".join(lines)
    columns = "name,usage.memory,usage.memory.suffices,usage.cpus.used,usage.time.asked,usage.gpus.used"
    row = printed("status", "--where", "usage.memory.used < 4GB", "--columns", columns).splitlines()[-1]
    assert re.split("  +", row) == ["cnn", "2.8 GiB of 16.0 GiB", "3.5 GiB", "1.5", "4h00m", "-"]
    [figures] = json.loads(printed("status", "--columns", "usage.memory.used,usage.gpus.why", "--json"))["runs"]
    assert figures == {"usage.memory.used": 3e9, "usage.gpus.why": ""}
    # What lists say by default does not read these files.
    assert "usage" not in json.loads(printed("status", "--json"))["runs"][0]
