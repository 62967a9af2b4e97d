"""SIGKILL at any effect of a command: the next one puts it right. No orphan job, no job twice, no run lost.

Every run asks to be held, so that its job waits for ever and can be counted. By default a spread of points is tried;
TEST_KILLS=all tries every one.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from helpers.cluster import REPOSITORY, Cluster, ClusterSite
from helpers.site import until

from slurmtrain.model.run.layout import RunsRoot, is_run_id, is_unborn

COMMAND = "slurmtrain"
LAUNCHER = "slurmtrain.slurm.sbatch_process"
SPREAD = 4


def changes_jobs(effect: str) -> bool:
    """Whether a command may change what Slurm knows: not one that asks Slurm, or git."""
    starts = "Popen" in effect or "spawn" in effect
    return starts and any(program in effect for program in ("python", "sbatch", "scancel", "scontrol"))


class Killing:
    """Commands that die at a chosen effect."""

    def __init__(self, site: ClusterSite) -> None:
        self.site = site
        self.log = site.path / "effects"
        # A directory in which nothing changes: each submission has the same effects.
        project = site.path / "project"
        project.mkdir()
        os.chown(project, site.person.uid, site.person.gid)
        resources = {"nodes": 1, "time": "00:05:00"}
        self.spec = site.spec("held", slurm={"hold": True}, resources=resources, workdir=str(project))
        self.hooks = site.person.code / "killer"
        if not self.hooks.exists():
            subprocess.run(["cp", "-r", str(REPOSITORY / "tests" / "helpers" / "killer"), str(self.hooks)], check=True)
            subprocess.run(["chmod", "-R", "go+rX", str(self.hooks)], check=True)

    def call(self, *arguments: str, within: str, at: int = 0) -> int:
        """Run a command that dies right before this effect; returns its exit code."""
        environ = {
            "PYTHONPATH": f"{self.hooks}:{self.site.person.code}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "KILL_IN": within,
            "KILL_AT": str(at),
            "KILL_ROOT": str(self.site.runs),
            "KILL_LOG": str(self.log),
        }
        self.log.unlink(missing_ok=True)
        return self.site.call(*arguments, code=None, env=environ).returncode

    def submit_dying(self, *, within: str, at: int = 0) -> int:
        """Submit as :meth:`call` does, where the registry has taken in what the commands before have left.

        Otherwise their number of effects would depend on that.
        """
        self.site.call("status")
        return self.call("submit", str(self.spec), "--executor", "slurm", within=within, at=at)

    def effects(self) -> list[str]:
        """What the last command did, up to its end."""
        return self.log.read_text().splitlines()

    def points(self, effects: list[str]) -> list[int]:
        """Where to kill: everywhere, or a spread that has what changes jobs, and what follows it, in it."""
        if os.environ.get("TEST_KILLS") == "all":
            return list(range(1, len(effects) + 1))
        around = {i + more for i, what in enumerate(effects, 1) if changes_jobs(what) for more in (0, 1)}
        spread = {round(1 + i * (len(effects) - 1) / (SPREAD - 1)) for i in range(SPREAD)}
        return sorted(point for point in around | spread if point <= len(effects))

    def submit(self) -> str:
        """A held run, submitted in peace."""
        return self.site.submit(self.spec)

    def runs(self) -> list[str]:
        return sorted(path.name for path in self.site.runs.iterdir() if is_run_id(path.name))

    def settle(self) -> None:
        """What a person would do after a crash: ``sync``; half-made directories are swept once they are old enough."""
        self.site.call("sync")
        unborn = [path for path in self.site.runs.iterdir() if is_unborn(path.name)]
        for path in unborn:
            os.utime(path, (0, 0))
        self.site.call("sync")
        assert not [path.name for path in self.site.runs.iterdir() if is_unborn(path.name)]

    def all_jobs(self, cluster: Cluster) -> Counter[str]:
        """How many jobs Slurm ever had for each run of this site, by the run's id."""
        # squeue forgets a job some minutes after its end, accounting hears of one late.
        lines = cluster.slurm("squeue", "--noheader", "--array", "--states=all", "--format=%i|%j")
        options = ("--noheader", "--allocations", "--parsable2", "--allusers", "--starttime=now-1hour")
        lines += cluster.slurm("sacct", *options, "--format=JobID,JobName%60")
        return Counter(filter(None, map(self.run_of, dict.fromkeys(lines.splitlines()))))

    def run_of(self, line: str) -> str | None:
        """The run of a job, or of an element of a job array, as ``id|name``; None if no run here has it."""
        job_id, _, name = line.partition("|")
        run_id = name.rpartition("-")[2]
        index = job_id.partition("_")[2]
        element = RunsRoot(self.site.runs).array(run_id).element(int(index)) if index.isdigit() else None
        if element is not None and element.is_symlink():
            run_id = element.readlink().parents[1].name
        return run_id if run_id in self.runs() else None

    def orphans(self, cluster: Cluster) -> list[str]:
        """Held jobs that no run directory of this site knows."""
        lines = cluster.slurm("squeue", "--noheader", "--array", "--states=PENDING", "--format=%i|%j").splitlines()
        return [line for line in lines if self.run_of(line) is None]


