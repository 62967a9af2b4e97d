"""What benchmarks share: samples and ratios, the machine, and running slurmtrain."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The content of pip's bin/slurmtrain, for a Python that can import slurmtrain but does not have it installed.
_CONSOLE_SCRIPT = "import sys; from slurmtrain.cli import main; sys.argv[0] = 'slurmtrain'; sys.exit(main())"


@dataclass
class Sample:
    """Values of one figure or ratio, shown as median and quartiles."""

    values: list[float] = field(default_factory=list)
    unit: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high


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
        samples: dict[str, Sample] = getattr(self, kind)
        return {name: round(sample.median, 5) for name, sample in samples.items()}


def print_report(report: Report) -> None:
    """Two tables: figures, then ratios."""
    width = max(len(name) for name in [*report.figures, *report.ratios])
    for title, samples in (("figure", report.figures), ("ratio", report.ratios)):
        if samples:
            print(f"\n{title:<{width}}  {'median':>9}  {'quartiles':>19}  {'n':>4}")
        for name, sample in samples.items():
            low, high = sample.quartiles
            spread = f"{low:.4g} .. {high:.4g}" if len(sample.values) > 1 else "-"
            print(
                f"{name:<{width}}  {sample.median:>9.4g}  {spread:>19}  {len(sample.values):>4}  {sample.unit}".rstrip()
            )
    print("".join(f"\n{note}" for note in report.notes))


def machine() -> str:
    """The machine in a line, with its load: figures of a busy machine are worth little."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "CPU")
    memory = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")) / 2**20
    load = os.getloadavg()[0]
    return (
        f"{cpu}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, load {load:.1f}, {time.strftime('%Y-%m-%d')}"
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def command(*arguments: str) -> list[str]:
    """The slurmtrain command of this Python: the installed one, or its equivalent."""
    installed = Path(sys.executable).with_name("slurmtrain")
    return [*([str(installed)] if installed.exists() else [sys.executable, "-c", _CONSOLE_SCRIPT]), *arguments]


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


def run_quietly(argv: Sequence[str], **more: str) -> str:
    """Run a command from the repository's root and return its standard output; show everything if it fails."""
    process = subprocess.run(
        argv, cwd=ROOT, env=environment(**more), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if process.returncode != 0:
        sys.exit(f"bench: {' '.join(argv)} failed ({process.returncode}):\n{process.stdout}{process.stderr}")
    return process.stdout


def seconds_of(argv: Sequence[str], **more: str) -> float:
    """The wall time of a whole process."""
    environ = environment(**more)
    began = time.perf_counter()
    process = subprocess.run(
        argv,
        cwd=ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    took = time.perf_counter() - began
    if process.returncode != 0:
        sys.exit(f"bench: {' '.join(argv)} failed ({process.returncode}):\n{process.stderr.decode(errors='replace')}")
    return took


# Children that have left their parent come to this process, so that all are counted.
_SUBREAPER = """\
import ctypes, json, os, resource, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
code = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode
try:
    while True:
        os.wait()
except ChildProcessError:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, used.ru_utime + used.ru_stime]))
"""


def cpu_seconds_of(argv: Sequence[str], **more: str) -> float:
    """The processor time of a process and of everything that it has started, once all of it has ended."""
    printed = run_quietly([sys.executable, "-I", "-c", _SUBREAPER, *argv], **more)
    code, seconds = json.loads(printed)
    if code != 0:
        sys.exit(f"bench: {' '.join(argv)} failed ({code})")
    return float(seconds)


def in_turns(measures: Mapping[str, Callable[[], float]], rounds: int, *, warm: int = 1) -> dict[str, list[float]]:
    """Measure each once a round; every other round goes backwards, so that none always follows the same one."""
    values: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(-warm, rounds):
        order = list(measures) if number % 2 else list(reversed(measures))
        for name in order:
            value = measures[name]()
            if number >= 0:
                values[name].append(value)
    return values


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)
