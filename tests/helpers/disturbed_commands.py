"""Commands that are killed or run out of space in a sample home, and what must hold once others have followed them.

Jobs are processes that wait, so that they can be counted: see ``sample_home``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from helpers.command_judge import EXIT_CODES, Snapshot, judge, snapshot
from helpers.forked_commands import CommandLine, Ended, run_forked
from helpers.sample_home import SampleHome, copy_home
from slurmtrain.model.run.layout import is_run_id, is_unborn

_ALIVE = frozenset({"pending", "running"})


class DisturbedHome:
    """A copy of a sample whose jobs live until :func:`closing` ends them."""

    def __init__(self, home: SampleHome) -> None:
        self.home = home
        (home.slurm / "jobs-live").touch()
        self.before: Snapshot = snapshot(home.path)

    def call(self, *arguments: str, kill: Mapping[str, str] | None = None) -> Ended:
        """Run a command; unless it is killed, it must not print a traceback, hang, or exit in an undocumented way."""
        line = CommandLine(
            arguments=arguments,
            cwd=self.home.project,
            environ=self.home.environ(),
            python=str(self.home.python),
            limit_s=30.0,
            kill=kill or {},
        )
        ended = run_forked(line)
        if kill is None or ended.code != -signal.SIGKILL:
            assert b"Traceback" not in ended.errors, ended.errors.decode()
            assert not ended.hung, arguments
            assert ended.code in EXIT_CODES, (arguments, ended.code, ended.errors.decode())
        return ended

    def kill(self, arguments: Sequence[str], effect: int) -> Ended:
        """Run a command that dies right before this effect, counted from 1."""
        return self.call(*arguments, kill=self._killer(effect))

    def effects(self, arguments: Sequence[str]) -> list[str]:
        """What a command does that others could see, up to its end."""
        self.call(*arguments, kill=self._killer(0))
        return (self.home.slurm / "effects").read_text().splitlines()

    def _killer(self, effect: int) -> dict[str, str]:
        log = self.home.slurm / "effects"
        return {"KILL_AT": str(effect), "KILL_LOG": str(log), "KILL_ROOT": str(self.home.project)}

    def settle(self) -> None:
        """What a person does then: ``sync``; directories of unfinished submissions are swept once they are old."""
        self.call("sync")
        for path in self._entries(is_unborn):
            os.utime(path, (0, 0))
        self.call("sync")
        assert self._entries(is_unborn) == []

    def check(self, arguments: Sequence[str]) -> None:
        """Nothing was lost, every run is listed, and each has one job if its state says so, else none."""
        ended = self.call("status", "--all", "--json")
        assert ended.code == 0, ended.errors.decode()
        listed = {run["id"]: run for run in json.loads(ended.output)["runs"]}
        assert sorted(listed) == [path.name for path in self._entries(is_run_id)]
        jobs = self.jobs()
        assert [run_id for run_id, number in jobs.items() if number > 1] == []
        waiting = {run_id for run_id in jobs if listed[run_id]["state"] not in _ALIVE}
        assert waiting == set(), {run_id: listed[run_id]["reason"] for run_id in waiting}
        after = snapshot(self.home.path)
        wrong = judge(arguments, Ended(0, b"", b"", 0.0, False), home=self.home, before=self.before, after=after)
        # A killed command may leave a temporary file.
        lost = [each for each in wrong if not each.startswith("litter:")]
        assert lost == [], lost
        # A last sync has nothing left to do.
        report = json.loads(self.call("sync", "--json").output)
        assert report["started"] == report["cancelled"] == [], report

    def jobs(self) -> Counter[str]:
        """How many jobs of each run are alive."""
        return Counter(run_id for run_id in map(self._run_of, self._pids()) if run_id)

    def new_runs(self) -> list[str]:
        """Runs that were not in the sample."""
        sampled = {path.split("/")[2] for path in self.before if path.startswith("project/runs/")}
        return [path.name for path in self._entries(is_run_id) if path.name not in sampled]

    def _pids(self) -> list[int]:
        log = self.home.slurm / "pids"
        return [int(line) for line in log.read_text().split()] if log.exists() else []

    def _run_of(self, pid: int) -> str:
        with contextlib.suppress(OSError):
            # RUNS/RUN/submissions/1/submitit is its last argument; one that has ended has none.
            _, _, place = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").rpartition("\0")
            if place.startswith(f"{self.home.runs}/"):
                return Path(place).relative_to(self.home.runs).parts[0]
        return ""

    def _entries(self, is_of_kind) -> list[Path]:  # type: ignore[no-untyped-def]
        return sorted(path for path in self.home.runs.iterdir() if is_of_kind(path.name))

    def end_jobs(self) -> None:
        """Kill all jobs."""
        for pid in self._pids():
            if self._run_of(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def disturbed_copy(sample: SampleHome, place: Path) -> Iterator[DisturbedHome]:
    """A copy of a sample at ``place``, which is gone at the end, with its jobs."""
    disturbed = DisturbedHome(copy_home(sample, place))
    try:
        yield disturbed
    finally:
        disturbed.end_jobs()
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """An empty directory in memory, where there is some: an fsync takes no time there."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="slurmtrain-test-") as folder:
        yield Path(folder)
