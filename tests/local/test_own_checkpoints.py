"""Runs of scripts that save by themselves: what they continue from, and what counts as progress."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from helpers.site import SCRIPTS, Site

REQUEUE = {"restarts_in_place": 5, "max_failures": 5, "backoff_s": 0}


def spec(site: Site, command: str, pattern: str, **checkpoint: Any) -> Path:
    path = site.path / "own.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "command": f"python {SCRIPTS / 'archives.py'} {command}",
                "checkpoint": {"glob": f"{{checkpoint_dir}}/{pattern}", **checkpoint},
                "requeue": REQUEUE,
                "tracking": {"mlflow": {"enabled": False}},
            }
        )
    )
    return path


def events(site: Site, run_id: str, kind: str) -> list[dict[str, Any]]:
    """The events of this kind that node 0's agents have written."""
    journals = sorted((site.runs / run_id / "attempts").glob("*/node-0.jsonl"))
    lines = [json.loads(line) for journal in journals for line in journal.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_a_run_that_rewrites_one_file_goes_on_as_long_as_its_content_changes(site: Site) -> None:
    run_id = site.submit(spec(site, "last {checkpoint_dir} {resume_from}", "last.pt"), "--wait")
    run = site.status(run_id)
    assert (run["state"], run["checkpoint"]["step"], run["checkpoint"]["format"]) == ("completed", 300, "torch")
    assert [restart["past"]["committed"] for restart in events(site, run_id, "restart")] == [105, 172, 269]
    # The step is inside: the name has none.
    [listed] = site.json("checkpoints", run_id)["checkpoints"]
    assert (listed["step"], listed["complete"], Path(listed["path"]).name) == (300, True, "last.pt")


def test_a_checkpoint_that_ranks_crash_from_is_passed_over_for_the_one_before(site: Site) -> None:
    command = "spoiled {checkpoint_dir} {resume_dir} {resume_tag}"
    run_id = site.submit(spec(site, command, "tag*", step=r"tag(\d+)"), "--wait")
    out = site.runs / run_id / "checkpoints"
    assert site.status(run_id)["state"] == "completed"
    started = [event["resume_from"] for event in events(site, run_id, "workers")]
    assert started == [None, str(out / "tag20"), str(out / "tag10")]
    [passed_over] = events(site, run_id, "passed_over")
    assert (passed_over["path"], passed_over["step"]) == (str(out / "tag20"), 20)
    assert "crashed" in passed_over["why"]
    assert "the state cannot be loaded" in passed_over["why"]
    assert f"the checkpoint of step 20 ({out / 'tag20'})" in site.call("show", run_id).stdout
    assert [each["step"] for each in site.json("checkpoints", run_id)["checkpoints"]] == [10, 20, 30]


def test_a_script_that_looks_for_its_checkpoints_is_handed_none_and_starts_over_when_told_to(site: Site) -> None:
    run_id = site.submit(spec(site, "own {checkpoint_dir}", "ckpt-*.pt", format="own"), "--wait")
    run = site.status(run_id)
    assert (run["state"], run["checkpoint"]["step"]) == ("completed", 20)
    assert [event["resume_from"] for event in events(site, run_id, "workers")] == [None, None]
    assert "begins at 10" in site.call("logs", run_id).stdout
    site.call("resume", run_id, "--from-start", "--wait")
    # Otherwise there would be one of step 30.
    assert [each["step"] for each in site.json("checkpoints", run_id)["checkpoints"]] == [10, 20]
