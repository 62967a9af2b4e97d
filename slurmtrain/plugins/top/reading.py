"""What threads of the page read and do: looking at all runs, following one, reading all about it, and what keys ask."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from slurmtrain.cli import formatting, output
from slurmtrain.cli.output import printable_log
from slurmtrain.cli.status_commands import print_run
from slurmtrain.errors import RunNotFound
from slurmtrain.model.query.comparison import count_states
from slurmtrain.ops.logs import Choice, Line, LogReader
from slurmtrain.ops.query.select import objectives_of
from slurmtrain.ops.shared.looking import Look, Looker, describe_exception
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.run_details import attempt_json
from slurmtrain.ops.shared.views import run_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.why import explain, shown_json
from slurmtrain.plugins.top.top_rows import Row, aged, fold_rows, make_row, waiting_headline

if TYPE_CHECKING:
    from slurmtrain.config import Config
    from slurmtrain.model.query.folding import Objective
    from slurmtrain.model.run.run import Run
    from slurmtrain.registry.queries import IndexRow
    from slurmtrain.registry.rows import Listed


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All runs at one time.

    ``rows``: by id, oldest first. ``slurm_at``: when squeue last answered, in seconds since 1970; None: it has not, or
    was not asked. ``problems``: what could not be asked or read, in sentences. ``read``: how many runs were read.
    ``sweeps``: the rows of sweeps with several runs, by id.
    """

    rows: Mapping[str, Row] = field(default_factory=dict)
    slurm_at: float | None = None
    problems: tuple[str, ...] = ()
    read: int = 0
    sweeps: Mapping[str, Row] = field(default_factory=dict)


class RunsReader:
    """The rows of all runs, at each look."""

    def __init__(self, config: Config) -> None:
        self._looker = Looker(config, _make_row)
        self._last = Snapshot()
        self._aged: dict[str, tuple[Row, Row]] = {}
        self._folded: dict[str, tuple[Sequence[Row], Row]] = {}
        # What searches are for; None of other sweeps.
        self._goals: dict[str, Objective | None] = {}

    def look(self) -> Snapshot:
        """All runs as they are now; if that fails, as they were, with the reason. Never raises."""
        look = self._looker.look()
        try:
            self._find_goals(look)
            rows = self._age(look.runs)
            self._folded = fold_rows(list(rows.values()), self._folded, self._goals)
        except Exception as error:  # noqa: BLE001 (a page that shows a bug is of more use than none)
            self._last = replace(self._last, problems=(describe_exception(error), *look.problems), read=0)
            return self._last
        sweeps = {sweep: row for sweep, (_, row) in self._folded.items()}
        self._last = Snapshot(rows, look.slurm_at, look.problems, len(look.read), sweeps)
        return self._last

    def _age(self, runs: Mapping[str, Row]) -> dict[str, Row]:
        """The rows of all runs with their present ages: the same objects as long as neither has changed."""
        before = self._aged
        self._aged = {
            run_id: (row, aged(before[run_id][1] if run_id in before and before[run_id][0] is row else row))
            for run_id, row in runs.items()
        }
        return {run_id: row for run_id, (_, row) in self._aged.items()}

    def _find_goals(self, look: Look[Row]) -> None:
        # By one run of each sweep that is new.
        swept = {str(look.index[run_id].sweep): run_id for run_id in look.read if look.index[run_id].sweep}
        new = {sweep: run_id for sweep, run_id in swept.items() if sweep not in self._goals}
        if new:
            self._goals |= {**dict.fromkeys(new), **objectives_of(self._looker.workspace, new)}


def _make_row(workspace: Workspace, listed: Listed, index: IndexRow) -> Row:
    return make_row(run_json(workspace, listed), put_away=index.put_away)


# Of a line longer than this, the rest is left out: a terminal shows a few hundred characters.
_LONGEST = 4_000


@dataclass(frozen=True, slots=True)
class FollowedRun:
    """The run to follow, how many ``lines`` of its logs to begin with, and whether to follow the logs of all ranks."""

    run_id: str
    lines: int
    all_ranks: bool = False


