"""The cost of a checkpoint: slurmtrain's, torch's own, and a plain write of as many bytes to one file.

Every way to save has its own processes, which save repeatedly between short steps; ``_checkpoint_train.py`` describes
them. All are measured from outside in the same way: the stall lasts from the end of the last step before a save to the
beginning of the next one, on the rank where that is longest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from _checkpoint_train import WAYS, delete
from _cluster import problem_of
from _measure import (
    BENCHMARKS,
    ROOT,
    Report,
    command,
    environment,
    say,
    submit,
    try_quietly,
    write_spec,
)
from _memory import Failed, Memory
from step import products_for

from slurmtrain.model.run.layout import RunDir

STEP_S = 0.020
PATIENCE_S = 600.0
POLL_S = 0.2
# Time between two saves of a slurmtrain run, as a multiple of a plain write, within bounds in seconds.
ROOM = 8
LEAST_S, MOST_S = 0.6, 10.0
LARGEST = 1_000_000_000
SIZES = {10_000_000: "10MB", 200_000_000: "200MB", LARGEST: "1GB"}
# Upper bounds on a process's memory: in copies of its state, and in bytes for its imports.
COPIES = 4
IMPORTED = 600_000_000
# In-memory filesystems, where an fsync costs nothing.
IN_MEMORY = ("tmpfs", "ramfs")
STALL_AIM = 0.10
WALL_AIM = 1.3


@dataclass(frozen=True)
class Case:
    """A state size and a number of processes; ``sharded``: each has its share (FSDP2) rather than all of it (DDP)."""

    size: int
    processes: int
    sharded: bool = False

    def __str__(self) -> str:
        return f"{SIZES[self.size]} x{self.processes}{' fsdp2' if self.sharded else ''}"

    @property
    def memory(self) -> int:
        """Bytes of memory that measuring it takes."""
        return self.size * COPIES * (1 if self.sharded else self.processes) + IMPORTED * self.processes


SHARDED = Case(200_000_000, 2, sharded=True)


@dataclass(frozen=True)
class Save:
    """Seconds. ``wall``: from the call until the checkpoint is complete. ``told``: the stall according to the journal.

    ``lost``: by how much this save delayed training: the stall, and the slowdown of steps during the save.
    """

    wall_s: float
    stall_s: float = math.nan
    lost_s: float = math.nan
    told_s: float | None = None


@dataclass(frozen=True)
class Job:
    """The saves of one training, and the most memory, in bytes a rank, that they took beyond the training's own."""

    saves: Sequence[Save]
    memory: float = math.nan

    @property
    def later(self) -> Sequence[Save]:
        """All except the first, which starts processes and fills caches."""
        return self.saves[1:]


