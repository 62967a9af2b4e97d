"""What interrupts the local runs of tests: each fault strikes after a save, and leaves the run about to train again."""

from __future__ import annotations

import signal
from collections.abc import Callable

from helpers.site import Site, until
from helpers.trainers import SAVE_EVERY, trained_steps


def has_saved(site: Site, run_id: str) -> bool:
    """Whether a run has saved, and trained at least a step since. Fails if it has crashed."""
    printed = site.printed(run_id)
    assert not any("Traceback" in line for line in printed), "\n".join(printed)
    return trained_steps(site, run_id) > SAVE_EVERY + 1


def preempt(site: Site, run_id: str) -> None:
    """Send SIGTERM to every process of the run, data-loader workers included, as Slurm does."""
    until(lambda: has_saved(site, run_id), "a checkpoint")
    site.signal_all(run_id, signal.SIGTERM)
    until(lambda: not site.processes(run_id), "the end of all processes")
    assert site.status(run_id)["state"] == "requeued"
    site.call("sync")


def kill(site: Site, run_id: str) -> None:
    """Kill everything."""
    until(lambda: has_saved(site, run_id), "a checkpoint")
    _kill_all(site, run_id)
    site.call("resume", run_id)


def kill_in_save(site: Site, run_id: str, is_saving: Callable[[], bool]) -> None:
    """Kill everything while the second checkpoint ``is_saving``."""
    until(lambda: has_saved(site, run_id), "a checkpoint")
    until(is_saving, "half a checkpoint")
    _kill_all(site, run_id)
    assert is_saving(), "the save was over before the kill"
    site.call("resume", run_id)


def cancel(site: Site, run_id: str) -> None:
    """Cancel the run, and resume it once it has ended."""
    until(lambda: has_saved(site, run_id), "a checkpoint")
    site.call("cancel", run_id)
    until(lambda: not site.processes(run_id), "the end of all processes")
    assert site.status(run_id)["state"] == "cancelled"
    site.call("resume", run_id)


def _kill_all(site: Site, run_id: str) -> None:
    site.signal_all(run_id, signal.SIGKILL)
    assert site.status(run_id)["state"] != "completed"
