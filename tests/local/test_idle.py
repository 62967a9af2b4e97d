"""A run that does nothing is ended with a save by the next sync, if its spec asks for that."""

from __future__ import annotations

import json
import time
from typing import Any

from helpers.site import ONE_PROCESS, Site, until


def test_a_run_that_does_nothing_for_too_long_is_ended_with_a_save(site: Site) -> None:
    slow = {"steps": 10**6, "step_ms": 50}
    spec = site.spec(params=slow, resources=ONE_PROCESS, idle_after="2m")
    run_id = site.submit(spec)
    until(lambda: site.step(run_id) > 2, "some steps")
    assert site.json("sync")["ended"] == []
    [logs] = (site.runs / run_id).glob("attempts/*/logs")
    until((logs / "system-0.jsonl").exists, "what its agent notes first")
    memory, cpus, *_ = site.show(run_id)["usage"]
    # torch alone takes more than this.
    assert 100e6 < memory["used"] < 4e9
    assert cpus["used"] > 0

    def ended() -> Any:
        # What the agent itself notes is that the run is busy: every 15 s, so the notes of this test are the newest.
        now = time.time()
        figures = {"job_cpu_cores": 0.01}
        notes = ({"t": now - 15 * back, "step": 3, "metrics": figures} for back in range(12, -1, -1))
        with (logs / "system-0.jsonl").open("a") as file:
            file.write("".join(json.dumps(note) + "\n" for note in notes))
        return site.json("sync")["ended"]

    assert until(ended, "the end of the idle run") == [run_id]
    run = site.show(run_id)
    assert (run["state"], run["cause"], run["idle"], len(run["attempts"])) == ("cancelled", "cancelled", None, 1)
    assert run["reason"].startswith("its processes computed nothing for 1")
    assert run["reason"].endswith("(idle_after: 120 s)")
    assert run["checkpoints"][-1]["why"] == "stop"
    assert run["checkpoints"][-1]["step"] == run["step"]
    assert site.json("sync")["started"] == []
