"""A fire drill: faults are injected into runs of the user's own spec, one after the other, and each gets a verdict.

All of its runs are ordinary ones. They are restarted like any run: by their agents, by Slurm, or by the sync loop that
the drill waits in, the same as in ``wait`` and ``watch``. A drill that is killed leaves its runs as they are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurmtrain.errors import RunBusy, SlurmDown, SlurmtrainError, UserError
from slurmtrain.model.experiment.checkpoint import OWN
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.values import NAME_LIMIT
from slurmtrain.model.interruption.interval import DEFAULT_GRACE_S
from slurmtrain.model.run.events.agent_events import JobRequeue
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.events.checkpoint_events import CheckpointRestored
from slurmtrain.model.run.events.rank_events import SessionStarted
from slurmtrain.model.run.run import Run
from slurmtrain.ops.cancel import cancel
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load, submit_spec
from slurmtrain.ops.sync import sync
from slurmtrain.ops.watch import FIRST_PAUSE_S, LAST_PAUSE_S, wait
from slurmtrain.plugins.drill.facts import (
    FAULTS,
    Baseline,
    CheckpointComparison,
    DrillFacts,
    FaultVerdict,
    Patience,
    overdue,
    strike_moment,
    why_never,
)
from slurmtrain.plugins.drill.faults import find_target, inject, inject_in_save
from slurmtrain.plugins.drill.judge import Findings, judge_baseline, judge_fault, not_hit_verdict, not_submitted_verdict
from slurmtrain.plugins.drill.observations import RunObserver, compare_checkpoints
from slurmtrain.registry.rows import Listed
from slurmtrain.specfile import SpecFile

REFERENCE = "reference"
TWICE = "again"
# How long to look for a save, in seconds, before the state of the run is read again.
_SAVE_WAIT_S = 1.0

Say = Callable[[str], None]
Look = Callable[[Mapping[str, Listed]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """What to try.

    ``path`` and ``overrides``: the spec. ``faults``: names of faults; empty for all but the optional ones. ``twice``:
    do the undisturbed run twice in any case, not only if a run after a fault ends differently.
    """

    path: Path
    overrides: Sequence[str] = ()
    faults: Sequence[str] = ()
    executor: str
    twice: bool = False


def run_drill(workspace: Workspace, options: DrillOptions, say: Say, look: Look) -> DrillReport:
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
    baseline, script = drill_runs.undisturbed(REFERENCE)
    if baseline.run.state != "completed":
        return DrillReport(executor=options.executor, baseline=baseline)
    noise = drill_runs.noise(baseline) if options.twice else None
    outcomes = [drill_runs.struck(fault, baseline) for fault in plan.faults]
    # Only now, and only if it matters: it takes as long as the first one.
    if noise is None and any(outcome.comparison.identical is False for outcome in outcomes):
        noise = drill_runs.noise(baseline)
    verdicts = [
        outcome if isinstance(outcome, FaultVerdict) else judge_fault(replace(outcome, noise=noise))
        for outcome in outcomes
    ]
    return DrillReport(
        executor=options.executor, baseline=baseline, again=noise, script=script, verdicts=tuple(verdicts)
    )


@dataclass(frozen=True, slots=True)
class _DrillPlan:
    """The specs of all runs of a drill, by the fault of each. They are read before the first run is submitted.

    ``plan``: plan of the user's spec. ``faults``: the names of the faults to try, in order.
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
                f"{options.path} has a sweep of {len(spec.runs)} runs, but a drill needs a single run: leave the "
                "sweep out"
            )
        plan = spec.runs[0].plan
        pattern = plan.spec.checkpoint.glob
        # Runs could resume from each other's checkpoints, or overwrite the user's.
        if pattern is not None and not pattern.startswith(("{checkpoint_dir}", "{run_dir}")):
            raise UserError(
                f"checkpoint.glob ({pattern}) finds checkpoints of any run, but a drill must keep them apart: begin "
                "the pattern with {checkpoint_dir}, and have the script save there"
            )
        # A fault that is named twice is tried once; the command line's order is kept.
        faults = list(dict.fromkeys(options.faults)) or [
            name for name, fault in FAULTS.items() if not fault.optional or plan.spec.requeue.hang_after is not None
        ]
        specs = {}
        for name in (REFERENCE, TWICE, *faults):
            suffix = f"-drill-{name}"
            # The user's part is cut as needed for a valid name.
            run_name = plan.spec.name[: NAME_LIMIT - len(suffix)] + suffix
            specs[name] = load(options.path, [*options.overrides, f"name={run_name}"], ())
        return cls(plan, faults, specs)