@dataclass(frozen=True, slots=True)
class News:
    """What is new about a run.

    ``attempts``: its ATTEMPTs, None if they were not read again; ``why``: why it is in its state, read with them.
    ``lines``: new lines of its logs, printable.
    ``first``: whether these are the first. ``problem``: why the run cannot be read, in a sentence.
    """

    subject: FollowedRun
    attempts: Sequence[Mapping[str, Any]] | None
    lines: Sequence[str]
    first: bool
    problem: str = ""
    why: str = ""


class Follower:
    """Reads the run that ``subject`` names, which may be set from another thread, and reports what is new."""

    def __init__(self, config: Config, report: Callable[[News], None], interval_s: float) -> None:
        """Follow nothing so far.

        Args:
            config: The runs root.
            report: Called with what is new.
            interval_s: How often the run's journals are read, in seconds; its logs are read at each call.
        """
        self.subject: FollowedRun | None = None
        self._config = config
        self._report = report
        self._interval_s = interval_s
        self._workspace: Workspace | None = None
        self._current: FollowedRun | None = None
        self._run: Run | None = None
        self._why = ""
        self._read_at = 0.0
        # The logs of rank 0 and the logs of all ranks, until one of them has lines.
        self._readers: dict[bool, LogReader] = {}
        self._problem = ""

    def look(self) -> None:
        """Report what is new about the subject, if anything is. Never raises."""
        subject = self.subject
        if subject is None:
            return
        first = subject != self._current
        if first:
            self._current, self._run, self._readers, self._problem = subject, None, {}, ""
        try:
            attempts = self._read_run(subject)
            lines, problem = self._new_lines(subject), ""
        except Exception as error:  # noqa: BLE001 (a page that shows a bug is of more use than none)
            attempts, lines, problem = None, [], describe_exception(error)
        if first or attempts is not None or lines or problem != self._problem:
            self._problem = problem
            self._report(News(subject, attempts, lines, first, problem, self._why))

    def _read_run(self, subject: FollowedRun) -> list[dict[str, Any]] | None:
        """The attempts of the run; None if it is too early to read them again."""
        now = time.monotonic()
        if self._run is not None and now - self._read_at < self._interval_s:
            return None
        self._read_at = now
        # Made here, in the thread that reads with it: a registry is not shared between threads.
        self._workspace = self._workspace or Workspace(self._config)
        observed = observe(self._workspace, [subject.run_id], ask_slurm=False)
        run = self._workspace.store.load(subject.run_id)
        if run is None:
            raise RunNotFound(f"run {subject.run_id} no longer exists: its directory was deleted")
        is_same, self._run = run == self._run, run
        if not is_same:
            self._why = explain(self._workspace, observed.runs, subject.run_id, ask=False).headline
        return None if is_same else [attempt_json(attempt) for attempt in run.attempts]

    def _new_lines(self, subject: FollowedRun) -> list[str]:
        if self._run is None or self._workspace is None:
            return []
        if not self._readers:
            choices = {True: Choice(newest=subject.lines)}
            if not subject.all_ranks:
                # One rank's log is what most people want; if it has none, whatever there is.
                choices = {False: Choice(rank=0, newest=subject.lines), **choices}
            self._readers = {is_all: LogReader(self._workspace, choice) for is_all, choice in choices.items()}
        for is_all, reader in self._readers.items():
            # Each of many ranks may have so many lines; the page takes no more from all of them.
            lines = deque(reader.read(self._run, last=self._run.ended), maxlen=subject.lines)
            if reader.has_logs:
                self._readers = {is_all: reader}
                return list(shown(lines, with_origin=is_all))
        return []


def shown(lines: Iterable[Line], *, with_origin: bool) -> Iterable[str]:
    """Lines of logs as the page shows them; ``with_origin``: after the attempt and the process that wrote them."""
    for line in lines:
        origin = f"[{line.attempt}/{line.origin}] " if with_origin else ""
        yield origin + printable_log(line.text[:_LONGEST])


