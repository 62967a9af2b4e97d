"""Each key of the spec means the same locally as on Slurm (tests/cluster/test_slurm_same_meaning.py)."""

from __future__ import annotations

from dataclasses import fields

from helpers.same_meaning import ELSEWHERE, KEYS, ROWS, check_failing_line, check_ranks
from helpers.site import Site

from slurmtrain.model.experiment.spec import Spec


def test_each_key_is_in_the_table_or_tested_elsewhere() -> None:
    assert {field.name for field in fields(Spec)} == {key.partition(":")[0] for key in ROWS} | ELSEWHERE.keys()
    assert {key.partition(":")[0] for key in ROWS} == KEYS.keys() | {"workdir"}


def test_ranks_see_what_the_spec_says(site: Site) -> None:
    check_ranks(site, "local")


def test_a_line_of_setup_that_fails_ends_the_attempt_and_is_said(site: Site) -> None:
    check_failing_line(site, "local")


def test_setup_that_bash_cannot_read_is_refused_with_its_line(site: Site) -> None:
    refused = site.call("submit", str(site.steady(setup=["echo a", "if true; then"])), "--executor", "local", code=2)
    assert "setup: bash cannot parse line" in refused.stderr
    assert not list(site.runs.glob("*/plan.json"))


def test_a_python_of_setup_that_lacks_what_ranks_import_is_said(site: Site) -> None:
    setup = ["python3 -m venv --without-pip venv", "source venv/bin/activate"]
    run_id = site.submit(site.commanding("python -c 'import slurmtrain'", setup=setup))
    reason = site.until_state(run_id, "failed", "completed")["reason"]
    assert "/venv/bin/python, where slurmtrain is not installed: install it there" in reason


def test_setup_runs_when_it_is_the_turn_of_its_run(site: Site) -> None:
    made = site.path / "made"
    first = site.commanding(f"bash -c 'sleep 3; touch {made}'", "first")
    second = site.commanding("true", "second", after="first", setup=[f"[ -e {made} ]", "echo ready"])
    answer = site.json("submit", str(first), str(second), "--executor", "local")
    run_id = next(run["id"] for run in answer["runs"] if run["name"] == "second")
    run = site.until_state(run_id, "completed", "failed", "lost")
    assert run["state"] == "completed", run["reason"]
    assert "[1/setup 0] ready" in site.call("logs", run_id).stdout
