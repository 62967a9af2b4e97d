"""A real Slurm cluster to measure on, and a record of each call of Slurm's commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from _measure import ROOT, environment, run_quietly, say, try_quietly, wait_until

NAME = "bench"
PATIENCE_S = 120.0
_COMMANDS = ("sbatch", "srun", "squeue", "sacct", "scontrol", "scancel", "sinfo", "sstat", "sacctmgr")


class NoCluster(Exception):
    """There is no Slurm cluster to measure on, and none can be started here; the message says why."""


@dataclass(frozen=True)
class Cluster:
    """A cluster.

    ``job_name``: a prefix that only this benchmark's jobs have; ``name``: what scripts/cluster calls the cluster, empty
    if it is another one.
    """

    conf: str
    job_name: str
    name: str

    def ask(self, *command: str) -> str:
        """Run one of Slurm's commands and return its standard output."""
        return run_quietly(command, SLURM_CONF=self.conf, SLURM_TIME_FORMAT="%s")

    def jobs(self) -> list[str]:
        """This benchmark's jobs that have not ended, including those whose nodes are still being freed."""
        lines = self.ask("squeue", "--me", "--noheader", "--format=%A|%j").splitlines()
        return sorted({job for job, name in (line.split("|", 1) for line in lines) if name.startswith(self.job_name)})

    def wait_until_free(self) -> None:
        """Wait until no job of this benchmark holds a node any more."""
        wait_until(lambda: not self.jobs(), "jobs did not end", PATIENCE_S)

    def cancel(self) -> None:
        """End this benchmark's jobs."""
        if left := self.jobs():
            self.ask("scancel", *left)


@contextmanager
def cluster(purpose: str, nodes: int, *options: str) -> Iterator[Cluster]:
    """The cluster that SLURM_CONF names, otherwise our own for the duration of this context.

    ``options`` are those of ``scripts/cluster up``, which a cluster that runs already may lack. Raises NoCluster.
    """
    conf = os.environ.get("SLURM_CONF")
    if conf and not shutil.which("sbatch"):
        raise NoCluster("SLURM_CONF is set, but there is no sbatch on this machine's PATH")
    own = False if conf else _start(nodes, options)
    try:
        name = Path(conf).parent.name if conf else NAME
        own_conf = script("env", name=name).stdout.partition("SLURM_CONF=")[2].strip().strip("'\"")
        if conf and conf != own_conf:
            name = ""
        running = Cluster(conf or own_conf, f"bench-{purpose}-{os.getpid()}", name)
        try:
            yield running
        finally:
            running.cancel()
    finally:
        if own:
            script("down")


@contextmanager
def required_cluster(purpose: str, nodes: int, *options: str) -> Iterator[Cluster]:
    """The same for a benchmark that makes no sense without one: it ends with exit code 2."""
    try:
        with cluster(purpose, nodes, *options) as slurm:
            yield slurm
    except NoCluster as error:
        print(f"bench: {purpose} needs a Slurm cluster: {error}", file=sys.stderr)
        sys.exit(2)


def _start(nodes: int, options: Sequence[str]) -> bool:
    """Start the cluster; return whether it is new, and so must be stopped afterwards."""
    if os.geteuid() != 0:
        raise NoCluster(
            "only root can start a Slurm cluster on this machine; run it as root, or set SLURM_CONF to use another one"
        )
    exists = script("status").returncode == 0
    if exists and options:
        raise NoCluster(f"there is a cluster '{NAME}' already; set SLURM_CONF to use it")
    say(f"{'using' if exists else 'starting'} the cluster '{NAME}' (scripts/cluster)")
    completed = script("up", "--nodes", str(nodes), *options)
    if completed.returncode != 0:
        if not exists:
            script("down")
        raise NoCluster(f"scripts/cluster could not start one: {problem_of(completed)}")
    return not exists


def script(*arguments: str, name: str = NAME) -> subprocess.CompletedProcess[str]:
    """Run scripts/cluster."""
    return try_quietly([sys.executable, str(ROOT / "scripts" / "cluster"), *arguments, "--name", name])


def problem_of(process: subprocess.CompletedProcess[str]) -> str:
    """Why a process failed, in a line; empty if it did not."""
    lines = process.stderr.strip().splitlines() or ["it does not say why"]
    return lines[-1] if process.returncode != 0 else ""


class Recorder:
    """Wrappers around Slurm's commands, first on PATH, which record the name and time of each call.

    A job inherits PATH, so calls from a batch script are recorded too.
    """

    def __init__(self, folder: Path) -> None:
        self._calls = folder / "calls"
        self._programs = folder / "recorded"
        self._programs.mkdir()
        for name in _COMMANDS:
            real = shutil.which(name)
            wrapper = self._programs / name
            then = f'exec {real} "$@"' if real else "exit 127"
            wrapper.write_text(f"#!/bin/sh\necho {name} $(date +%s.%N) >>'{self._calls}'\n{then}\n")
            wrapper.chmod(0o755)

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables that a process needs for its calls to be recorded."""
        return {"PATH": f"{self._programs}{os.pathsep}{environment()['PATH']}"}

    def take(self) -> Sequence[tuple[str, float]]:
        """Names and times of the calls since the previous call of this method."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return [(name, float(at)) for name, at in map(str.split, lines)]
