"""A search with real runs, whose commands are killed and get in each other's way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from helpers.site import Site

SCRIPT = """import sys
print(f"step 1/1 loss={abs(float(sys.argv[1]) - 0.3)}", flush=True)
"""


def test_a_search_ends_with_all_trials_whichever_command_asks_and_is_killed(site: Site, tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(SCRIPT)
    spec = site.commanding(
        f"python {tmp_path / 'score.py'} ${{params.x}}",
        params={"x": 0.0},
        tracking={
            "mlflow": {"enabled": False},
            "metrics": {"pattern": r"loss=(?P<loss>\S+)", "step": r"step (?P<step>\d+)/(?P<total>\d+)"},
        },
        sweep={"params.x": "uniform(0, 1)", "search": {"metric": "loss", "mode": "min", "trials": 4, "parallel": 2}},
    )
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
    assert sorted(each["trial"] for each in created) == [0, 1, 2, 3]
    assert len({each["varies"]["params.x"] for each in created}) == 4
    assert {run["state"] for run in site.json("status", "--no-fold")["runs"]} == {"completed"}
