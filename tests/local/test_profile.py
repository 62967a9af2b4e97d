"""Steps that are traced by torch's profiler, and ranks under a stand-in for nsys."""

from __future__ import annotations

import gzip
import json
import os
import stat
from pathlib import Path
from typing import Any

from helpers.nsys import write_nsys
from helpers.rare import rare
from helpers.site import Site, until

TWO = {"nodes": 1, "procs_per_node": 2, "time": "00:05:00"}
STEPS = {"steps": 40, "step_ms": 80}


def weights(site: Site, run_id: str) -> set[str]:
    return {line.split()[1] for line in site.printed(run_id) if line.startswith("weights ")}


def traced(run: dict[str, Any]) -> list[tuple[int, int, int]]:
    return sorted((each["rank"], each["first"], each["last"]) for each in run["profiles"])


@rare
def test_steps_are_traced_once_and_again_only_if_a_stop_left_no_trace(site: Site) -> None:
    plain = site.submit(site.spec("plain", params={**STEPS, "step_ms": 0}, resources=TWO))
    spec = site.spec("traced", params=STEPS, resources=TWO, profile={"steps": [8, 36]})
    run_id = site.submit(spec)
    until(lambda: site.step(run_id) > 10, "some traced steps")
    site.call("cancel", run_id)
    stopped = site.show(run_id)
    assert (stopped["state"], stopped["profiles"]) == ("cancelled", [])
    assert 10 < stopped["step"] < 36
    site.call("resume", run_id)
    assert site.until_state(run_id, "completed")["step"] == 40
    run = site.show(run_id)
    # Two ranks on one node: both, or rank 0 alone if it is the slower one.
    assert traced(run) in ([(0, stopped["step"], 36)], [(rank, stopped["step"], 36) for rank in range(2)])
    for profile in run["profiles"]:
        path = Path(profile["path"])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert (profile["tool"], profile["attempt"], profile["bytes"]) == ("torch", 2, path.stat().st_size)
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = {event.get("name") for event in events}
        assert {f"step {stopped['step']}", "step 35", "aten::linear"} <= names
        assert "step 36" not in names
    assert f"rank 0, steps {stopped['step']} to 36" in " ".join(site.call("show", run_id).stdout.split())
    # Neither the profiler nor the stop has changed a bit.
    site.until_state(plain, "completed")
    assert weights(site, run_id) == weights(site, plain)


def test_a_command_under_nsys_stops_and_completes_as_without_it(site: Site, tmp_path: Path) -> None:
    program, calls = write_nsys(tmp_path / "bin"), tmp_path / "calls"
    program.chmod(0o644)
    without = site.environment()["PATH"]
    present = {"PATH": f"{program.parent}{os.pathsep}{without}", "NSYS_CALLS": str(calls)}
    spec = site.light("nsys", params=STEPS, profile="nsys", requeue={"enabled": False})
    failed = site.submit(spec)
    reason = site.until_state(failed, "failed")["reason"]
    assert "'profile: nsys' needs nsys (NVIDIA Nsight Systems), which is not on PATH on this node" in reason
    program.chmod(0o755)
    run_id = site.submit(spec, env=present)
    until(lambda: site.step(run_id) > 4, "some steps")
    site.call("cancel", run_id)
    stopped = site.show(run_id)
    assert (stopped["state"], stopped["attempts"][0]["cause"]) == ("cancelled", "cancelled")
    assert stopped["checkpoints"][-1]["why"] == "stop"
    site.call("resume", run_id, env=present)
    assert site.until_state(run_id, "completed")["step"] == 40
    run = site.show(run_id)
    reports = [Path(each["path"]).name for each in run["profiles"]]
    assert reports == ["rank-0.nsys-rep"]
    assert {(each["tool"], each["attempt"], each["rank"]) for each in run["profiles"]} == {("nsys", 1, None)}
    # The second attempt has no need of a report.
    lines = calls.read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("profile -o ")
    assert " --force-overwrite=true " in lines[0]
