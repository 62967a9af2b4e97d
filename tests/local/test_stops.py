"""What a stop makes of a run whose script does not use the library: it goes on, and nothing of it is left behind."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.site import SCRIPTS, Site, until

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
        until(lambda: "saved" in "".join(site.printed(run_id)), "the save")
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
    assert "saved" in "".join(site.printed(run_id))
    site.call("sync")
    assert len(site.show(run_id)["attempts"]) == 1


def test_a_script_whose_exit_code_0_always_means_completion_completes_when_it_is_asked_to_stop(site: Site) -> None:
    run_id = site.submit(obedient(site, exit_zero="completed"))
    site.wait_for_lines(run_id)
    site.signal_all(run_id, signal.SIGTERM)
    until(lambda: not site.processes(run_id), "the end of all processes")
    assert site.status(run_id)["state"] == "completed"


def test_a_script_that_finishes_just_when_it_is_asked_to_stop_completes_in_another_attempt(site: Site) -> None:
    run_id = site.submit(obedient(site))
    site.wait_for_lines(run_id)
    site.signal_all(run_id, signal.SIGTERM)
    until(lambda: not site.processes(run_id), "the end of all processes")
    # It had in fact done everything.
    (site.runs / run_id / "step").write_text(str(ENDLESS))
    site.call("sync")
    site.call("wait", run_id)
    run = site.show(run_id)
    assert run["state"] == "completed"
    assert [attempt["cause"] for attempt in run["attempts"]] == ["preempted", "completed"]
