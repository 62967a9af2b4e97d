"""Runs are repeated bit for bit: by ``rerun``, also after a preemption, with a seed and deterministic algorithms."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.site import Site, until

TRAIN = """
import random, time
import numpy, torch
import slurmtrain
from torch import nn

with slurmtrain.session() as run:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    run.checkpoint(model=model, optimizer=optimizer)
    for step in run.steps(30):
        loss = (model(torch.rand(3, 4) * random.random()) * float(numpy.random.rand())).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=float(loss))
        # Only while a test is to stop it.
        time.sleep(0.2 if run.params["slow"] and run.attempt == 1 else 0)
"""
PLAIN = """
import random
import numpy, torch

print(random.random(), numpy.random.rand(), torch.rand(()).item(), hash("text"), flush=True)
torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
"""


def weights(site: Site, run_id: str) -> dict[str, Any]:
    """The hashes of all files of a run's last checkpoint: of its tensors, and of all states of each rank."""
    [manifest] = (site.runs / run_id / "checkpoints").glob("step-30/MANIFEST.json")
    files: dict[str, Any] = json.loads(manifest.read_text())["files"]
    return files


@pytest.fixture
def script(site: Site) -> Path:
    project = site.path / "project"
    project.mkdir()
    (project / "train.py").write_text(TRAIN)
    return project / "train.py"


def test_a_rerun_has_the_same_weights_although_its_code_is_gone_and_it_is_preempted(site: Site, script: Path) -> None:
    resources = {"nodes": 1, "procs_per_node": 2, "time": "00:10:00"}
    keys = {"workdir": str(script.parent), "code": "snapshot", "seed": 7, "deterministic": True}
    spec = site.commanding("python train.py", "repeated", params={"slow": 0}, resources=resources, **keys)
    submitted = site.call("submit", str(spec), "--executor", "local", "--wait", "--json")
    first = json.loads(submitted.stdout)["runs"][0]["id"]

    script.write_text("raise SystemExit('new code')\n")
    answer = site.json("rerun", first, "params.slow=1")
    [again] = answer["runs"]
    assert (answer["schema"], again["params"], again["state"] in ("pending", "running")) == (1, {"slow": 1}, True)
    until(lambda: (site.step(again["id"]) or 0) > 2, "training")
    site.signal_all(again["id"], signal.SIGTERM)
    until(lambda: not site.processes(again["id"]), "the end of the first attempt")
    assert site.json("wait", again["id"])["runs"][0]["state"] == "completed"
    assert len(site.show(again["id"])["attempts"]) == 2
    assert weights(site, again["id"]) == weights(site, first)
    assert site.show(again["id"])["parents"] == [{"run": first, "relation": "rerun", "step": None}]
    difference = site.json("diff", first, again["id"])
    assert difference["spec"] == {"params.slow": [0, 1]}
    assert (difference["code"]["same"], difference["environment"]) == (True, {})
    assert difference["checkpoints"] == {"equal": True, "step": 30, "why": ""}
    assert difference["result"]["attempts"] == [1, 2]
    assert "# override: params.slow=1" in (site.runs / again["id"] / "spec.yaml").read_text()


def test_a_script_without_a_session_is_seeded_and_its_error_names_the_key(site: Site, script: Path) -> None:
    (script.parent / "plain.py").write_text(PLAIN)
    keys = {"workdir": str(script.parent), "seed": 7, "deterministic": True, "requeue": {"max_failures": 0}}
    run_id = site.submit(site.commanding("python plain.py", "plain", **keys))
    site.call("wait", run_id, code=1)
    [again] = site.json("rerun", run_id)["runs"]
    site.call("wait", again["id"], code=1)
    first, second = (site.printed(each) for each in (run_id, again["id"]))
    assert first[0] == second[0]
    assert len(first[0].split()) == 4
    diagnosis = site.call("doctor", run_id, code=None).stdout
    assert "put_ has no deterministic implementation" in diagnosis
    assert "remove `deterministic: true` from the spec" in diagnosis
