"""What a launcher that the run's command starts, such as torchrun, prints when one of its ranks has ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# The formats of these libraries, by the groups ``code`` or ``signal``, and ``rank``.
_REPORTS = (
    # torch/distributed/elastic/multiprocessing/api.py, also under accelerate launch: a negative code for a signal.
    re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)"),
    # The same: torchrun itself was asked to stop.
    re.compile(r"SignalException: Process \d+ got signal: (?P<signal>\d+)"),
    # torch/multiprocessing/spawn.py.
    re.compile(r"process (?P<rank>\d+) terminated with exit code (?P<code>\d+)"),
    # subprocess.CalledProcessError, which accelerate launch raises for a single process.
    re.compile(r"CalledProcessError: .* returned non-zero exit status (?P<code>\d+)"),
)
# torch's own log lines, such as those about processes that it ends because another one failed.
_OF_TORCH = re.compile(r"[EWI]\d{4} \d\d:\d\d:\d\d\.\d+ .*torch/distributed/(?:elastic|launcher|run)\b")
# Lines of other launchers, which say no more than that a rank has ended: deepspeed/launcher/launch.py, srun.
_OF_OTHERS = (
    re.compile(r"\[launch\.py:\d+:\w+\]"),
    re.compile(
        r"srun: (?:error: .*: tasks? .*: |launch/\w+: _step_signal|Terminating|Force Terminated|Job step aborted)"
    ),
)
_TRACEBACK = "Traceback (most recent call last):"
# What launchers raise when a rank has ended.
_OF_LAUNCHERS = re.compile(
    r"(?:subprocess\.)?CalledProcessError: .* returned non-zero exit status \d+"
    r"|(?:torch\.distributed\.elastic\.multiprocessing\.errors\.)?ChildFailedError\b"
    r"|torch\.multiprocessing\.spawn\.ProcessExitedException\b"
)
# The line that ends a traceback, or the message of a program in another language.
_ERROR = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Exit)\b|[Ee]rror\b|.*: (?:error|fatal|cannot|No such)\b")


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a launcher says that one of its ranks ended: the exit code, negative for a signal, and the local rank."""

    code: int
    local_rank: int | None


def find_rank_end(lines: Sequence[str]) -> RankEnd | None:
    """The end of the rank that made its launcher end, by the launcher's last ``lines``; None if they do not name one.

    Launchers exit with 1 themselves, whatever the rank's code.
    """
    for line in reversed(lines):
        for report in _REPORTS:
            if match := report.search(line):
                fields = match.groupdict()
                code = -int(fields["signal"]) if "signal" in fields else int(fields["code"])
                return RankEnd(code, int(fields["rank"]) if fields.get("rank") else None)
    return None


def without_report(lines: Sequence[str]) -> Sequence[str]:
    """The last ``lines`` of a log up to a launcher's report on a rank that has ended, which usually ends the log."""
    ends = [index for index, line in enumerate(lines) if _OF_TORCH.match(line) and _REPORTS[0].search(line)]
    before = lines[: ends[-1]] if ends else lines
    kept = [line for line in before if not (_OF_TORCH.match(line) or any(each.search(line) for each in _OF_OTHERS))]
    return _without_traceback(kept)


def _without_traceback(lines: Sequence[str]) -> Sequence[str]:
    """Lines without the traceback of a launcher at their end, if the rank's error stands before that traceback."""
    tracebacks = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not tracebacks or not any(_OF_LAUNCHERS.match(line) for line in lines[tracebacks[-1] :]):
        return lines
    before = lines[: tracebacks[-1]]
    # If no rank's error stands before it, the traceback may belong to a program that has called another.
    return _without_traceback(before) if any(map(_ERROR.match, before)) else lines
