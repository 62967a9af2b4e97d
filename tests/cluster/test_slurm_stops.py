"""Scripts without a session on a real cluster, where Slurm sends its signals to all processes of a step."""

from __future__ import annotations

import json
import os
import signal

import psutil
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import SPOT, events, pid_of, preempt
from helpers.site import ONE_PROCESS, until

# More steps than any test waits for.
ENDLESS = 1_000_000


def test_a_preempted_script_whose_data_loader_has_workers_loses_no_step(site: ClusterSite, cluster: Cluster) -> None:
    command = f"python {site.scripts / 'loading.py'} {{run_dir}} fork persistent"
    spec = site.commanding(command, "loading", slurm=SPOT, env=site.with_entry_points(site.person.code))
    run_id = site.submit(spec)
    steps = site.runs / run_id / "steps.jsonl"
    until(lambda: steps.exists() and len(steps.read_text().splitlines()) > 60, "the second epoch")
    preempt(cluster, lambda: events(site, run_id, "requeue"))
    until(lambda: len([line for line in site.printed(run_id) if line.startswith("from ")]) == 2, "the second attempt")
    before, saved, after = site.printed(run_id)
    assert (before, saved.split()[0], after.split()[1]) == ("from 0", "saved", saved.split()[1])
    site.call("cancel", run_id)
    trained = [int(line) for line in steps.read_text().splitlines()]
    assert trained == list(range(1, len(trained) + 1))
    first, second = site.show(run_id)["attempts"]
    assert (first["cause"], second["cause"]) == ("preempted", "cancelled")


def test_a_script_in_a_pipeline_saves_and_nothing_of_a_round_or_an_attempt_outlives_it(
    site: ClusterSite, cluster: Cluster
) -> None:
    script = f"python {site.scripts / 'obedient.py'} {{run_dir}}/step {ENDLESS} SIGUSR1"
    daemon = "(setsid env -i sleep 98765 &)"
    spec = site.commanding(
        f'bash -c "{daemon}; {script} | tee -a {{run_dir}}/tee.log"', "pipeline",
        slurm=SPOT, requeue={"signal": "SIGUSR1", "backoff_s": 1}, resources={**ONE_PROCESS, "nodes": 2},
    )  # fmt: skip
    run_id = site.submit(spec)
    tee = site.runs / run_id / "tee.log"

    def lines_of(word: str) -> list[str]:
        return [line for line in (tee.read_text().splitlines() if tee.exists() else ()) if line.startswith(word)]

    def daemons() -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["cmdline"]) if "98765" in (each.info["cmdline"] or [])]

    until(lambda: len(lines_of("pid ")) == 2, "both scripts")
    old = [int(line.split()[1]) for line in lines_of("pid ")]
    old += [each.pid for each in daemons()]
    assert len(old) == 4
    os.kill(pid_of(site, run_id, 1), signal.SIGKILL)
    until(lambda: events(site, run_id, "restart"), "the restart in place")
    assert [pid for pid in old if psutil.pid_exists(pid)] == []
    until(lambda: len(lines_of("pid ")) == 4, "both scripts of the second round")

    preempt(cluster, lambda: events(site, run_id, "requeue"))
    until(lambda: len(lines_of("pid ")) == 6, "both scripts of the second attempt")
    assert len(lines_of("saving")) >= 2
    assert len(daemons()) == 2
    site.call("cancel", run_id)
    assert site.status(run_id)["state"] == "cancelled"
    until(lambda: not daemons(), "the end of the daemons")
    [put] = events(site, run_id, "requeue")
    assert put["cause"] == "preempted", json.dumps(put)
