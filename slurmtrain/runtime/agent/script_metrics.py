"""Processes beside node 0's agent that carry metrics: out of a script's output, and to a tracking server.

A process of its own reads the metrics of scripts that do not report them from their output, since Python searches for a
regular expression without letting any other thread run: a pattern that takes for ever on some line must not keep the
agent from its ranks. It is the one writer of the attempt's metrics, and of a journal. If nobody has said how the output
looks, the agent itself looks at samples of it, and starts the process when one has a metric: most scripts without the
library get no further process before that. Its guesses have a file of their own, since they are only shown: a script
that reports its metrics after all ends it, and its own file replaces the other. Another process, which is part of the
adapter for the server, sends metrics while the run trains, and prints the run's id there. Their orders are a line of
JSON on standard input; when that ends, they complete their work, and end too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.experiment.tracking import ScriptMetricsSpec
from slurmtrain.model.metrics.script_output import LineReader, OutputRow, StepCounter, reader_of
from slurmtrain.model.run.events.rank_events import OutputUnderstood, ScriptProgressed, ScriptUnread
from slurmtrain.model.run.layout import GUESSED_METRICS, METRICS, AttemptDir, SubmissionDir
from slurmtrain.runtime.checkpoint.writer_process import IGNORED, begin_helper
from slurmtrain.runtime.environment.variables import environment_of_helper
from slurmtrain.runtime.job.metrics import MetricsFile
from slurmtrain.runtime.job.run_reader import logged_step
from slurmtrain.system.child_process import HelperProcess
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.journal import Journal
from slurmtrain.system.owned_files import open_readable

_POLL_MS = 250
_CHUNK_BYTES = 1 << 20
# Of a line that never ends, only so much is kept.
_LONGEST_LINE = 1 << 16
# A line may take this long, in seconds of processor time, and so many lines may take longer.
_LINE_S = 0.1
_SLOW_LINES = 3
# What is left when the ranks have ended is read for so long.
_LAST_S = 4.0
# A file is recognised by this many bytes before the place where reading stopped: a script may have written it anew.
_COMPARED_BYTES = 256
_MOST_TOTALS = 10
# The share of a processor that guessing may take, and the seconds of it that a burst of lines may take at once.
_GUESSING_SHARE = 0.05
_MOST_GUESSING_S = 1.0


@dataclass(frozen=True, slots=True)
class Orders:
    """What to read.

    ``spec``: the section of the spec, as plain data. ``attempt`` and ``round``: whose metrics these are. ``path``: the
    file. ``begin``: where to begin reading, in bytes; ``before``: the last bytes before that, as text in Latin-1.
    ``counted``: how many steps were finished before, if lines are counted. The section is None if metrics are guessed.
    """

    spec: dict[str, str | int | None] | None
    attempt: str
    round: int
    path: str
    begin: int
    before: str
    counted: int

    @classmethod
    def begin_now(cls, spec: ScriptMetricsSpec | None, attempt: AttemptDir, path: Path, counted: int) -> Orders:
        """Orders to read what is added from now on to the file at ``path``, as the ``spec`` says; None: by guess.

        ``attempt``: whose metrics these are. ``counted``: as the field.
        """
        begin, before = 0, b""
        with contextlib.suppress(OSError), open_readable(path) as file:
            begin = file.seek(0, os.SEEK_END)
            file.seek(max(0, begin - _COMPARED_BYTES))
            before = file.read(_COMPARED_BYTES)
        plain = None if spec is None else asdict(spec)
        return cls(plain, str(attempt.path), attempt.round, str(path), begin, before.decode("latin-1"), counted)


def guess_reader() -> LineReader:
    """A reader that guesses metrics, for output without a pattern."""
    # Its expressions take longer to compile than all else that an agent needs of this module, and few agents need them.
    from slurmtrain.model.metrics.guessed_lines import GuessReader

    return GuessReader()


class GrowingFile:
    """A file of lines that a script appends to, or that it writes anew with more lines."""

    def __init__(self, path: str, begin: int, before: bytes) -> None:
        """``path``: the file. ``begin``: where to begin, in bytes; ``before``: the last bytes before that."""
        self._path = path
        self._offset = begin
        self._before = before
        self._rest = b""
        self.restarts = 0
        """How often the file was written anew."""

    def first_line(self) -> str:
        """The first line, whole or not; empty if there is none yet."""
        try:
            with open_readable(self._path) as file:
                return file.readline(_LONGEST_LINE).decode(errors="replace").strip("\r\n")
        except OSError:
            return ""

    def lines(self, *, last: bool) -> Iterator[str]:
        """Further lines; with ``last`` also one that is not finished. Progress bars end lines with carriage returns."""
        try:
            file = open_readable(self._path)
        except OSError:
            return
        with file:
            last_bytes = os.pread(file.fileno(), len(self._before), self._offset - len(self._before))
            if last_bytes != self._before:
                # The file is another one, or shorter, than what was read of it.
                self._offset, self._before, self._rest = 0, b"", b""
                self.restarts += 1
            file.seek(self._offset)
            while chunk := file.read(_CHUNK_BYTES):
                self._offset += len(chunk)
                self._before = (self._before + chunk)[-_COMPARED_BYTES:]
                *whole, rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
                self._rest = rest[:_LONGEST_LINE]
                yield from (line.decode(errors="replace") for line in whole if line)
        if last and self._rest:
            yield self._rest.decode(errors="replace")
            self._rest = b""


class TooSlow(Exception):
    """A line takes too long."""


def read_in_time(reader: LineReader, line: str) -> OutputRow | None:
    """What a ``line`` says. Raises TooSlow if finding that out takes longer than a line may take."""
    # Python looks for signals while it searches; processor time, since this process may have to wait for a processor.
    signal.setitimer(signal.ITIMER_VIRTUAL, _LINE_S)
    try:
        return reader.read(line)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


class OutputReader:
    """Reads lines, and writes metrics."""

    def __init__(self, orders: Orders) -> None:
        """``orders``: what to read."""
        self._is_guess = orders.spec is None
        self._spec = ScriptMetricsSpec(**(orders.spec or {}))  # type: ignore[arg-type]
        self._attempt = AttemptDir(Path(orders.attempt), orders.round)
        self._file = GrowingFile(orders.path, orders.begin, orders.before.encode("latin-1"))
        self._reader = self._new_reader()
        self._counter = StepCounter(orders.counted)
        self._understood: OutputUnderstood | None = None
        # Nobody has asked for guesses: of a flood of lines, some are passed over.
        self._left_s, self._filled_at = _MOST_GUESSING_S, time.monotonic()
        self._begin = orders.begin
        self._journal = Journal(self._attempt.script_journal)
        self._metrics: MetricsFile | None = None
        self._step = 0
        self._total: int | None = None
        self._totals = 0
        self._restarts = 0
        # Rows of a file that is written anew again and again have been read up to here.
        self._rows = self._rows_before = 0
        self._slow = 0

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            raise TooSlow

        signal.signal(signal.SIGVTALRM, interrupt)

    def read(self, *, last: bool) -> bool:
        """Read what is new; ``last``: the script has ended. Returns whether it makes sense to go on."""
        if self._spec.file is not None and self._begin and not self._restarts:
            # The present rows were written by an earlier attempt; their header is this one's too.
            self._reader.read(self._file.first_line())
            self._begin = 0
        give_up_at = time.monotonic() + _LAST_S
        for line in self._file.lines(last=last):
            if self._file.restarts != self._restarts:
                # It was written anew, with the rows that were read already, unless none were.
                self._restarts = self._file.restarts
                self._reader = self._new_reader()
                self._rows_before, self._rows = max(self._rows_before, self._rows), 0
            if not self._read_line(line) or (last and time.monotonic() > give_up_at):
                return False
        return not self._speaks_for_itself()

    def close(self) -> None:
        """Journal the last step, and close the files."""
        if self._metrics is not None:
            if not self._is_guess:
                self._journal.write(ScriptProgressed(last_step=self._step, total_steps=self._spec.total or self._total))
            self._metrics.close()
        self._journal.close()

    def _new_reader(self) -> LineReader:
        return guess_reader() if self._is_guess else reader_of(self._spec)

    def _read_line(self, line: str) -> bool:
        begun = time.process_time()
        if self._is_guess and not self._has_time():
            return True
        try:
            return self._read_row(line)
        finally:
            self._left_s -= time.process_time() - begun

    def _has_time(self) -> bool:
        """Whether there is time left to guess what a line means."""
        now = time.monotonic()
        self._left_s = min(_MOST_GUESSING_S, self._left_s + _GUESSING_SHARE * (now - self._filled_at))
        self._filled_at = now
        return self._left_s > 0

    def _read_row(self, line: str) -> bool:
        try:
            row = read_in_time(self._reader, line)
        except TooSlow:
            self._slow += 1
            if self._slow < _SLOW_LINES:
                return True
            return self._give_up(f"the pattern of tracking.metrics needs more than {_LINE_S:g} s for a line")
        if self._reader.problem:
            return self._give_up(f"{self._spec.file}: {self._reader.problem}")
        if row is None:
            return True
        self._rows += 1
        if self._rows <= self._rows_before:
            return True
        return self._write_guess(row) if self._is_guess else self._write(row)

    def _write(self, row: OutputRow) -> bool:
        placed = self._counter.place(row)
        # A script that says something else each time does not fill the journal.
        is_new = row.total not in (None, self._total) and self._spec.total is None and self._totals < _MOST_TOTALS
        if is_new:
            self._total = row.total
            self._totals += 1
            # The first one is part of the event about the first step.
            if self._metrics is not None:
                self._journal.write(ScriptProgressed(total_steps=row.total))
        if placed is None:
            return True
        self._step, metrics = placed
        if self._metrics is None:
            if self._speaks_for_itself():
                return False
            self._metrics = MetricsFile(self._attempt.metrics)
            self._journal.write(
                ScriptProgressed(step=max(0, self._step - 1), total_steps=self._spec.total or self._total)
            )
        self._metrics.write(self._step, metrics)
        return True

    def _write_guess(self, row: OutputRow) -> bool:
        placed = self._counter.place(row)
        if placed is None:
            return True
        if self._metrics is None:
            if self._speaks_for_itself():
                return False
            self._metrics = MetricsFile(self._attempt.guessed_metrics)
        understood = OutputUnderstood(counted=row.counts, total_steps=row.total)
        if understood != self._understood and self._totals < _MOST_TOTALS:
            self._journal.write(understood)
            self._understood = understood
            self._totals += 1
        self._metrics.write(*placed)
        return True

    def _speaks_for_itself(self) -> bool:
        """Whether the script reports its metrics itself: they have one writer."""
        if not self._attempt.rank_journal(0).exists():
            return False
        return self._is_guess or not self._give_up("the script reports its metrics itself; leave tracking.metrics out")

    def _give_up(self, why: str) -> bool:
        self._journal.write(ScriptUnread(why=f"its metrics are no longer read from its output: {why}"))
        return False


# --- the agent's side -------------------------------------------------------------------------------------------------
# How long the job may go on, once the ranks have ended, while these processes complete their work: in a grace, the job
# still has to be requeued.
_END_S = 5.0
_END_IN_GRACE_S = 1.0
# How long ranks that could start wait for the run's id on the server.
_BEGIN_S = 15.0
_POLL_S = 0.1
# How often the agent reads the output of a script without a pattern, and how much of the new output.
_SAMPLE_S = 1.0
_SAMPLE_BYTES = 1 << 14
_SAMPLE_LINES = 100
# Nothing that runs inside a job imports this adapter: its name is all that is known of it here.
_LIVE_SENDER = "slurmtrain.tracking.to_mlflow.live_sender"


@dataclass(frozen=True, slots=True)
class LiveOrders:
    """What to send where.

    ``uri``: of the server. ``directory``: of the run. ``plan``: the path of the plan of this submission. ``live``: send
    also points that may still be rolled back.
    """

    uri: str
    directory: str
    plan: str
    live: bool


class MetricsProcess:
    """One of these processes, as the agent sees it."""

    def __init__(self, module: str, orders: Orders | LiveOrders, *, answers: bool = False) -> None:
        """Start the program ``module``, which reads its ``orders`` first. ``answers``: it prints a line.

        Raises OSError.
        """
        line = json.dumps(asdict(orders)).encode() + b"\n"
        # Like the agent, it ignores signals to all processes of the job: the last metrics come after them.
        self._process = HelperProcess(module, line, environment_of_helper(), IGNORED, answers=answers)
        self._answer: str | None = None
        self._wait_until: float | None = None

    def wait_for_run(self, *, give_up: Callable[[], bool]) -> str | None:
        """The id of the run on the server; None if it is still unknown after a moment; ranks do not start meanwhile.

        Args:
            give_up: Called repeatedly; True ends the wait.
        """
        if self._wait_until is None:
            self._wait_until = time.monotonic() + _BEGIN_S
        while self._answer is None:
            left_s = self._wait_until - time.monotonic()
            if select.select([self._process.answers], [], [], max(0.0, min(left_s, _POLL_S)))[0]:
                # An empty line: the server does not answer; no line: the process has ended.
                self._answer = self._process.answers.readline().decode().strip() or None
                if self._answer is None:
                    break
            elif left_s <= 0 or give_up():
                break
        return self._answer

    def end(self, *, in_grace: bool) -> None:
        """Let it complete its work, after the ranks have ended. ``in_grace``: the job is about to be ended."""
        self._process.end(_END_IN_GRACE_S if in_grace else _END_S)


def send_live(submission: SubmissionDir, uri: str, *, live: bool) -> MetricsProcess | None:
    """Show a run on its tracking server while it trains; None if it has none, or that fails.

    Args:
        submission: The submission that this node belongs to.
        uri: The server; empty: there is none.
        live: Send also points that may still be rolled back.
    """
    if not uri:
        return None
    orders = LiveOrders(uri, str(submission.run.path), str(submission.plan), live)
    return _start_beside(_LIVE_SENDER, orders, "metrics are not sent from this node")


class OutputWatch:
    """The process that reads the metrics of the ranks of a round on node 0, once there is something to read."""

    def __init__(self, orders: Orders) -> None:
        """``orders``: what the process will read."""
        self._orders = orders
        self._journal = AttemptDir(Path(orders.attempt), orders.round).rank_journal(0)
        self._looked_until = orders.begin
        self._due = time.monotonic() + _SAMPLE_S
        self._is_over = False
        self._process: MetricsProcess | None = None
        if orders.spec is not None:
            self._start()

    def look(self) -> None:
        """Look at a sample of the output, if it is time to. Call it repeatedly while the ranks run."""
        if not self._is_over and time.monotonic() >= self._due:
            self._due = time.monotonic() + _SAMPLE_S
            self._sample()

    def end(self, *, in_grace: bool) -> None:
        """The ranks have ended: let the process complete its work. ``in_grace``: the job is about to be ended."""
        # A job that has to be requeued now waits for nothing that is only shown.
        if not self._is_over and not in_grace:
            self._sample()
        if self._process is not None:
            self._process.end(in_grace=in_grace)

    def _sample(self) -> None:
        with contextlib.suppress(OSError):
            size = os.stat(self._orders.path).st_size  # noqa: PTH116 (several times a second)
            if size <= self._looked_until:
                return
            if self._journal.exists():
                self._is_over = True
                return
            with open_readable(self._orders.path) as file:
                file.seek(max(self._looked_until, size - _SAMPLE_BYTES))
                text = file.read(_SAMPLE_BYTES)
            self._looked_until = size
            reader = guess_reader()
            lines = text.replace(b"\r", b"\n").split(b"\n")[-_SAMPLE_LINES:]
            if any(row.metrics for line in lines if (row := reader.read(line.decode(errors="replace"))) is not None):
                self._start()

    def _start(self) -> None:
        self._is_over = True
        self._process = _start_beside(
            "slurmtrain.runtime.agent.script_metrics", self._orders, "the script's metrics are not read"
        )


def watch_output(spec: Spec, attempt: AttemptDir, resumed_at: float | None) -> OutputWatch | None:
    """Read the metrics of the ranks that are about to start on node 0; None if that is switched off.

    Args:
        spec: The spec.
        attempt: The attempt, which names the round. Its ranks run in the current directory.
        resumed_at: When the checkpoint that they resume from was saved, in seconds since 1970; None: there is none.
    """
    metrics, run = spec.tracking.metrics, attempt.run
    if metrics is not None and metrics.is_off:
        return None
    if metrics is None or metrics.file is None:
        path = attempt.node_log(0) if spec.per_node else attempt.rank_log(0)
    else:
        file = metrics.file.replace("{run_dir}", str(run.path)).replace("{checkpoint_dir}", str(run.checkpoints))
        path = Path.cwd() / os.path.expanduser(file)  # noqa: PTH111 (a home directory may be unknown)
    counted = None
    if resumed_at is not None and (metrics is None or metrics.may_count):
        counted = logged_step(run, resumed_at, GUESSED_METRICS if metrics is None else METRICS)
    return OutputWatch(Orders.begin_now(metrics, attempt, path, counted or 0))


def _start_beside(module: str, orders: Orders | LiveOrders, problem: str) -> MetricsProcess | None:
    """Start a process; if that fails, say what the ``problem`` is, since ranks train without it too."""
    try:
        return MetricsProcess(module, orders, answers=module == _LIVE_SENDER)
    except OSError as error:
        print(f"slurmtrain: {problem}: {error}", file=sys.stderr, flush=True)
        return None


def read_output() -> None:
    """Read until standard input ends, and then what is left."""
    begin_helper()
    line = b""
    # Not one byte more than the first line, so that the end of standard input can be waited for.
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    reader = OutputReader(Orders(**json.loads(line)))
    poll = select.poll()
    poll.register(0, select.POLLIN)
    try:
        while reader.read(last=False) and not poll.poll(_POLL_MS):
            pass
        reader.read(last=True)
    except OSError as error:
        print(f"slurmtrain: the script's metrics cannot be written: {describe_os_error(error)}", file=sys.stderr)
    finally:
        reader.close()


if __name__ == "__main__":
    read_output()
