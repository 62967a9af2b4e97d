"""Runs that begin with a checkpoint of another run, and runs that go back to an earlier one of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.site import Site

KEEP = {"every": {"steps": 5}, "keep": {"last": 9, "best": {"metric": "loss", "mode": "min"}}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Site, dict[str, Any]]:
    """A run that has completed 20 steps, with a checkpoint every five."""
    site = Site(tmp_path_factory.mktemp("forks"))
    spec = site.light(name="base", params={"steps": 20}, checkpoint=KEEP)
    [run] = site.json("submit", str(spec), "--executor", "local", "--wait")["runs"]
    assert run["state"] == "completed"
    return site, run


def weights(run: dict[str, Any]) -> set[str]:
    """The hashes of the weights that the ranks of a run have ended with, in all its attempts."""
    logs = Path(run["dir"]).glob("attempts/*/logs/rank-*.log")
    return {line.split()[1] for path in logs for line in path.read_text().splitlines() if line[:7] == "weights"}


def manifest(run: dict[str, Any], step: int) -> dict[str, Any]:
    files: dict[str, Any] = json.loads((Path(run["dir"]) / f"checkpoints/step-{step}/MANIFEST.json").read_text())
    return files


def fork(site: Site, *arguments: str) -> dict[str, Any]:
    """A run of the same spec that begins with a checkpoint, once it has ended."""
    spec = site.light(name="base", params={"steps": 20}, checkpoint=KEEP)
    [run] = site.json("submit", str(spec), *arguments, "--executor", "local", "--wait")["runs"]
    shown: dict[str, Any] = site.show(run["id"])
    return shown


def test_a_fork_goes_on_bit_for_bit_also_when_its_parent_has_lost_the_checkpoint(
    base: tuple[Site, dict[str, Any]],
) -> None:
    site, parent = base
    forked = fork(site, "--from", "base:10", "name=fork")
    assert (forked["state"], forked["step"], forked["lost_steps"]) == ("completed", 20, 0)
    assert forked["parents"] == [{"run": parent["id"], "relation": "fork", "step": 10}]
    assert forked["attempts"][0]["first_step"] == 10
    assert weights(forked) == weights(parent)
    assert manifest(forked, 20)["files"] == manifest(parent, 20)["files"]
    [child] = [each for each in site.show(parent["id"])["children"] if each["run"] == forked["id"]]
    assert (child["relation"], child["step"]) == ("fork", 10)
    # It has links of its own: what becomes of its parent's files does not matter, nor what it has saved itself.
    shutil.rmtree(Path(parent["dir"]) / "checkpoints/step-10")
    again = site.json("resume", forked["id"], "--from-start", "--wait")["runs"][0]
    assert (again["state"], site.show(forked["id"])["attempts"][1]["first_step"]) == ("completed", 10)
    assert manifest(again, 20)["files"] == manifest(parent, 20)["files"]


def test_a_fork_may_begin_with_the_weights_of_the_best_checkpoint_alone(base: tuple[Site, dict[str, Any]]) -> None:
    site, parent = base
    losses = {step: manifest(parent, step)["metrics"]["loss"] for step in (5, 15, 20)}
    best = min(losses, key=lambda step: losses[step])
    tuned = fork(site, "--from", f"{parent['id']}:best", "--weights-only", "name=tuned", "params.steps=1")
    assert tuned["parents"] == [{"run": parent["id"], "relation": "fork", "step": best}]
    assert (tuned["state"], tuned["step"], tuned["attempts"][0]["first_step"]) == ("completed", 1, 0)
    # One step on: neither what the checkpoint has nor what the script makes.
    [loaded] = (Path(tuned["dir"]) / "start").iterdir()
    assert loaded.name == f"step-{best}"
    assert manifest(tuned, 1)["files"] != manifest(parent, best)["files"]


def test_a_run_goes_on_from_an_earlier_step_and_keeps_the_later_checkpoints_aside(
    base: tuple[Site, dict[str, Any]],
) -> None:
    site, parent = base
    [run] = site.json("resume", parent["id"], "--step", "15", "--wait")["runs"]
    assert (run["state"], run["step"]) == ("completed", 20)
    shown = site.show(parent["id"])
    assert (shown["attempts"][1]["first_step"], shown["lost_steps"]) == (15, 5)
    assert len(weights(run)) == 1
    aside = Path(parent["dir"]) / "checkpoints.before-attempt-2"
    assert [path.name for path in aside.iterdir()] == ["step-20"]
    refused = site.call("resume", parent["id"], "--step", "13", code=2)
    assert "has no checkpoint of step 13; its steps are" in refused.stderr


def test_a_run_that_waits_for_another_begins_with_its_last_checkpoint(base: tuple[Site, dict[str, Any]]) -> None:
    site, _ = base
    first = site.light("first", params={"steps": 6}, checkpoint=KEEP)
    keys = {"after": ["first"], "start_from": "first", "params": {"steps": 9}, "checkpoint": KEEP}
    runs = site.json("submit", str(first), str(site.light("second", **keys)), "--executor", "local", "--wait")["runs"]
    assert [(run["name"], run["state"], run["step"]) for run in runs] == [
        ("first", "completed", 6), ("second", "completed", 9)
    ]  # fmt: skip
    shown = site.show(runs[1]["id"])
    assert shown["attempts"][0]["first_step"] == 6
    assert [(each["run"], each["relation"]) for each in shown["parents"]] == [
        (runs[0]["id"], "fork"), (runs[0]["id"], "after")
    ]  # fmt: skip
