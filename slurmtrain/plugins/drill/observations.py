"""What a drill sees of one of its runs while it trains: evidence that it does, and what a fault leaves behind."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.errors import CheckpointError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.events.agent_events import LeftoversKilled, RanksExited, WorkersStarted
from slurmtrain.model.run.events.base import Event
from slurmtrain.model.run.layout import RunDir, attempt_of
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.drill.facts import FAULTS, Aftermath, Baseline, InjectedFault, Sighting
from slurmtrain.plugins.drill.faults import FaultTarget, OwnCheckpoints, SaveWatch
from slurmtrain.runtime.checkpoint.external import Search, format_of
from slurmtrain.runtime.checkpoint.formats.untrusted_files import list_tree
from slurmtrain.system.owned_files import open_readable, read_readable
from slurmtrain.system.process import Process, descendants

_CHUNK = 1 << 20
# What torch reports in a rank if one of its DataLoader workers died.
_DEAD_WORKER = re.compile(rb"DataLoader worker \(pid.*\) (?:is killed by|exited unexpectedly).*")
# How much of a command line names a process.
_COMMAND = 60


class RunObserver:
    """Looks at one run of a drill repeatedly."""

    def __init__(self, workspace: Workspace, run_id: str, plan: Plan) -> None:
        """Look at the run ``run_id`` of ``workspace``. ``plan`` says where its script saves, if it does so itself."""
        self.run_id = run_id
        self._workspace = workspace
        has_own = plan.spec.checkpoint.glob is not None
        self._search = Search.from_plan(plan, self._directory) if has_own else None
        self._own = OwnCheckpoints(self._search)
        self._injected: InjectedFault | None = None
        self._processes: list[tuple[Process, str]] = []
        self._survivors: list[str] | None = None

    @property
    def injected(self) -> InjectedFault | None:
        """The fault; None before it."""
        return self._injected

    def run(self) -> Run:
        """The state of the run, as last read from its journals."""
        run = self._workspace.store.load(self.run_id)
        assert run is not None
        return run

    def look(self) -> None:
        """Take note of the script's checkpoints, and of processes that should have ended."""
        self._own.look()
        if self._injected is not None and self._survivors is None and self._next_workers() is not None:
            self._survivors = self._alive()

    # --- before the fault -------------------------------------------------------------------------------------------

    def sighting(self, run: Run) -> Sighting:
        """How far the newest attempt of ``run`` has come."""
        attempt = run.newest
        if attempt is None:
            return Sighting()
        since = attempt.started_at or 0.0
        saves = [save for save in self._own.saves if save.saved_at >= since]
        newest = run.checkpoint
        saved = "" if newest is None else f"a checkpoint of step {newest.step}"
        return Sighting(
            first_step=attempt.first_step,
            last_step=attempt.last_step,
            total_steps=run.total_steps,
            saved=saved or (f"its checkpoint {saves[-1].path.name}" if saves else ""),
            saves=saves,
            lines=self._lines(attempt.key),
        )

    def save_watch(self) -> SaveWatch:
        """Notices the next save that begins."""
        return SaveWatch(self._search, self._directory.checkpoints)

    def note_processes(self, target: FaultTarget) -> None:
        """Remember the processes of the ranks, on this machine, that are about to be struck."""
        processes = dict.fromkeys(process for rank in target.all_ranks() for process in (rank, *descendants(rank)))
        self._processes = []
        for process in processes:
            words = ""
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ")
                words = command.decode(errors="replace").strip()
            self._processes.append((process, f"{words[:_COMMAND] or 'a process'} (pid {process.pid})"))

    def struck(self, injected: InjectedFault) -> None:
        """Take note of the fault."""
        self._injected = injected

    # --- afterwards -------------------------------------------------------------------------------------------------

    def baseline(self, run: Run) -> Baseline:
        """What this ``run`` has shown, if it was not disturbed."""
        self._own.look()
        saves = self._own.saves
        seconds = (run.ended_at or 0.0) - (run.started_at or 0.0)
        lines = sum(self._lines(attempt.key) for attempt in run.attempts)
        source = ""
        if self._search is not None and saves:
            source = "by checkpoint.step" if self._search.step is not None else "which is in its name"
            with contextlib.suppress(CheckpointError, OSError):
                tree = list_tree(saves[-1].path)
                if self._search.step is None and format_of(tree, self._search.format).step(tree) is not None:
                    source = "which is inside it"
        return Baseline(run=run, saves=saves, lines=lines, seconds=max(0.0, seconds), step_source=source)

    def incomplete(self) -> Sequence[str]:
        """What matches the pattern of the script's checkpoints, but is not complete."""
        return self._own.incomplete()

    def aftermath(self) -> Aftermath:
        """What the fault has left behind, once the run is over."""
        self._own.look()
        injected, workers = self._injected, self._next_workers()
        assert injected is not None
        leftovers = self._leftovers(injected, workers.time if workers else math.inf)
        alive = self._alive() if self._survivors is None else self._survivors
        dead_workers: list[str] = []
        for path in sorted(self._directory.attempts.glob(f"{injected.attempt}/logs/rank-*.log")):
            with contextlib.suppress(OSError):
                reports = _DEAD_WORKER.finditer(read_readable(path)) if FAULTS[injected.fault].announced else ()
                dead_workers += [match[0].decode(errors="replace") for match in reports]
        return Aftermath(
            exit_codes=self._exit_codes(injected),
            survivors=[*alive, *(name for each in leftovers for name in each.remaining)],
            leftovers=[name for each in leftovers for name in each.killed],
            dead_workers=dead_workers,
            saves=self._own.saves,
            resume_from=workers.payload.resume_from if workers else None,
            resumed_at=workers.time if workers else None,
        )

    def steps(self, key: str) -> list[tuple[float, int]]:
        """The steps finished by the attempt with this ``key``, each with its time in seconds since 1970."""
        steps = []
        with contextlib.suppress(OSError):
            for line in read_readable(self._directory.attempts / key / "metrics.jsonl").splitlines():
                # A killed rank leaves an incomplete line.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    record = json.loads(line)
                    steps.append((float(record["t"]), int(record["step"])))
        return steps

    @property
    def _directory(self) -> RunDir:
        return self._workspace.root.run(self.run_id)

    def _lines(self, key: str) -> int:
        count = 0
        for path in self._directory.attempts.glob(f"{key}/logs/rank-*.log"):
            with contextlib.suppress(OSError), open_readable(path) as file:
                while chunk := file.read(_CHUNK):
                    count += chunk.count(b"\n")
        return count

    def _next_workers(self) -> Event[WorkersStarted] | None:
        """The first start of ranks after the fault."""
        assert self._injected is not None
        since = self._injected.at
        events = self._workspace.store.events(self.run_id, WorkersStarted)
        return min((event for event in events if event.time > since), key=lambda event: event.order, default=None)

    def _alive(self) -> list[str]:
        return [name for process, name in self._processes if process.alive()]

    def _exit_codes(self, injected: InjectedFault) -> dict[str, int]:
        codes: dict[str, int] = {}
        for event in self._workspace.store.events(self.run_id, RanksExited):
            if attempt_of(event.source) == injected.attempt:
                codes |= event.payload.codes
        return codes

    def _leftovers(self, injected: InjectedFault, until: float) -> list[LeftoversKilled]:
        """What had to be killed after the fault, before the next ranks started at ``until``."""
        events = self._workspace.store.events(self.run_id, LeftoversKilled)
        return [event.payload for event in events if injected.at <= event.time <= until]