@dataclass(frozen=True, slots=True)
class _DrillRuns:
    """The runs of a drill, one after the other."""

    workspace: Workspace
    options: DrillOptions
    drill_plan: _DrillPlan
    say: Say
    look: Look

    def undisturbed(self, name: str) -> tuple[Baseline, Findings]:
        """Submit a run, inject nothing, and return its findings once it has ended."""
        run_id = self._submitted(name, "; nothing is done to it")
        observer = RunObserver(self.workspace, run_id, self.drill_plan.plan)
        self._wait(run_id, observer, None)
        baseline = observer.baseline(observer.run())
        pattern = self.drill_plan.plan.spec.checkpoint.glob
        return baseline, judge_baseline(baseline, pattern, observer.own.incomplete())

    def noise(self, baseline: Baseline) -> CheckpointComparison:
        """How a second undisturbed run differs from the first."""
        again, _ = self.undisturbed(TWICE)
        return compare_checkpoints(self.workspace, baseline.run, again.run)

    def struck(self, name: str, baseline: Baseline) -> DrillFacts | FaultVerdict:
        """Submit a run, inject the fault ``name``, and return what to judge once the run has ended.

        A verdict is returned if there is nothing to judge, because the fault was not injected.
        """
        if why := why_never(baseline):
            return not_submitted_verdict(name, why)
        try:
            run_id = self._submitted(name)
        except SlurmtrainError as error:
            # The verdicts on earlier runs took hours: they must not be lost because one run cannot be submitted.
            return not_submitted_verdict(name, f"it could not be submitted: {error}")
        patience = Patience(
            baseline=baseline, grace_s=self._grace(name), hang_after=self.drill_plan.plan.spec.requeue.hang_after
        )
        observer = RunObserver(self.workspace, run_id, self.drill_plan.plan)
        why = self._inject_when_ready(name, observer, patience)
        # Even without a fault: the next run needs the nodes, and the verdict needs the final state.
        ended_by_drill = self._wait(run_id, observer, patience)
        run = observer.run()
        if observer.injected is None or why:
            return not_hit_verdict(name, run, why or ended_by_drill)
        return self._facts(run, observer, patience, ended_by_drill)

    def _facts(self, run: Run, observer: RunObserver, patience: Patience, ended_by_drill: str) -> DrillFacts:
        assert observer.injected is not None
        store, spec = self.workspace.store, self.drill_plan.plan.spec
        events: list[AnyEvent] = [
            *store.events(run.id, SessionStarted),
            *store.events(run.id, CheckpointRestored),
            *store.events(run.id, JobRequeue),
        ]
        baseline = patience.baseline
        comparison = (
            compare_checkpoints(self.workspace, baseline.run, run)
            if run.state == "completed"
            else CheckpointComparison(identical=None, why="it did not complete")
        )
        return DrillFacts(
            run=run,
            injected=observer.injected,
            events=events,
            steps={attempt.key: observer.steps(attempt.key) for attempt in run.attempts},
            comparison=comparison,
            baseline=baseline,
            aftermath=observer.aftermath(),
            grace_s=patience.grace_s,
            hang_after=patience.hang_after,
            world_sizes={event.payload.world_size for event in store.events(baseline.run.id, SessionStarted)},
            ended_by_drill=ended_by_drill,
            stop_signal=spec.requeue.signal,
            hands_over=spec.checkpoint.format != OWN,
        )

    def _submitted(self, name: str, action: str = "") -> str:
        [run_id], notes, _ = submit_spec(self.workspace, self.drill_plan.specs[name], executor=self.options.executor)
        for note in notes:
            self.say(f"warning: {note}")
        self.say(f"{name}: run {run_id}{action}")
        return run_id

    def _wait(self, run_id: str, observer: RunObserver, patience: Patience | None) -> str:
        """Wait for the end of a run. Returns why the drill has ended it itself; empty if it has not.

        ``patience``: how long to wait; None: as long as it takes.
        """

        def show(runs: Mapping[str, Listed]) -> None:
            observer.look()
            self.look(runs)

        limit = _Overdue(observer, patience)
        _, synced = wait(self.workspace, [run_id], show, limit)
        # A sync loop repeats its notes.
        for note in dict.fromkeys([*synced.notes, *synced.problems]):
            self.say(f"warning: {note}")
        if limit.why:
            self.say(f"run {run_id} is ended: {limit.why}")
            # It may have ended since, or Slurm not answer; what the drill has found out counts in any case.
            with contextlib.suppress(RunBusy, SlurmDown):
                cancel(self.workspace, [run_id], force=True)
        return limit.why

    def _inject_when_ready(self, name: str, observer: RunObserver, patience: Patience) -> str:
        """Inject the fault once the run trains. Returns why that failed; empty if it did not, or if the run ended."""
        pause = FIRST_PAUSE_S
        watch = None
        while True:
            # Mirroring to MLflow can take seconds, during which the run may end before it is hit.
            run_id = observer.run_id
            synced = sync(self.workspace, [run_id], track=False)
            self.look({run_id: synced.observed.runs[run_id]})
            observer.look()
            run = observer.run()
            if run.ended or overdue(run, None, patience, time.time()):
                return ""
            target = find_target(self.workspace, run) if run.state == "running" else None
            is_known = target is not None and target.complete
            if target is not None and is_known and (moment := strike_moment(patience.baseline, observer.sighting(run))):
                watch = watch or observer.save_watch()
                # It may have ended, or been interrupted, since its state was read.
                with contextlib.suppress(RunBusy):
                    try:
                        observer.note_processes(target)
                        if name == "save":
                            injected = inject_in_save(self.workspace, run, watch, _SAVE_WAIT_S)
                        else:
                            injected = inject(self.workspace, run, name)
                    except SlurmDown as error:
                        return (
                            f"it could not be injected: {error}; it needs srun --overlap inside a job, and scancel "
                            "--signal: ask the site whether they are allowed"
                        )
                    # None while it waits for a save, and none has begun yet.
                    if injected is None:
                        continue
                    observer.injected = replace(injected, moment=moment)
                    self.say(f"{name}: {FAULTS[name].action}, {moment} ({injected.target})")
                    return ""
            # A queued run may wait for hours; one that trains may soon be over.
            pause = FIRST_PAUSE_S if run.state == "running" else min(pause * 1.2, LAST_PAUSE_S)
            time.sleep(pause)

    def _grace(self, name: str) -> float:
        """Seconds that a stop for this fault may take: for a preemption the partition's GraceTime, else the default."""
        # GraceTime is only for preemptions; a time limit has the lead of its signal, which is longer than the default.
        if self.options.executor != "slurm" or name != "preempt":
            return DEFAULT_GRACE_S
        from slurmtrain.slurm import site

        try:
            return site.grace_s(self.drill_plan.plan, self.workspace.scheduler.partitions()) or DEFAULT_GRACE_S
        except SlurmDown:
            return DEFAULT_GRACE_S


