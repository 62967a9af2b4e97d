"""What benchmarks share: samples and ratios, the machine, and running slurmtrain."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "scripts" / "benchmarks"
# From sys/prctl.h.
_SET_CHILD_SUBREAPER = 36
Value = TypeVar("Value")


@dataclass
class Sample:
    """Values of one figure or ratio, shown as median and quartiles."""

    values: list[float]
    unit: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> str:
        if len(self.values) < 2:
            return "-"
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return f"{low:.4g} .. {high:.4g}"


@dataclass
class Report:
    """The results of a benchmark; ``failures`` are sentences about failed checks."""

    figures: dict[str, Sample] = field(default_factory=dict)
    ratios: dict[str, Sample] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def figure(self, name: str, values: Iterable[float], unit: str = "") -> None:
        self.figures[name] = Sample(list(values), unit)

    def ratio(self, name: str, upper: Sequence[float], lower: Sequence[float]) -> None:
        """The quotient, pair by pair, of two figures that were measured alternately."""
        self.ratios[name] = Sample([up / low for up, low in zip(upper, lower, strict=True)])

    def medians(self, kind: str) -> dict[str, float]:
        """The medians of "figures" or of "ratios", by name."""
        return {name: round(sample.median, 5) for name, sample in getattr(self, kind).items()}

    def lack(self, text: str) -> None:
        """Note what was not measured, and why."""
        self.notes.append(text)
        say(f"bench: {text}")


def print_report(report: Report) -> None:
    """Two tables: figures, then ratios."""
    width = max(map(len, [*report.figures, *report.ratios]))
    for title, samples in (("figure", report.figures), ("ratio", report.ratios)):
        if samples:
            print(f"\n{title:<{width}}  {'median':>9}  {'quartiles':>19}  {'n':>4}")
        for name, sample in samples.items():
            line = f"{name:<{width}}  {sample.median:>9.4g}  {sample.quartiles:>19}  {len(sample.values):>4}"
            print(f"{line}  {sample.unit}".rstrip())
    print("".join(f"\n{note}" for note in report.notes))


def machine() -> str:
    """The machine in a line, with its load: figures of a busy machine are worth little."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return (
        f"{cpu}, {len(os.sched_getaffinity(0))} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, "
        f"Linux {platform.release()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}, "
        f"{time.strftime('%Y-%m-%d')}"
    )


def command(*arguments: str) -> list[str]:
    """The slurmtrain command of this Python: the installed one, or its equivalent."""
    installed = Path(sys.executable).with_name("slurmtrain")
    return [*([str(installed)] if installed.exists() else [sys.executable, "-m", "slurmtrain"]), *arguments]


def environment(**more: str) -> dict[str, str]:
    """This process's environment without slurmtrain settings, and with this Python first on PATH.

    Python may write compiled modules, as pip does for an installed one: compiling the source anew in each process would
    cost a command as much as everything else that it does.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURMTRAIN_") and name != "PYTHONDONTWRITEBYTECODE"
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, **more}


def try_quietly(argv: Sequence[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root to its end, however that is."""
    return subprocess.run(
        argv, cwd=ROOT, env=environment(**more), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def run_quietly(argv: Sequence[str], **more: str) -> str:
    """Run a command from the repository's root and return its standard output; show everything if it fails."""
    process = try_quietly(argv, **more)
    if process.returncode != 0:
        sys.exit(f"bench: {' '.join(argv)} failed ({process.returncode}):\n{process.stdout}{process.stderr}")
    return process.stdout


def submit(spec: Path, executor: str, *options: str, **more: str) -> dict[str, Any]:
    """Submit a spec that gives one run; returns what ``--json`` says of it."""
    reply = run_quietly(command("submit", str(spec), "--executor", executor, "--json", *options), **more)
    [run] = json.loads(reply)["runs"]
    return dict(run)


def write_spec(path: Path, **keys: Any) -> Path:
    """Write a spec, of a run that MLflow does not show, as JSON, which is YAML."""
    path.write_text(json.dumps({"tracking": {"mlflow": {"enabled": False}}, **keys}))
    return path


def seconds_of(argv: Sequence[str], **more: str) -> float:
    """The wall time of a whole process."""
    began = time.perf_counter()
    run_quietly(argv, **more)
    return time.perf_counter() - began


def cpu_seconds_of(argv: Sequence[str], **more: str) -> float:
    """The processor time of a process and of everything that it has started, once all of it has ended."""
    libc = ctypes.CDLL(None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Children that have left their parent come to this process, so that all are counted.
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        run_quietly(argv, **more)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
    finally:
        libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def in_turns(measures: Mapping[str, Callable[[], Value]], rounds: int, *, warm: int = 1) -> dict[str, list[Value]]:
    """Measure each once a round; every other round goes backwards, so that none always follows the same one."""
    values: dict[str, list[Value]] = {name: [] for name in measures}
    for number in range(-warm, rounds):
        for name in measures if number % 2 else reversed(measures):
            value = measures[name]()
            if number >= 0:
                values[name].append(value)
    return values


def wait_until(true: Callable[[], bool], otherwise: str, patience_s: float, every_s: float = 0.5) -> None:
    """Wait until something is true; end the benchmark with ``otherwise`` if it is not within ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while not true():
        if time.monotonic() > deadline:
            sys.exit(f"bench: {otherwise} within {patience_s:.0f} s")
        time.sleep(every_s)


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)