class Repeater(threading.Thread):
    """Calls a function, waits, and calls it again, until it is stopped.

    It is a daemon: whoever leaves the page does not wait for a call that waits for Slurm.
    """

    def __init__(self, action: Callable[[], None], interval_s: float) -> None:
        """``action``: must not raise. ``interval_s``: seconds between the end of a call and the next."""
        super().__init__(daemon=True)
        self._action = action
        self._interval_s = interval_s
        self._woken = threading.Event()
        self._is_over = False

    def run(self) -> None:
        """Repeat the action."""
        while not self._is_over:
            # Before the action, not after it: who wakes this thread meanwhile has it act once more.
            self._woken.clear()
            self._action()
            self._woken.wait(self._interval_s)

    def wake(self) -> None:
        """Have the action called now, or again after the call that is under way."""
        self._woken.set()

    def stop(self, patience_s: float) -> None:
        """End after the call that is under way; wait ``patience_s`` seconds for that, no longer."""
        self._is_over = True
        self._woken.set()
        if self.is_alive():
            self.join(patience_s)


# Where the values begin in what show prints.
_INDENT = " " * 12


def report_lines(config: Config, run: Mapping[str, Any], columns: int) -> list[str]:
    """The lines, or why the run cannot be read. Never raises.

    Args:
        config: The runs root.
        run: RUN of the JSON contract, with what Slurm says now: it is not asked again.
        columns: How wide the terminal is.
    """
    try:
        workspace = Workspace(config)
        observed = observe(workspace, [run["id"]], thorough=True, ask_slurm=False)
        facts = shown_json(workspace, observed.runs, run["id"])
        if facts["state"] == run["state"]:
            # What Slurm has said of it, which was not asked again.
            facts |= {"reason": run["reason"], "pending": run["pending"]}
            facts["why"] = waiting_headline(run) or facts["why"]
        with output.collected(columns) as printed:
            print_run(facts)
    except Exception as error:  # noqa: BLE001 (shown, since it must not end the page)
        return list(wrapped([describe_exception(error)], columns))
    return list(wrapped(printed.getvalue().splitlines(), columns))


def wrapped(lines: list[str], columns: int) -> Iterator[str]:
    """These ``lines``, the long ones broken between words to fit in so many ``columns``."""
    for line in lines:
        if cell_len(line) <= columns:
            yield line
        else:
            yield from wrap(line, columns, subsequent_indent=_INDENT, break_on_hyphens=False)


