"""What a stop makes of a run whose script does not use the library: it goes on, and nothing of it is left behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.rare import rare
from helpers.site import ONE_PROCESS, PROJECT, SCRIPTS, Site, until

from slurmtrain.runtime.agent import workers

# How data loaders start their workers, and whether these outlive an epoch.
LOADERS = [("spawn", "persistent"), ("fork", "plain")]
# More steps than any test waits for.
ENDLESS = 1_000_000


def obedient(site: Site, steps: int = ENDLESS, **requeue: Any) -> Path:
    """A spec for a script that exits with 0 when it is asked to stop."""
    command = f"python {SCRIPTS / 'obedient.py'} {{run_dir}}/step {steps}"
    return site.commanding(command, "obedient", requeue=requeue)


# --- what exit code 0 means -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_all", [True, False], ids=["to-all", "to-the-rank-first"])
def test_a_script_that_exits_with_0_when_it_is_asked_to_stop_is_started_again(site: Site, to_all: bool) -> None:
    run_id = site.submit(obedient(site))
    site.wait_for_lines(run_id)
    if to_all:
        site.signal_all(run_id, signal.SIGTERM)
    else:
        # In the order in which a signal to all processes may arrive: the rank has exited before its agent hears of it.
        agents = [each for each in site.processes(run_id) if "obedient.py" not in " ".join(each.cmdline())]
        [rank] = [each for each in site.processes(run_id) if each not in agents]
        rank.send_signal(signal.SIGTERM)
        until(lambda: "saving" in "".join(site.printed(run_id)), "the save")
        for agent in agents:
            agent.send_signal(signal.SIGTERM)
    until(lambda: not site.processes(run_id), "the end of all processes")
    stopped = site.status(run_id)
    assert (stopped["state"], site.show(run_id)["attempts"][0]["cause"]) == ("requeued", "preempted")
    kept = int((site.runs / run_id / "step").read_text())

    site.call("sync")
    until(lambda: f"from {kept}" in site.printed(run_id), "the second attempt")
    site.call("cancel", run_id)
    assert site.status(run_id)["state"] == "cancelled"


def test_a_script_that_exits_with_0_when_it_is_cancelled_has_been_cancelled(site: Site) -> None:
    run_id = site.submit(obedient(site))
    site.wait_for_lines(run_id)
    site.call("cancel", run_id)
    run = site.show(run_id)
    assert (run["state"], run["attempts"][0]["cause"]) == ("cancelled", "cancelled")
    assert "saving" in "".join(site.printed(run_id))
    site.call("sync")
    assert len(site.show(run_id)["attempts"]) == 1


# --- who hears the stop signal --------------------------------------------------------------------------------------


OBEDIENT = f"python {SCRIPTS / 'obedient.py'} {{run_dir}}/step {ENDLESS}"


@pytest.mark.parametrize(
    "script",
    [
        f"true && {OBEDIENT} 2>&1 | tee {{run_dir}}/tee.log",
        f"{OBEDIENT}; echo over",
        f"trap 'echo trapped' TERM; {OBEDIENT}; echo over",
    ],
    ids=["pipe", "list", "trap"],
)
def test_a_script_that_a_shell_has_started_hears_the_stop_and_saves(site: Site, script: str) -> None:
    run_id = site.submit(site.commanding(f'bash -c "{script}"', "shell"))
    until(lambda: "from 0" in "".join(site.printed(run_id)), "the start of the script")
    site.call("cancel", run_id)
    assert site.status(run_id)["state"] == "cancelled"
    assert int((site.runs / run_id / "step").read_text()) >= 0
    assert "saving" in "".join(site.printed(run_id))
    assert not site.processes(run_id)
    tee = site.runs / run_id / "tee.log"
    assert not tee.exists() or "saving" in tee.read_text()


@pytest.mark.slow
def test_a_script_has_the_whole_grace_though_a_signal_to_all_processes_has_ended_its_shell(site: Site) -> None:
    save_s = workers.CRASH_GRACE_S + 2
    script = f"SAVE_S={save_s} {OBEDIENT}; echo over"
    run_id = site.submit(site.commanding(f'bash -c "{script}"', "slow"))
    until(lambda: pids(site, run_id), "the start of the script")
    site.signal_all(run_id, signal.SIGTERM)
    until(lambda: not site.processes(run_id), "the end of all processes")
    assert (site.runs / run_id / "step").exists(), site.printed(run_id)
    assert "over" not in site.printed(run_id)
    assert site.status(run_id)["state"] == "requeued"


def pids(site: Site, run_id: str) -> list[int]:
    """The processes of the scripts that have said who they are."""
    return [int(line.split()[1]) for line in site.printed(run_id) if line.startswith("pid ")]


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_workers_of_a_torchrun_hear_a_stop_through_it_and_do_not_outlive_it(site: Site) -> None:
    command = f"python -m torch.distributed.run {SCRIPTS / 'obedient.py'} {{run_dir}}/step {ENDLESS}"
    run_id = site.submit(site.spec("torchrun", command=command, resources={**ONE_PROCESS, "procs_per_node": 2}))
    until(lambda: len(pids(site, run_id)) == 2, "both workers")
    # Each has a session of its own, so it is in nobody's process group.
    first = pids(site, run_id)
    [launcher] = {psutil.Process(pid).ppid() for pid in first}
    assert {os.getsid(pid) for pid in first} == set(first)
    psutil.Process(launcher).kill()
    until(lambda: site.show(run_id)["attempts"][0]["restarts"], "the restart")
    assert [lives(pid) for pid in first] == [False, False]
    # They were asked to stop before they were killed.
    assert sum(line.startswith("saving") for line in site.printed(run_id)) == 2

    until(lambda: len(pids(site, run_id)) == 4, "the workers of the second round")
    site.call("cancel", run_id)
    assert site.status(run_id)["state"] == "cancelled"
    assert sum(line.startswith("saving") for line in site.printed(run_id)) == 4
    assert not site.processes(run_id)


# --- what is left behind --------------------------------------------------------------------------------------------


def leftovers(site: Site, run_id: str) -> list[dict[str, Any]]:
    """The events about processes that were killed because ranks had left them behind."""
    lines = [line for path in (site.runs / run_id).rglob("node-*.jsonl") for line in path.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event["kind"] == "leftovers"]


@pytest.mark.slow
def test_daemons_of_a_round_are_gone_before_the_next_one_starts_and_at_the_end(site: Site) -> None:
    script = f"python {SCRIPTS / 'litter.py'} {{run_dir}}"
    spec = site.commanding(script, "litter", checkpoint={"glob": "{run_dir}/ckpt-*.txt"})
    run_id = site.submit(spec, "--wait")
    assert site.status(run_id)["state"] == "completed"
    assert [line for line in site.printed(run_id) if line.startswith("survivors")] == ["survivors: []"]
    until(lambda: not site.processes(run_id), "the end of all processes")
    events = leftovers(site, run_id)
    # The other one has ended when it was asked to.
    assert [len(event["killed"]) for event in events] == [1, 1]
    assert [event["remaining"] for event in events] == [[], []]


def orphaned(site: Site, **requeue: Any) -> tuple[str, int]:
    """A run whose agent was killed while the script trains on; and the script's process id."""
    run_id = site.submit(site.commanding(f'bash -c "{OBEDIENT}; echo over"', "orphan", requeue=requeue))
    until(lambda: pids(site, run_id), "the start of the script")
    [script] = pids(site, run_id)
    for process in site.processes(run_id):
        if process.pid != script:
            process.kill()
    until(lambda: [process.pid for process in site.processes(run_id)] == [script], "the end of the agent")
    return run_id, script


