"""Runs whose directory is deleted, or whose disk is full, while they train: they are ended, and no command fails."""

from __future__ import annotations

import shutil
from pathlib import Path

from helpers.full_disk import small_disk
from helpers.site import Site, until


def without_slurm(site: Site) -> dict[str, str]:
    """An environment in which no command of Slurm's is found: with one, it would be asked for the run's job."""
    return {"PATH": str(Path(site.python).parent)}


def delete_unnoticed(site: Site, run_id: str) -> None:
    """Delete a run's directory, and suspend its processes: they would notice it after a while, and end themselves."""
    site.wait_for_lines(run_id)
    processes = site.processes(run_id)
    assert processes
    for process in processes:
        process.suspend()
    shutil.rmtree(site.runs / run_id)


def test_a_run_whose_directory_was_deleted_is_listed_until_it_is_cancelled_which_ends_its_processes(site: Site) -> None:
    run_id = site.submit(site.steady())
    delete_unnoticed(site, run_id)
    assert "its directory was deleted" in site.call("status", run_id).stdout
    cancelled = site.call("cancel", run_id, "--force")
    assert f"run {run_id} is cancelled: its job was ended; its directory was deleted" in cancelled.stderr
    assert site.processes(run_id) == []
    assert run_id not in site.call("status", "--all").stdout
    site.call("sync")
    assert f"there is no run '{run_id}' here" in site.call("cancel", run_id, code=2, env=without_slurm(site)).stderr


def test_a_deleted_run_that_the_registry_does_not_know_is_cancelled_by_its_id(site: Site) -> None:
    run_id = site.submit(site.steady())
    delete_unnoticed(site, run_id)
    (site.runs / "registry.db").unlink()
    [run] = site.json("cancel", run_id, "--force")["runs"]
    assert (run["id"], run["state"]) == (run_id, "cancelled")
    assert site.processes(run_id) == []
    again = site.call("cancel", run_id, code=2, env=without_slurm(site))
    assert f"there is no run '{run_id}' here, and it has no job or process" in again.stderr


def test_on_a_full_disk_a_run_is_cancelled_by_name_and_the_warning_says_what_is_not_recorded(
    site: Site,
) -> None:
    with small_disk(site.runs, "16m") as disk:
        run_id = site.submit(site.steady("steady", preflight={"disk": "off"}))
        site.wait_for_lines(run_id)
        disk.leave(0)
        cancelled = site.call("cancel", "steady")
        assert (
            f"run {run_id} is cancelled: its job was ended; the cancellation could not be recorded (no space left"
            in cancelled.stderr
        )
        assert site.processes(run_id) == []
        disk.free()
        site.call("cancel", run_id)
        site.call("sync")
        assert site.status(run_id)["state"] == "cancelled"


def test_the_agents_of_a_run_whose_directory_was_deleted_end_its_ranks_and_make_nothing_anew(site: Site) -> None:
    spec = site.light(params={"steps": 100_000, "step_ms": 10}, checkpoint={"every": {"minutes": 60}})
    run_id = site.submit(spec)
    until(lambda: site.step(run_id) > 60, "steps")
    [output] = (site.runs / run_id).glob("submissions/1/submitit/*_log.out")
    with output.open() as log:
        while (site.runs / run_id).exists():
            shutil.rmtree(site.runs / run_id, ignore_errors=True)
        until(lambda: not site.processes(run_id), "the end of all processes")
        [line] = [line for line in log.read().splitlines() if line.startswith("slurmtrain: ")]
    assert line == (
        f"slurmtrain: the run directory {site.runs / run_id} was deleted: the ranks can no longer "
        "save, so they are stopped"
    )
    assert not (site.runs / run_id).exists()
