"""A real Slurm cluster to measure on, and a record of each call of Slurm's commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from _measure import ROOT, environment, say

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
        environ = environment(SLURM_CONF=self.conf)
        completed = subprocess.run(
            command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if completed.returncode != 0:
            sys.exit(
                f"bench: {' '.join(command)} failed ({completed.returncode}):\n{completed.stdout}{completed.stderr}"
            )
        return completed.stdout

    def jobs(self) -> list[str]:
        """This benchmark's jobs that have not ended, including those whose nodes are still being freed."""
        lines = self.ask("squeue", "--me", "--noheader", "--format=%A|%j").splitlines()
        return sorted({job for job, name in (line.split("|", 1) for line in lines) if name.startswith(self.job_name)})

    def wait_until_free(self) -> None:
        """Wait until no job of this benchmark holds a node any more."""
        deadline = time.monotonic() + PATIENCE_S
        while left := self.jobs():
            if time.monotonic() > deadline:
                sys.exit(f"bench: job {left[0]} did not end within {PATIENCE_S:.0f} s")
            time.sleep(0.5)

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
        own_conf = _conf(name)
        if conf and conf != own_conf:
            name = ""
        running = Cluster(conf or own_conf, f"bench-{purpose}-{os.getpid()}", name)
        try:
            yield running
        finally:
            running.cancel()
    finally:
        if own:
            _script("down")


def _start(nodes: int, options: Sequence[str]) -> bool:
    """Start the cluster; return whether it is new, and so must be stopped afterwards."""
    if os.geteuid() != 0:
        raise NoCluster(
            "only root can start a Slurm cluster on this machine; run it as root, or set SLURM_CONF to use another one"
        )
    exists = _script("status").returncode == 0
    if exists and options:
        raise NoCluster(f"there is a cluster '{NAME}' already; set SLURM_CONF to use it")
    say(f"{'using' if exists else 'starting'} the cluster '{NAME}' (scripts/cluster)")
    completed = _script("up", "--nodes", str(nodes), *options)
    if completed.returncode != 0:
        if not exists:
            _script("down")
        problem = (completed.stderr.strip().splitlines() or ["it does not say why"])[-1]
        raise NoCluster(f"scripts/cluster could not start one: {problem}")
    return not exists


def _conf(name: str) -> str:
    """The SLURM_CONF of a cluster of scripts/cluster, empty if it has none of this name."""
    variables = _script("env", name=name).stdout
    return variables.partition("SLURM_CONF=")[2].strip().strip("'\"")


def _script(*arguments: str, name: str = NAME) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "cluster"), *arguments, "--name", name],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


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
        try:
            lines = self._calls.read_text().splitlines()
        except FileNotFoundError:
            return []
        self._calls.unlink()
        return [(name, float(at)) for name, at in map(str.split, lines)]