# --- ways to save -----------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """A folder to save to, and how many times a training saves in it. Each way is a method that takes a case."""

    folder: Path
    products: int
    saves: int
    plain_s: float = 0.0

    def to_dict(self, case: Case) -> Job:
        """The lower bound: one process writes as many bytes to one file, and fsyncs it."""
        block = os.urandom(2**23)
        saves = []
        with self._out() as out:
            for number in range(self.saves):
                began = time.monotonic()
                with open(out / f"plain-{number}", "wb", buffering=0) as file:
                    left = case.size
                    while left:
                        left -= file.write(block[:left])
                    os.fsync(file.fileno())
                saves.append(Save(time.monotonic() - began))
                if number:
                    delete(out / f"plain-{number - 1}")
        self.plain_s = statistics.median(save.wall_s for save in saves)
        return Job(saves)

    def by_torch(self, way: str, case: Case) -> Job:
        """One of torch's own ways, under torchrun."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}"]
        with self._out() as out, (out / "log").open("w+") as log:
            launched = subprocess.Popen(
                [sys.executable, *torchrun, *self._script(case, out, "--way", way, "--saves", str(self.saves))],
                cwd=ROOT,
                env=environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            with launched, Memory(launched.pid) as memory:
                try:
                    code = launched.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    raise Failed(f"it did not end within {PATIENCE_S:.0f} s") from None
                finally:
                    launched.terminate()
            if code:
                log.seek(0)
                raise Failed("torchrun failed:\n" + "".join(log.readlines()[-20:]))
            reports = _read_reports(out, case)
            _check_bytes(_bytes_below(out / f"step-{self.saves - 1}"), reports)
            return _job(reports, [Save(wall) for _, wall in reports[0]["saves"]], reports[0]["saves"], memory)

    def slurmtrain(self, case: Case) -> Job:
        """A run of the local executor, which saves every so many steps; the last one, at its end, does not count."""
        # Steps take longer if processes share a core.
        crowd = max(1.0, case.processes / len(os.sched_getaffinity(0)))
        every = math.ceil(min(MOST_S, max(LEAST_S, ROOM * self.plain_s)) / (STEP_S * crowd))
        steps = every * (self.saves + 1)
        with self._out() as out:
            spec = write_spec(
                out / "checkpoint.yaml",
                name="bench-checkpoint",
                command=shlex.join(["python", *self._script(case, out, "--steps", str(steps))]),
                resources={"procs_per_node": case.processes},
                checkpoint={"every": {"steps": every}, "keep": 1},
            )
            runs = {"SLURMTRAIN_RUNS": str(out)}
            submitted = submit(spec, "local", **runs)
            run = RunDir(Path(submitted["dir"]))
            [started] = [event for path in run.journals.glob("*.jsonl") for event in _events(path, "submitted")]
            try:
                # The ancestor of all processes of a local run.
                controller = psutil.Process(started["process"]["pid"])
                with Memory(controller.pid) as memory:
                    deadline = time.monotonic() + PATIENCE_S
                    # A command that waits would take time from the ranks.
                    while controller.is_running() and time.monotonic() < deadline and not _all_reported(out, case):
                        time.sleep(POLL_S)
                if not _all_reported(out, case):
                    raise Failed(f"the run did not end as it should within {PATIENCE_S:.0f} s")
                if problem := problem_of(try_quietly(command("wait", run.id), **runs)):
                    raise Failed(problem)
            finally:
                try_quietly(command("cancel", run.id), **runs)
            saved = _events(run.attempt(submitted["job_id"], 0).rank_journal(0), "saved")
            saved = [event for event in saved if event["step"] % every == 0 and event["step"] < steps]
            if len(saved) < 2:
                raise Failed(f"it saved {len(saved)} times in {steps} steps")
            reports = _read_reports(out, case)
            _check_bytes(saved[-1]["bytes"], reports)
            saves = [Save(event["seconds"], told_s=event.get("stall_s", event["seconds"])) for event in saved]
            return _job(reports, saves, [(event["step"], event["seconds"]) for event in saved], memory)

    def _script(self, case: Case, out: Path, *options: str) -> list[str]:
        facts = [f"--size={case.size}", f"--products={self.products}", f"--out={out}", *["--sharded"] * case.sharded]
        return [str(BENCHMARKS / "_checkpoint_train.py"), *facts, *options]

    @contextmanager
    def _out(self) -> Iterator[Path]:
        """A folder for one job, all of them on the same filesystem."""
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            yield Path(out)


def _events(journal: Path, kind: str) -> list[dict[str, Any]]:
    events = map(json.loads, journal.read_text().splitlines())
    return [event for event in events if event["kind"] == kind]


# --- from ranks' reports to figures --------------------------------------------------------------------------------


def _all_reported(out: Path, case: Case) -> bool:
    return all((out / f"rank-{rank}.json").exists() for rank in range(case.processes))


def _read_reports(out: Path, case: Case) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(case.processes)]


def _job(
    reports: Sequence[Mapping[str, Any]], saves: Sequence[Save], places: Sequence[tuple[int, float]], memory: Memory
) -> Job:
    """Measured on the steps of all ranks. ``places``: for each save how many steps were finished, and its wall time."""
    bodies = reports[0]["bodies"]
    cycles = list(pairwise(began for began, _ in bodies))
    beside = [(bodies[finished - 1][1], bodies[finished - 1][1] + wall) for finished, wall in places]
    quiet = statistics.median(
        after - began for began, after in cycles if all(after <= since or began >= until for since, until in beside)
    )
    measured = []
    for save, (finished, _), (since, until) in zip(saves, places, beside, strict=True):
        stall = max(rank["bodies"][finished][0] - rank["bodies"][finished - 1][1] for rank in reports)
        lost = sum(after - began - quiet for began, after in cycles if began < until and after > since)
        measured.append(Save(save.wall_s, stall, lost, save.told_s))
    return Job(measured, memory.growth(max(rank["ready"] for rank in reports)) / len(reports))


def _bytes_below(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.rglob("*"))


def _check_bytes(written: int, reports: Sequence[Mapping[str, Any]]) -> None:
    """Raises Failed unless a checkpoint is as large as the state or slightly larger."""
    state = reports[0]["bytes"]
    if not state <= written <= 1.1 * state:
        raise Failed(f"a checkpoint of {state} bytes of state has {written} bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES.values(), metavar="SIZE",
        help="10MB, 200MB, 1GB: how large states are (default: all; all but 1GB with --quick)",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=int, nargs="+", metavar="N", help="on how many (default: 1, 2 and 4; 1 and 2 with --quick)"
    )
    parser.add_argument("--rounds", type=int, metavar="R", help="of each case (default: 1; 2 with --quick)")


def run(arguments: argparse.Namespace) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as folder:
        if filesystem(Path(folder)) in IN_MEMORY:
            sys.exit(f"bench: {folder} is in memory; set TMPDIR to a directory on a disk")
        products = products_for(STEP_S)
        for case in cases(arguments):
            if lacking := lacks(case, Path(folder)):
                report.lack(f"{case} was not measured: {lacking}")
                continue
            rounds = arguments.rounds or (2 if arguments.quick else 1)
            # The first one included.
            bench = Bench(Path(folder), products, saves=2 if arguments.quick else 4)
            add_figures(case, measure(bench, case, rounds, report), report)
            if not arguments.quick:
                judge(case, report)
    report.notes += [
        "first: the first save of a training, which is in no other figure or ratio; lost: the stall, and what steps "
        "took longer while the save went on; memory: a rank's, beyond the training's own; told: by the run's journal",
        f"aims at 1 GB: stall slurmtrain/dcp_save at most {STALL_AIM}, wall slurmtrain/plain at most {WALL_AIM}",
    ]
    return report


def filesystem(folder: Path) -> str:
    """The type of the filesystem that a folder is on."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(mount.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Every size on every number of processes; one of them also sharded."""
    names = arguments.sizes or [name for size, name in SIZES.items() if size != LARGEST or not arguments.quick]
    processes = arguments.processes or ((1, 2) if arguments.quick else (1, 2, 4))
    chosen = [Case(size, several) for size, name in SIZES.items() if name in names for several in processes]
    beside = Case(SHARDED.size, SHARDED.processes)
    return [*chosen, SHARDED] if beside in chosen else chosen


