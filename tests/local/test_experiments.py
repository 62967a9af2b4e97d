"""Every experiment of the repository runs, as its readers would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.rare import rare
from helpers.site import Site, until

EXPERIMENTS = Path(__file__).resolve().parent.parent.parent / "experiments"
# Of digits; zero3 is always tested.
STRATEGIES = ("bf16", "ddp", "zero1")


def test_there_is_a_test_for_every_experiment() -> None:
    specs = sorted(path.relative_to(EXPERIMENTS).as_posix() for path in EXPERIMENTS.rglob("*.yaml"))
    # test_experiments_gpt.py says so of those of the GPT.
    digits = sorted(f"digits/{name}.yaml" for name in ("digits", "zero3", *STRATEGIES))
    others = [spec for spec in specs if not spec.startswith(("gpt/", "deepspeed/", "megatron/"))]
    assert others == [*digits, "plain/plain.yaml"]


@pytest.mark.slow
def test_digits_reaches_97_percent_over_two_processes_and_is_mirrored(site: Site) -> None:
    answer = site.json(
        "submit", str(EXPERIMENTS / "digits" / "digits.yaml"), "--executor", "local", "--wait", cwd=EXPERIMENTS.parent
    )
    [run] = answer["runs"]
    assert run["state"] == "completed"
    assert run["metrics"]["test_accuracy"] >= 0.97
    assert run["checkpoint"]["step"] == run["step"] == run["total_steps"] == 600
    assert run["mlflow_run_id"]
    assert len(list(Path(run["dir"]).glob("attempts/*/logs/rank-*.log"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", *(pytest.param(each, marks=rare) for each in STRATEGIES)])
def test_digits_reaches_it_with_other_strategies(site: Site, name: str) -> None:
    spec = str(EXPERIMENTS / "digits" / f"{name}.yaml")
    # All steps in the rare ones; a third of them is enough to see that it learns.
    steps, least = (600, 0.97) if name in STRATEGIES else (200, 0.95)
    overrides = (f"params.steps={steps}", "tracking.mlflow.enabled=false", "--executor", "local", "--wait")
    [run] = site.json("submit", spec, *overrides, cwd=EXPERIMENTS.parent)["runs"]
    assert (run["name"], run["state"], run["step"]) == (f"digits-{name}", "completed", steps)
    assert run["metrics"]["test_accuracy"] >= least


@pytest.mark.slow
def test_digits_runs_as_a_plain_script(site: Site) -> None:
    script = str(EXPERIMENTS / "digits" / "train.py")
    # Threads that wait for each other by spinning take many times as long beside others on the same cores.
    environment = {**site.environment(), "OMP_NUM_THREADS": "1"}
    plain = subprocess.run([sys.executable, script], cwd=site.path, env=environment, capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    assert float(plain.stdout.split()[-1]) >= 0.97


def test_plain_is_killed_and_continues_from_its_own_checkpoint(site: Site) -> None:
    spec, root = str(EXPERIMENTS / "plain" / "plain.yaml"), EXPERIMENTS.parent
    arguments = ("tracking.mlflow.enabled=false", "params.seconds_per_step=0.02", "--executor", "local")
    [run] = site.json("submit", spec, *arguments, cwd=root)["runs"]
    directory = Path(run["dir"])
    until(lambda: (directory / "checkpoints" / "ckpt-40.pt").exists(), "checkpoints")
    site.call("cancel", "--force", run["id"])
    site.call("resume", run["id"], "params.seconds_per_step=0", "--wait")
    resumed = site.status(run["id"])
    assert (resumed["state"], resumed["checkpoint"]["step"]) == ("completed", 200)
    assert "resumed from ckpt-" in site.call("logs", run["id"]).stdout
