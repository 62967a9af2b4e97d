"""A fire drill: faults are injected into runs of the user's own spec, one after the other, and each gets a verdict.

All of its runs are ordinary ones. They are restarted like any run: by their agents, by Slurm, or by the sync loop that
the drill waits in, the same as in ``wait`` and ``watch``. A drill that is killed leaves its runs as they are.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmtrain.errors import RunBusy, SlurmDown, SlurmtrainError, UserError
from slurmtrain.model.diagnosis.drill import (
    FAULTS,
    CheckpointComparison,
    DrillFacts,
    FaultVerdict,
    InjectedFault,
)
from slurmtrain.model.diagnosis.drill_verdict import judge_fault, not_hit_verdict, not_submitted_verdict
from slurmtrain.model.interruption.interval import DEFAULT_GRACE_S
from slurmtrain.model.run.events.agent import JobRequeue, WorkersStarted
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.events.checkpoint import CheckpointRestored
from slurmtrain.model.run.events.rank import SessionStarted
from slurmtrain.model.run.layout import attempt_of
from slurmtrain.model.run.run import Run
from slurmtrain.model.spec.names import NAME_LIMIT
from slurmtrain.model.spec.plan import Plan
from slurmtrain.ops.drill.compare_checkpoints import compare_checkpoints
from slurmtrain.ops.drill.faults import find_target, inject
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load, submit_spec
from slurmtrain.ops.sync import sync
from slurmtrain.ops.wait import FIRST_PAUSE_S, LAST_PAUSE_S, wait
from slurmtrain.registry.store import Listed
from slurmtrain.runtime.checkpoint import external
from slurmtrain.specfile import SpecFile

REFERENCE = "reference"
TWICE = "again"
# If the script has no session, the fault hits after this share of the time that the undisturbed run took.
_SHARE_OF_TIME = 1 / 3
# A run with a session is hit once it has saved, or after this share of its steps: later it might end before the fault.
_SHARE_OF_STEPS = 1 / 2

Say = Callable[[str], None]
Look = Callable[[Mapping[str, Listed]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """What to try.

    ``path`` and ``overrides``: the spec. ``faults``: names of faults; empty for all but the optional ones. ``twice``:
    do the undisturbed run twice, which shows whether the script is deterministic.
    """

    path: Path
    overrides: Sequence[str] = ()
    faults: Sequence[str] = ()
    executor: str
    twice: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillReport:
    """The outcome of a drill. ``again``: how a second undisturbed run compares with the first, if there was one."""

    executor: str
    reference: Run
    again: CheckpointComparison | None = None
    verdicts: Sequence[FaultVerdict] = field(default_factory=tuple)

    @property
    def passed(self) -> bool:
        """Whether the undisturbed run completed and every other run survived its fault."""
        return self.reference.state == "completed" and all(verdict.passed for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """What ``drill --json`` prints."""
        run = self.reference
        return {
            "schema": SCHEMA,
            "drill": {
                "executor": self.executor,
                "passed": self.passed,
                "reference": {
                    "run_id": run.id,
                    "state": run.state,
                    "reason": run.reason,
                    "step": run.step,
                    "seconds": _took(run),
                },
                "again": self.again.to_dict() if self.again else None,
                "faults": [verdict.to_dict() for verdict in self.verdicts],
            },
        }


def drill(workspace: Workspace, options: DrillOptions, say: Say, look: Look) -> DrillReport:
    """Do an undisturbed run, then one for each fault, and judge them.

    Args:
        workspace: One that asks the scheduler again each time (:meth:`Workspace.looking_again`).
        options: What to try.
        say: Called with each line of progress.
        look: Called with the current run each time its state was read.

    Raises:
        UserError: The spec or the options cannot be used; nothing was created.
        SlurmtrainError: The undisturbed run could not be submitted.
    """
    plan = _DrillPlan.load(options)
    drill_runs = _DrillRuns(workspace, options, plan, say, look)
    reference = drill_runs.undisturbed(REFERENCE)
    if reference.state != "completed":
        return DrillReport(executor=options.executor, reference=reference)
    again = compare_checkpoints(workspace, reference, drill_runs.undisturbed(TWICE)) if options.twice else None
    deterministic = again.identical if again else None
    verdicts = [drill_runs.struck(fault, reference, deterministic) for fault in plan.faults]
    return DrillReport(executor=options.executor, reference=reference, again=again, verdicts=tuple(verdicts))


@dataclass(frozen=True, slots=True)
class _DrillPlan:
    """The specs of all runs of a drill, by the fault of each. They are read before the first run is submitted.

    ``plan``: that of the user's spec. ``faults``: the names of those to try, in order.
    """

    plan: Plan
    faults: Sequence[str]
    specs: Mapping[str, SpecFile]

    @classmethod
    def load(cls, options: DrillOptions) -> _DrillPlan:
        """Read the spec once for each run. Raises UserError, SpecError."""
        spec = load(options.path, options.overrides, ())
        if len(spec.runs) != 1:
            raise UserError(
                f"{options.path} has a sweep of {len(spec.runs)} runs, and a drill takes one; drill a spec without it"
            )
        plan = spec.runs[0].plan
        # Before anything is submitted: a user's own checkpoints are at stake.
        _check_checkpoints_are_separate(plan)
        # A fault that is named twice is tried once; the command line's order is kept.
        faults = list(dict.fromkeys(options.faults)) or [
            name for name, fault in FAULTS.items() if not fault.optional or plan.spec.requeue.hang_after is not None
        ]
        names = [REFERENCE, *([TWICE] if options.twice else []), *faults]
        specs = {
            name: load(options.path, [*options.overrides, f"name={_run_name(plan.spec.name, name)}"], ())
            for name in names
        }
        return cls(plan, faults, specs)


def _run_name(base: str, fault: str) -> str:
    """The name of a drill's run, with the user's part cut as needed for a valid name."""
    suffix = f"-drill-{fault}"
    return base[: NAME_LIMIT - len(suffix)] + suffix


def _check_checkpoints_are_separate(plan: Plan) -> None:
    """Raise UserError if runs could resume from each other's checkpoints, or overwrite the user's."""
    pattern = plan.spec.checkpoint.glob
    if pattern is not None and not pattern.startswith(("{checkpoint_dir}", "{run_dir}")):
        raise UserError(
            f"checkpoint.glob ({pattern}) finds checkpoints of any run, and those of a drill must be separate: begin "
            "the pattern with {checkpoint_dir}, and have the script save there"
        )


@dataclass(frozen=True, slots=True)
class _DrillRuns:
    """The runs of a drill, one after the other."""

    workspace: Workspace
    options: DrillOptions
    drill_plan: _DrillPlan
    say: Say
    look: Look

    def undisturbed(self, name: str) -> Run:
        """Submit a run, inject nothing, and return it when it has ended."""
        return self._ended(self._submitted(name, "nothing is done to it"))

    def struck(self, name: str, reference: Run, deterministic: bool | None) -> FaultVerdict:
        """Submit a run, inject the fault ``name``, and judge the run when it has ended.

        ``reference`` is the undisturbed run; ``deterministic``: whether two undisturbed runs end alike, if known.
        """
        try:
            run_id = self._submitted(name, FAULTS[name].action)
        except SlurmtrainError as error:
            # The verdicts on earlier runs took hours: they must not be lost because one run cannot be submitted.
            return not_submitted_verdict(name, str(error))
        why = ""
        try:
            injected = self._inject_when_ready(run_id, name, reference)
        except SlurmDown as error:
            injected, why = None, str(error)
        # Even without a fault: the next run needs the nodes, and the verdict needs the final state.
        run = self._ended(run_id)
        if injected is None:
            return not_hit_verdict(name, run, why)
        comparison = (
            compare_checkpoints(self.workspace, reference, run)
            if run.state == "completed"
            else CheckpointComparison(identical=None, why="it did not complete")
        )
        store = self.workspace.store
        events: list[AnyEvent] = [
            *store.events(run_id, SessionStarted),
            *store.events(run_id, CheckpointRestored),
            *store.events(run_id, JobRequeue),
        ]
        return judge_fault(
            DrillFacts(
                run=run,
                injected=injected,
                events=events,
                steps={attempt.key: self._steps(run, attempt.key) for attempt in run.attempts},
                comparison=comparison,
                grace_s=self._grace(name),
                hang_after=self.drill_plan.plan.spec.requeue.hang_after,
                deterministic=deterministic,
                world_sizes={event.payload.world_size for event in store.events(reference.id, SessionStarted)},
            )
        )

    def _submitted(self, name: str, action: str) -> str:
        [run_id], notes = submit_spec(self.workspace, self.drill_plan.specs[name], executor=self.options.executor)
        for note in notes:
            self.say(f"warning: {note}")
        self.say(f"{name}: run {run_id}; {action}")
        return run_id

    def _ended(self, run_id: str) -> Run:
        _, synced = wait(self.workspace, [run_id], self.look)
        # A sync loop repeats its notes.
        for note in dict.fromkeys([*synced.notes, *synced.problems]):
            self.say(f"warning: {note}")
        return self._run(run_id)

    def _run(self, run_id: str) -> Run:
        run = self.workspace.store.load(run_id)
        assert run is not None
        return run

    def _inject_when_ready(self, run_id: str, name: str, reference: Run) -> InjectedFault | None:
        """Inject the fault once the run is ready for it; None if it ended before."""
        pause = FIRST_PAUSE_S
        while True:
            # Mirroring to MLflow can take seconds, during which the run may end before it is hit.
            synced = sync(self.workspace, [run_id], track=False)
            self.look({run_id: synced.observed.runs[run_id]})
            run = self._run(run_id)
            if run.ended:
                return None
            if run.state == "running" and self._is_ready(run, name, reference):
                # It may have ended, or been interrupted, since its state was read.
                with contextlib.suppress(RunBusy):
                    injected = inject(self.workspace, run, name)
                    at = "" if injected.step is None else f" at step {injected.step}"
                    self.say(f"{name}: {FAULTS[name].action}{at} ({injected.target})")
                    return injected
            # A queued run may wait for hours; one that trains may soon be over.
            pause = FIRST_PAUSE_S if run.state == "running" else min(pause * 1.2, LAST_PAUSE_S)
            time.sleep(pause)

    def _is_ready(self, run: Run, name: str, reference: Run) -> bool:
        """Whether it trains and, for a fault without warning, has saved something to resume from."""
        target = find_target(self.workspace, run)
        if target is None or not target.complete or run.newest is None:
            return False
        # Without a session steps are not counted: its checkpoints, or the time, must suffice.
        if reference.step is None:
            return self._has_own_checkpoint(run) or self._trains_for(run) > _SHARE_OF_TIME * (_took(reference) or 0.0)
        # A rank that has not finished a step of this attempt may still be in its setup.
        first, last = run.newest.first_step, run.newest.last_step
        if first is None or last is None or last <= first:
            return False
        return (
            FAULTS[name].announced
            or run.checkpoint is not None
            or (run.total_steps is not None and last >= _SHARE_OF_STEPS * run.total_steps)
        )

    def _has_own_checkpoint(self, run: Run) -> bool:
        """Whether a script that saves its own checkpoints has left one."""
        plan = self.drill_plan.plan
        pattern = plan.spec.checkpoint.glob
        if pattern is None:
            return False
        return external.newest(external.absolute(pattern, plan.workdir, self.workspace.root.run(run.id))) is not None

    def _trains_for(self, run: Run) -> float:
        """Seconds since its ranks were last started; 0 if they were not."""
        key = run.newest.key if run.newest else ""
        workers = self.workspace.store.events(run.id, WorkersStarted)
        starts = [event.time for event in workers if attempt_of(event.source) == key]
        return time.time() - max(starts) if starts else 0.0

    def _steps(self, run: Run, key: str) -> list[tuple[float, int]]:
        """The steps finished by the attempt with this ``key``, each with its time in seconds since 1970."""
        steps = []
        with contextlib.suppress(OSError):
            for line in (self.workspace.root.run(run.id).attempts / key / "metrics.jsonl").read_bytes().splitlines():
                # A killed rank leaves an incomplete line.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    record = json.loads(line)
                    steps.append((float(record["t"]), int(record["step"])))
        return steps

    def _grace(self, name: str) -> float:
        """Seconds that a stop for this fault may take: for a preemption the partition's GraceTime, else the default."""
        # GraceTime is only for preemptions; a time limit has the lead of its signal, which is longer than the default.
        if self.options.executor != "slurm" or name != "preempt":
            return DEFAULT_GRACE_S
        from slurmtrain.slurm import limits

        try:
            return limits.grace_s(self.drill_plan.plan, self.workspace.scheduler.partitions()) or DEFAULT_GRACE_S
        except SlurmDown:
            return DEFAULT_GRACE_S


def _took(run: Run) -> float | None:
    """Seconds from the start of its first attempt to its end; None if either is missing."""
    if run.started_at is None or run.ended_at is None:
        return None
    return round(run.ended_at - run.started_at, 3)