# How long a run that trains may take to save, in seconds: as 'slurmtrain checkpoint' waits.
_SAVE_S = 600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an action, in a sentence."""

    text: str
    good: bool = True


@dataclass(frozen=True, slots=True)
class Action:
    """Something that can be done to a run.

    ``doing``: what is shown while it is done, ``{run}`` standing for the run. ``question``: what is asked first; empty:
    nothing. ``do``: returns the outcome, or raises. ``of_sweep``: what is done to a sweep instead; None: nothing.
    """

    doing: str
    question: str
    do: Callable[[Workspace, str], Outcome]
    of_sweep: Action | None = None

    def ask(self, run: Mapping[str, Any]) -> str:
        """The question about ``run`` (RUN of the JSON contract, or what a list shows of a sweep)."""
        steps = "" if run["step"] is None else f", step {formatting.steps(run)}"
        return self.question.format(run=f"{run['name']} {run['id']} ({run['state']}{steps})")


def _cancel(workspace: Workspace, run_id: str) -> Outcome:
    from slurmtrain.ops.cancel import cancel

    run = cancel(workspace, [run_id])[run_id]
    reason = f": {run.reason}" if run.reason not in ("", run.state) else ""
    return Outcome(f"run {run_id} is {run.state}{reason}", run.ended)


def _resume(workspace: Workspace, run_id: str) -> Outcome:
    from slurmtrain.ops.resume import resume

    _, notes = resume(workspace, run_id)
    return Outcome("; ".join([f"run {run_id} was started again", *notes]))


def _save(workspace: Workspace, run_id: str) -> Outcome:
    from slurmtrain.cli.checkpoint_commands import describe_outcome
    from slurmtrain.ops.request_checkpoint import request_checkpoint, wait_for_checkpoint

    request = request_checkpoint(workspace, run_id)
    outcome = wait_for_checkpoint(workspace, request, _SAVE_S)
    return Outcome(f"run {run_id}: {describe_outcome(outcome, request, _SAVE_S)}", outcome.checkpoint is not None)


def _write_report(workspace: Workspace, name: str) -> Outcome:
    from slurmtrain.ops.query.select import Question
    from slurmtrain.plugins.report import choose_facts
    from slurmtrain.plugins.report.pages import write_page

    observed = observe(workspace, ask_slurm=False)
    path = write_page(choose_facts(workspace, observed, Question(names=(name,), for_programs=True)))
    return Outcome(f"{path.absolute()} was written: open it in a browser, or see it live with 'slurmtrain serve'")


def _cancel_all(workspace: Workspace, sweep: str) -> Outcome:
    from slurmtrain.ops.cancel import cancel, find_runs

    ids, _ = find_runs(workspace, [sweep])
    ended = cancel(workspace, ids)
    counts = count_states([run.state for run in ended.values()])
    return Outcome(f"sweep {sweep}: {counts}", all(run.ended for run in ended.values()))


def _resume_failed(workspace: Workspace, sweep: str) -> Outcome:
    from slurmtrain.ops.resume import find_failed, resume_failed

    resumed = resume_failed(workspace, find_failed(workspace, [sweep]))
    started = f"{len(resumed.run_ids)} runs were started again"
    return Outcome("; ".join([started, *resumed.notes, *resumed.problems]), not resumed.problems)


CANCEL_ALL = Action("cancelling sweep {run}", "Cancel all runs of {run}? They save before they end.", _cancel_all)
RESUME_FAILED = Action("resuming sweep {run}", "Resume the failed runs of {run}?", _resume_failed)
CANCEL = Action("cancelling run {run}", "Cancel {run}? It saves before it ends.", _cancel, CANCEL_ALL)
RESUME = Action("resuming run {run}", "Resume {run} from its newest checkpoint?", _resume, RESUME_FAILED)
CHECKPOINT = Action("run {run} saves at the end of its step", "", _save)
REPORT = Action("writing a page about {run}", "", _write_report)


class Actions:
    """The actions under way."""

    def __init__(self, config: Config, report: Callable[[Outcome], None]) -> None:
        """``report``: called in the action's thread once it has ended."""
        self._config = config
        self._report = report
        self._under_way: dict[str, threading.Thread] = {}

    @property
    def under_way(self) -> list[str]:
        """What is being done."""
        return [doing for doing, thread in self._under_way.items() if thread.is_alive()]

    def start(self, action: Action, run_id: str) -> str:
        """Begin an ``action`` on a run, unless it is already being done; returns what is being done."""
        doing = action.doing.format(run=run_id)
        if doing in self.under_way:
            return f"already {doing}"
        self._under_way = {name: thread for name, thread in self._under_way.items() if thread.is_alive()}

        def do() -> None:
            notes: list[str] = []
            try:
                # A workspace of its own, as a command has: the registry is not shared between threads.
                outcome = action.do(Workspace(self._config, warn=notes.append), run_id)
            except Exception as error:  # noqa: BLE001 (shown, since an action must not end the page)
                outcome = Outcome(describe_exception(error), good=False)
            self._report(Outcome("; ".join([outcome.text, *notes]), outcome.good))

        # A daemon: whoever leaves may decide not to wait for it.
        thread = threading.Thread(target=do, daemon=True)
        self._under_way[doing] = thread
        thread.start()
        return doing

    def wait(self) -> None:
        """Wait until all have ended."""
        for thread in self._under_way.values():
            thread.join()
