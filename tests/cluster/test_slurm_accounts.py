"""What another account of the cluster learns of a running job, and what it can do to it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import events

SECRET = "tok-4711-of-the-owner"
# The account nobody, which every machine has and whose processes own nothing.
NOBODY = 65534


def as_nobody(cluster: Cluster, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as another account than the job's owner."""
    environ = {"PATH": f"{cluster.programs}:/usr/bin:/bin", "SLURM_CONF": cluster.conf}
    return subprocess.run(
        command, cwd="/", env=environ, capture_output=True, text=True, errors="replace", timeout=120, check=False,
        user=NOBODY, group=NOBODY, extra_groups=[],
    )  # fmt: skip


@pytest.fixture(scope="module")
def running(shared_site: ClusterSite) -> Iterator[tuple[ClusterSite, str]]:
    """A run of two nodes with a secret in its environment, which trains until the module's last test has ended."""
    spec = shared_site.light(
        params={"steps": 100000, "step_ms": 50}, resources={"nodes": 2, "procs_per_node": 1, "time": "00:10:00"},
        env={"MY_TOKEN": SECRET},
    )  # fmt: skip
    run_id = shared_site.submit(spec)
    shared_site.until_step(run_id, 2)
    yield shared_site, run_id
    shared_site.call("cancel", run_id, "--force")


def test_slurm_shows_another_account_the_job_but_neither_script_nor_secrets(running: tuple[ClusterSite, str]) -> None:
    site, run_id = running
    job = site.job(run_id)
    shown = as_nobody(site.cluster, "scontrol", "-dd", "show", "job", job).stdout
    assert run_id in shown
    assert str(site.runs / run_id) in shown
    listed = as_nobody(site.cluster, "squeue", "--noheader", "--format=%all").stdout
    accounted = as_nobody(site.cluster, "sacct", "--allusers", "--parsable2", "--format=ALL", f"--jobs={job}").stdout
    script = as_nobody(site.cluster, "scontrol", "write", "batch_script", job, "-")
    assert run_id in listed
    assert run_id in accounted
    assert script.stdout == ""
    assert SECRET not in shown + listed + accounted
    assert "SLURMTRAIN_" not in shown + listed + accounted


def test_command_lines_of_a_job_hold_no_secrets_and_its_environment_is_not_readable(
    running: tuple[ClusterSite, str],
) -> None:
    site, run_id = running
    pids = [int(worker["pid"]) for event in events(site, run_id, "workers") for worker in event["processes"].values()]
    assert len(pids) == 2
    secrets = {SECRET, *secrets_of(pids[0])}
    read = as_nobody(site.cluster, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'").stdout
    assert str(site.runs / run_id) in read
    assert [secret for secret in secrets if secret in read] == []
    for pid in pids:
        assert as_nobody(site.cluster, "cat", f"/proc/{pid}/environ").stdout == ""


def secrets_of(rank: int) -> set[str]:
    """Secret values in the environments of a rank and of all processes above it, by the names of their variables."""
    values = set()
    pid = rank
    while pid > 1:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        pairs = [variable.partition("=")[::2] for variable in variables]
        values |= {value for name, value in pairs if name.endswith(("SECRET", "TOKEN")) and value}
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return values


def test_another_account_reads_nothing_of_a_run_and_no_copy_that_slurm_keeps(running: tuple[ClusterSite, str]) -> None:
    site, run_id = running
    assert as_nobody(site.cluster, "ls", str(site.runs / run_id)).returncode != 0
    copies = as_nobody(
        site.cluster, "grep", "-rlF", "-e", SECRET, "-e", f"slurmtrain run {run_id}", kept_by_slurm(site.cluster)
    )
    assert copies.stdout == ""


def kept_by_slurm(cluster: Cluster) -> str:
    """The directory in which this cluster's daemons keep jobs, scripts and logs."""
    return str(Path(cluster.conf).parent)


def test_another_account_cannot_end_signal_or_change_a_job(running: tuple[ClusterSite, str]) -> None:
    site, run_id = running
    job = site.job(run_id)
    for command in (
        ("scancel", job), ("scancel", "--signal=USR2", job), ("scontrol", "requeue", job),
        ("scontrol", "update", f"JobId={job}", "TimeLimit=1"),
    ):  # fmt: skip
        assert as_nobody(site.cluster, *command).returncode != 0, command
    assert site.cluster.state(job) == "RUNNING"
