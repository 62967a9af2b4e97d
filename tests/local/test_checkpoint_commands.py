"""What people do with checkpoints while a real run saves them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers.site import Site, until

pytestmark = pytest.mark.slow


@pytest.fixture
def run(site: Site) -> str:
    """A run of two ranks that saves only when it is asked, and is at its steps."""
    spec = site.spec(params={"steps": 1_000_000, "step_ms": 5}, checkpoint={"every": {"steps": 10_000_000}, "keep": 2})
    run_id = site.submit(spec)
    until(lambda: site.call("checkpoint", run_id, "--no-wait", code=None).returncode == 0, "the first step")
    return run_id


def test_a_run_that_trains_saves_when_it_is_asked_and_its_model_loads_elsewhere(site: Site, run: str) -> None:
    for _ in range(2):
        site.json("checkpoint", run)
    answer = site.json("checkpoint", run)
    assert (answer["outcome"], answer["checkpoint"]["why"]) == ("saved", "asked")
    assert Path(answer["checkpoint"]["path"], "MANIFEST.json").exists()
    listed = site.json("checkpoints", run)["checkpoints"]
    assert [one["kept"] for one in listed] == ["one of the last 2", "newest"]
    verified = site.json("verify", run)
    assert verified["newest_good"] == answer["checkpoint"]["step"]
    for name in ("model.safetensors", "model.pt"):
        site.call("export", run, "--to", name)
    state = safetensors.torch.load_file(site.path / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "0.weight": (8, 4),
        "0.bias": (8,),
        "2.weight": (1, 8),
        "2.bias": (1,),
    }
    loaded = torch.load(site.path / "model.pt", weights_only=True)
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_several_who_ask_at_once_are_all_answered(site: Site, run: str) -> None:
    command = [sys.executable, "-m", "slurmtrain", "checkpoint", run]
    asking = [
        subprocess.Popen(command, cwd=site.path, env=site.environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    answers = [process.communicate(timeout=240)[0].strip() for process in asking]
    assert [process.returncode for process in asking] == [0] * 4
    saved = {one["path"]: one["why"] for one in site.json("checkpoints", run, "--all")["checkpoints"]}
    assert [saved[answer] for answer in answers] == ["asked"] * 4


def test_half_written_files_of_a_killed_run_are_removed(site: Site, run: str) -> None:
    place = site.runs / run / "checkpoints"
    until(lambda: list(place.glob("step-*")), "the checkpoint that the fixture has asked for")
    site.end_all()
    [job] = (site.runs / run / "attempts").iterdir()
    (place / f".{job.name}-step-99").mkdir()
    pruned = site.json("prune", run)
    assert [Path(left["path"]).name for left in pruned["leftovers"]] == [f".{job.name}-step-99"]
    assert not [path for path in place.iterdir() if path.name.startswith(".")]
    assert site.json("verify", run)["newest_good"] is not None
