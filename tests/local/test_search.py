"""A search with real runs, whose commands are killed and get in each other's way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml
from helpers.site import ONE_PROCESS, Site

PAGE = Path(__file__).parents[2] / "docs" / "sweeps.md"
SCRIPT = """import sys
print(f"step 1/1 loss={abs(float(sys.argv[2]) - 0.003) + float(sys.argv[4])}", flush=True)
"""


def test_a_search_ends_with_all_trials_whichever_command_asks_and_is_killed(site: Site) -> None:
    # The example of the page, with fewer trials, and a script that prints its loss.
    section = PAGE.read_text().partition("\n## Search\n")[2]
    example = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])
    example["sweep"]["search"] |= {"trials": 3, "parallel": 2}
    (site.path / "train.py").write_text(SCRIPT)
    pattern = {"pattern": r"loss=(?P<loss>\S+)", "step": r"step (?P<step>\d+)/(?P<total>\d+)"}
    tracking = {"mlflow": {"enabled": False}, "metrics": pattern}
    spec = site.spec(**example, resources=ONE_PROCESS, tracking=tracking)
    first = site.json("submit", str(spec), "--executor", "local")["runs"]
    assert len(first) == 2
    # The first one is killed at any moment, perhaps while it asks.
    wait = [sys.executable, "-m", "slurmtrain", "wait", first[0]["id"]]
    killed, other = (subprocess.Popen(wait, cwd=site.path, env=site.environment()) for _ in range(2))
    while len(list(site.runs.glob("*/plan.json"))) < 3:
        assert other.poll() is None
    killed.kill()
    killed.wait()
    assert other.wait() == 0
    created = [json.loads(path.read_text().splitlines()[0]) for path in site.runs.glob("*/journal/created.jsonl")]
    assert sorted(each["trial"] for each in created) == [0, 1, 2]
    assert len({each["varies"]["params.lr"] for each in created}) == 3
    assert {each["varies"]["params.layers"] for each in created} <= {2, 4, 6, 8}
    assert {run["state"] for run in site.json("status", "--no-fold")["runs"]} == {"completed"}
    [search] = site.json("best", first[0]["sweep"])["searches"]
    assert (search["states"], search["trials"]) == ({"complete": 3}, 3)
    losses = {run["id"]: run["metrics"]["loss"] for run in site.json("status", "--no-fold")["runs"]}
    assert search["best"]["value"] == losses[search["best"]["run"]] == min(losses.values())