def test_what_a_killed_agent_has_left_behind_is_ended_before_the_run_trains_again(site: Site) -> None:
    run_id, script = orphaned(site)
    # Not by sync, which also ends what is left.
    site.call("resume", run_id, "--from-start")
    until(lambda: len(pids(site, run_id)) == 2, "the second attempt")
    assert not lives(script)
    [event] = leftovers(site, run_id)
    assert f"(pid {script})" in event["killed"][0]
    site.call("cancel", run_id)
    assert not site.processes(run_id)


def test_sync_ends_what_a_killed_agent_has_left_behind_even_if_the_run_is_not_started_again(site: Site) -> None:
    run_id, script = orphaned(site, enabled=False)
    synced = site.call("sync")
    assert f"run {run_id}: killed processes that its last attempt had left running: " in synced.stderr
    assert f"(pid {script})" in synced.stderr
    assert not lives(script)
    assert site.status(run_id)["state"] == "lost"
    assert "killed" not in site.call("sync").stderr


@pytest.mark.parametrize("force", [["--force"], []], ids=["forced", "asked"])
def test_cancel_ends_what_a_killed_agent_has_left_behind(site: Site, force: list[str]) -> None:
    run_id, script = orphaned(site)
    site.call("cancel", run_id, *force)
    assert not lives(script)
    assert site.status(run_id)["state"] == "cancelled"


def test_a_forced_cancel_ends_the_whole_tree(site: Site) -> None:
    script = f"(setsid {OBEDIENT} &); {OBEDIENT} | cat"
    run_id = site.submit(site.commanding(f'bash -c "{script}"', "tree"))
    until(lambda: len(pids(site, run_id)) == 2, "both processes")
    site.call("cancel", run_id, "--force")
    assert site.status(run_id)["state"] == "cancelled"
    assert not site.processes(run_id)


# --- data loaders ---------------------------------------------------------------------------------------------------


@rare
@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), LOADERS)
def test_a_script_without_a_session_whose_loader_has_workers_loses_no_step_to_a_signal_to_all_processes(
    site: Site, method: str, kind: str
) -> None:
    command = f"python {SCRIPTS / 'loading.py'} {{run_dir}} {method} {kind}"
    run_id = site.submit(site.commanding(command, "loading", env=site.with_entry_points(PROJECT)))
    steps = site.runs / run_id / "steps.jsonl"
    for attempt in (1, 2):
        before = len(steps.read_text().splitlines()) if steps.exists() else 0
        # So that a worker has been started anew for the second epoch, unless workers persist.
        until(lambda before=before: steps.exists() and len(steps.read_text().splitlines()) > before + 60, "steps")
        site.signal_all(run_id, signal.SIGTERM)
        until(lambda: not site.processes(run_id), "the end of all processes")
        last = int(steps.read_text().splitlines()[-1])
        assert f"saved {last}" in site.printed(run_id), site.printed(run_id)
        assert site.show(run_id)["attempts"][attempt - 1]["cause"] == "preempted"
        if attempt == 1:
            site.call("sync")
    trained = [int(line) for line in steps.read_text().splitlines()]
    assert trained == list(range(1, len(trained) + 1))