def lacks(case: Case, folder: Path) -> str | None:
    """What this machine lacks for a case; None if nothing. A job has up to two checkpoints at a time."""
    free, memory = shutil.disk_usage(folder).free, psutil.virtual_memory().available
    if free < 3 * case.size:
        return f"{folder} has {free / 1e9:.1f} GB free"
    if memory < case.memory:
        return f"it takes up to {case.memory / 1e9:.1f} GB of memory, and {memory / 1e9:.1f} GB are free"
    return None


def measure(bench: Bench, case: Case, rounds: int, report: Report) -> dict[str, list[Job]]:
    """All ways once a round, every other one backwards; a way that fails is left out, and is a failure."""
    ways: dict[str, Callable[[Case], Job]] = {
        **{name: partial(bench.by_torch, name) for name in WAYS},
        "plain": bench.to_dict,
        "slurmtrain": bench.slurmtrain,
    }
    # The first to write this much finds no memory for it in the page cache yet.
    bench.to_dict(case)
    jobs_by_way: dict[str, list[Job]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in reversed(list(ways)) if number % 2 else list(ways):
            if name not in jobs_by_way:
                continue
            try:
                job = ways[name](case)
            except Failed as error:
                report.failures.append(f"{case}: {name}: {error}")
                say(f"bench: {report.failures[-1]}")
                del jobs_by_way[name]
                continue
            jobs_by_way[name].append(job)
            shown = " ".join(f"{save.wall_s:.3f}" for save in job.saves)
            stalls = "" if name == "plain" else " stall " + " ".join(f"{save.stall_s:.3f}" for save in job.saves)
            say(f"{case}: {name}: wall {shown}{stalls} s")
    return jobs_by_way


def add_figures(case: Case, jobs_by_way: Mapping[str, Sequence[Job]], report: Report) -> None:
    """Figures of each way, then ratios of those that can be paired, save by save within a round."""
    for name, jobs in jobs_by_way.items():
        firsts, laters = [job.saves[0] for job in jobs], [save for job in jobs for save in job.later]
        figures: dict[str, list[float]] = {}
        if name != "plain":
            figures |= {
                "stall_ms": [save.stall_s * 1e3 for save in laters],
                "first_stall_ms": [save.stall_s * 1e3 for save in firsts],
                "lost_ms": [save.lost_s * 1e3 for save in laters],
            }
            report.figure(f"{case}: {name}: memory_mb", [job.memory / 1e6 for job in jobs], "MB")
        figures |= {
            "wall_ms": [save.wall_s * 1e3 for save in laters],
            "first_wall_ms": [save.wall_s * 1e3 for save in firsts],
            "stall_told_ms": [save.told_s * 1e3 for save in laters if save.told_s is not None],
        }
        for figure, values in figures.items():
            if values:
                report.figure(f"{case}: {name}: {figure}", values, "ms")
        report.figure(f"{case}: {name}: mb_per_s", [case.size / save.wall_s / 1e6 for save in laters], "MB/s")
    pairs = [("wall_s", name, "plain") for name in jobs_by_way if name != "plain"]
    pairs += [("stall_s", name, "dcp_save") for name in ("dcp_async_thread", "dcp_async_process", "slurmtrain")]
    for measured, upper, lower in [*pairs, ("stall_s", "slurmtrain", "dcp_async_process")]:
        if upper in jobs_by_way and lower in jobs_by_way:
            both = [
                (getattr(up, measured), getattr(low, measured))
                for ups, lows in zip(jobs_by_way[upper], jobs_by_way[lower], strict=True)
                for up, low in zip(ups.later, lows.later, strict=False)
            ]
            name = f"{case}: {measured.removesuffix('_s')} {upper}/{lower}"
            report.ratio(name, [up for up, _ in both], [low for _, low in both])


def judge(case: Case, report: Report) -> None:
    """Whether the aims, which concern the largest size, are met."""
    for ratio, aim in (("stall slurmtrain/dcp_save", STALL_AIM), ("wall slurmtrain/plain", WALL_AIM)):
        sample = report.ratios.get(f"{case}: {ratio}")
        if case.size == LARGEST and sample is not None and sample.median > aim:
            report.failures.append(f"{case}: {ratio} is {sample.median:.3g}, and is to be at most {aim}")