class _Overdue:
    """Ends the wait for a run that will not end by itself."""

    def __init__(self, observer: RunObserver, patience: Patience | None) -> None:
        """``patience``: None: wait as long as it takes."""
        self._observer = observer
        self._patience = patience
        self.why = ""
        """Why the wait was ended; empty if it was not."""

    def wait(self, seconds: float) -> bool:
        """Sleep for ``seconds``; returns whether to wait no longer."""
        if self._patience is not None:
            self.why = overdue(self._observer.run(), self._observer.injected, self._patience, time.time())
        if not self.why:
            time.sleep(seconds)
        return bool(self.why)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillReport:
    """The outcome of a drill.

    ``baseline``: the undisturbed run. ``again``: how a second undisturbed run compares with the first, if there was
    one. ``script``: what the undisturbed run shows about the script's own checkpoints.
    """

    executor: str
    baseline: Baseline
    again: CheckpointComparison | None = None
    script: Findings = field(default_factory=Findings)
    verdicts: Sequence[FaultVerdict] = field(default_factory=tuple)

    @property
    def reference(self) -> Run:
        """The undisturbed run."""
        return self.baseline.run

    @property
    def passed(self) -> bool:
        """Whether the undisturbed run completed, and every other run survived the fault that it was made for."""
        return (
            self.reference.state == "completed"
            and not self.script.problems
            and all(verdict.acceptable for verdict in self.verdicts)
        )

    @property
    def seconds(self) -> float | None:
        """From the start of the undisturbed run's first attempt to its end; None if either is missing."""
        run = self.reference
        if run.started_at is None or run.ended_at is None:
            return None
        return round(run.ended_at - run.started_at, 3)

    def to_dict(self) -> dict[str, Any]:
        """What ``drill --json`` prints."""
        run = self.reference
        last = self.baseline.saves[-1] if self.baseline.saves else None
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
                    "seconds": self.seconds,
                },
                "again": self.again.to_dict() if self.again else None,
                "script": {
                    "format": last.format if last else None,
                    "saves": len(self.baseline.saves),
                    "last": last.path.name if last else None,
                    "problems": [each.to_dict() for each in self.script.problems],
                    "notes": list(self.script.notes),
                },
                "faults": [verdict.to_dict() for verdict in self.verdicts],
            },
        }
