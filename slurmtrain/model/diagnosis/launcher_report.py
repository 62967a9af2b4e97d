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
# deepspeed/launcher/launch.py.
_OF_DEEPSPEED = re.compile(r"\[launch\.py:\d+:\w+\]")


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a launcher says that one of its ranks ended: the exit code, negative for a signal, and the local rank."""

    code: int
    local_rank: int | None


def find_rank_end(lines: Sequence[str]) -> RankEnd | None:
    """The end of the rank because of which a launcher has ended, by its last ``lines``; None if they tell none.

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
    return [line for line in before if not (_OF_TORCH.match(line) or _OF_DEEPSPEED.search(line))]
