"""Steps and metrics of scripts that know nothing of slurmtrain, from their logs and from files that grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.site import SCRIPTS, Site, until
from helpers.trainers import TRAINERS

IN_LOG = {"pattern": r"loss=(?P<loss>\S+)", "step": r"step (?P<step>\d+)/(?P<total>\d+)"}
IN_FILE = {"file": "{run_dir}/output/metrics.csv", "step": "iter", "total": 30}


def run(site: Site, output: str, metrics: dict[str, Any], **requeue: int) -> dict[str, Any]:
    spec = site.commanding(
        f"python {SCRIPTS / 'counting.py'} {{run_dir}}/output {output}",
        checkpoint={"glob": "{run_dir}/output/state"},
        tracking={"metrics": metrics},
        requeue={"backoff_s": 0, **requeue},
    )
    [finished] = site.json("submit", str(spec), "--executor", "local", "--wait")["runs"]
    return finished


def check(site: Site, finished: dict[str, Any]) -> None:
    """The run says of its steps what one with a session would say, and its curve has each step once."""
    assert (finished["state"], finished["step"], finished["total_steps"]) == ("completed", 30, 30)
    assert finished["metrics"] == {"loss": pytest.approx(1 / 30, abs=1e-4)}
    assert finished["lost_steps"] == 7
    [plotted] = site.json("plot", finished["id"], "loss", "--all")["runs"]
    loss = plotted["metrics"]["loss"]
    assert loss["step"] == list(range(1, 31))
    assert loss["value"] == pytest.approx([1 / step for step in range(1, 31)], abs=1e-4)
    # Each attempt has written what it has trained, once.
    assert loss["superseded"]["step"] == list(range(11, 18))


def test_the_log_of_rank_0_has_the_steps_of_both_attempts(site: Site) -> None:
    finished = run(site, "log", IN_LOG, restarts_in_place=0)
    check(site, finished)
    assert [attempt["first_step"] for attempt in site.show(finished["id"])["attempts"]] == [0, 10]


def test_a_table_that_grows_over_restarted_ranks_has_the_steps_of_all_of_them(site: Site) -> None:
    finished = run(site, "csv", IN_FILE)
    check(site, finished)
    [metrics] = Path(finished["dir"]).glob("attempts/*/metrics.jsonl")
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == [*range(1, 18), *range(11, 31)]


def printing(site: Site, author: str, **keys: Any) -> dict[str, Any]:
    """A run that prints what a library or its author prints, without any key about it."""
    spec = site.commanding(f"python {SCRIPTS / 'printing.py'} {author}", **keys)
    [finished] = site.json("submit", str(spec), "--executor", "local", "--wait")["runs"]
    assert finished["state"] == "completed"
    return finished


def test_what_a_script_prints_is_understood_without_a_key_and_decides_nothing(site: Site) -> None:
    finished = printing(site, "nanogpt")
    assert (finished["metrics_from"], finished["step"], finished["total_steps"]) == ("output", 30, None)
    assert finished["metrics"] == {"train_loss": 1.0, "val_loss": pytest.approx(1.1), "loss": 1.0}
    [plotted] = site.json("plot", finished["id"], "loss")["runs"]
    assert plotted["metrics"]["loss"]["step"] == list(range(31))
    shown = site.show(finished["id"])
    assert (shown["lost_steps"], shown["attempts"][0]["last_step"]) == (None, None)
    printed = site.call("show", finished["id"]).stdout
    assert "~30" in printed
    assert "guessed from its output" in printed
    directory = Path(finished["dir"])
    assert not [*directory.glob("attempts/*/metrics.jsonl")]
    site.call("registry", "rebuild")
    assert site.show(finished["id"])["metrics"] == finished["metrics"]
    off = printing(site, "nanogpt", tracking={"metrics": "off"})
    assert (off["metrics_from"], off["step"], off["metrics"]) == (None, None, {})
    assert not [*Path(off["dir"]).glob("attempts/*/metrics-guessed.jsonl")]
    nothing = printing(site, "numberless")
    assert (nothing["metrics_from"], nothing["step"], nothing["metrics"]) == (None, None, {})


def test_a_script_that_reports_its_steps_after_all_replaces_what_was_guessed(site: Site) -> None:
    run_id = site.submit(site.commanding(f"python {SCRIPTS / 'printing.py'} converted {site.path / 'go'}"))
    until(lambda: site.status(run_id)["metrics_from"] == "output", "the output was never understood")
    assert site.status(run_id)["step"] == 7
    (site.path / "go").touch()
    site.until_state(run_id, "completed")
    finished = site.show(run_id)
    assert (finished["metrics_from"], finished["step"], finished["metrics"]) == (None, 2, {"accuracy": 0.5})
    [plotted] = site.json("plot", run_id, "accuracy")["runs"]
    assert plotted["metrics"]["accuracy"]["step"] == [2]


@pytest.mark.parametrize(
    ("library", "step", "names"),
    [
        ("transformers", 12, {"loss", "eval_loss", "grad_norm", "learning_rate", "train_loss"}),
        # Into a file, its bar leaves the last line of the last epoch alone.
        ("lightning", None, {"train_loss", "val_loss"}),
        ("tqdm", 20, {"loss", "lr"}),
        ("keras", 24, {"accuracy", "loss", "val_accuracy", "val_loss"}),
        ("examples", None, {"Loss", "Average_loss"}),
    ],
)
def test_what_real_libraries_print_today_is_understood(
    site: Site, library: str, step: int | None, names: set[str]
) -> None:
    if library in ("transformers", "lightning"):
        TRAINERS[library].skip_if_missing()
    finished = printing(site, library)
    assert (finished["metrics_from"], finished["step"]) == ("output", step)
    assert set(finished["metrics"]) == names