@pytest.fixture
def killing(site: ClusterSite) -> Killing:
    return Killing(site)


def check_all_pending_once(killing: Killing, cluster: Cluster) -> None:
    runs = killing.runs()
    assert killing.all_jobs(cluster) == dict.fromkeys(runs, 1)
    assert killing.orphans(cluster) == []
    listed = killing.site.json("status")["runs"]
    assert {run["id"]: run["state"] for run in listed} == dict.fromkeys(runs, "pending")
    lines = cluster.slurm("squeue", "--noheader", "--array", "--format=%i|%j").splitlines()
    assert {killing.run_of(line): line.partition("|")[0] for line in lines} == {
        run["id"]: run["job_id"] for run in listed
    }


@pytest.mark.parametrize("within", [COMMAND, LAUNCHER])
def test_a_killed_submit_leaves_one_job_a_run(killing: Killing, cluster: Cluster, within: str) -> None:
    # The first time, it makes the registry, and remembers what the Python has.
    killing.submit_dying(within=within)
    assert killing.submit_dying(within=within) == 0
    effects = killing.effects()
    assert any("sbatch" in what or "Popen" in what or "spawn" in what for what in effects), effects
    for point in killing.points(effects):
        code = killing.submit_dying(within=within, at=point)
        assert code == (-9 if within == COMMAND else 1), (point, effects[point - 1])
    # A launcher that outlives the command is not hurried: it holds the run's lock until sbatch has answered.
    until(lambda: not _launchers(killing.site.runs), "the end of all launchers")
    killing.settle()
    check_all_pending_once(killing, cluster)


def test_a_killed_sync_submits_nothing_twice(killing: Killing, cluster: Cluster) -> None:
    killing.submit_dying(within=COMMAND)
    killing.submit_dying(within=COMMAND)
    before_sbatch = next(i for i, what in enumerate(killing.effects(), 1) if "Popen" in what and "python" in what)
    after_sbatch = next(i for i, what in enumerate(killing.effects(), 1) if "submitted" in what)

    def leave_orphans() -> None:
        assert killing.submit_dying(within=COMMAND, at=before_sbatch) == -9
        assert killing.submit_dying(within=COMMAND, at=after_sbatch) == -9

    leave_orphans()
    assert killing.call("sync", within=COMMAND) == 0
    for point in killing.points(killing.effects()):
        leave_orphans()
        killing.call("sync", within=COMMAND, at=point)
    until(lambda: not _launchers(killing.site.runs), "the end of all launchers")
    killing.settle()
    check_all_pending_once(killing, cluster)


def test_a_killed_cancel_is_finished_by_the_next_command(killing: Killing, cluster: Cluster) -> None:
    run_id = killing.submit()
    assert killing.call("cancel", run_id, within=COMMAND) == 0
    wish = next(i for i, what in enumerate(killing.effects(), 1) if '"kind":"cancel"' in what)
    points = killing.points(killing.effects())
    killed = {killing.submit(): point for point in points}
    for each, point in killed.items():
        killing.call("cancel", each, within=COMMAND, at=point)
    killing.settle()
    states = {run["id"]: run["state"] for run in killing.site.json("status")["runs"]}
    # Before the wish was written down nothing was asked for.
    expected = {each: "pending" if point <= wish else "cancelled" for each, point in killed.items()}
    assert states == {run_id: "cancelled", **expected}
    assert {name.rpartition("-")[2] for name in cluster.jobs().values()} == {
        each for each, state in expected.items() if state == "pending"
    }


def _launchers(runs: Path) -> list[str]:
    """Command lines of what may still submit a job of these runs."""
    launchers = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended
        if str(runs) in " ".join(words) and (LAUNCHER in words or Path(words[0]).name == "sbatch"):
            launchers.append(" ".join(words))
    return launchers
