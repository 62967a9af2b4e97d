"""A fire drill: runs of a person's own spec are struck by faults on purpose, one after the other, and judged.

All of its runs are ordinary ones. What starts them again is what would do so at any time: their agents, Slurm, and the
loop that this waits with, which is that of ``wait`` and ``watch``. A drill that is killed leaves its runs as they are.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmtrain.errors import RunBusy, SlurmDown, SlurmtrainError, UserError
from slurmtrain.model.diagnosis.drill import (
    FAULTS,
    Comparison,
    DrillFacts,
    FaultVerdict,
    Injected,
    judge,
    never_hit,
    never_submitted,
)
from slurmtrain.model.interruption.interval import DEFAULT_GRACE_S
from slurmtrain.model.run.layout import attempt_of
from slurmtrain.model.run.run import Run
from slurmtrain.model.spec.plan import Plan
from slurmtrain.model.spec.spec import NAME_LIMIT
from slurmtrain.ops.shared.compare import compare
from slurmtrain.ops.shared.faults import inject, place_of
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load, submit_spec
from slurmtrain.ops.sync import sync
from slurmtrain.ops.wait import FIRST_LOOK_S, LAST_LOOK_S, wait
from slurmtrain.registry.store import Listed
from slurmtrain.runtime.checkpoint import external
from slurmtrain.specfile import SpecFile

REFERENCE = "reference"
TWICE = "again"
# A script that says nothing of itself is struck when this share of what the undisturbed run took is over.
_SHARE = 1 / 3
# One that has not saved by then is struck all the same.
_NO_LATER = 1 / 2

Say = Callable[[str], None]
Look = Callable[[Mapping[str, Listed]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """What is to be tried. ``faults``: their names; empty for all that are not only inflicted where asked for.

    ``twice``: make the undisturbed run twice, which tells whether the script ends alike at all.
    """

    path: Path
    overrides: Sequence[str] = ()
    faults: Sequence[str] = ()
    executor: str
    twice: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of a drill. ``again``: how a second undisturbed run compares with the first, if there was one."""

    executor: str
    reference: Run
    again: Comparison | None = None
    verdicts: Sequence[FaultVerdict] = field(default_factory=tuple)

    @property
    def passed(self) -> bool:
        """Whether the undisturbed run completed and every other one came through its fault."""
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


def drill(workspace: Workspace, order: DrillOptions, say: Say, look: Look) -> Report:
    """Make an undisturbed run, then one for each fault, and judge them. ``workspace`` is one that looks again.

    Raises a UserError, with nothing created, for what is wrong with the order, else what submitting raises.
    """
    gc.enable()
    planned = _Planned.of(order)
    course = _Course(workspace, order, planned, say, look)
    reference = course.undisturbed(REFERENCE)
    if reference.state != "completed":
        return Report(executor=order.executor, reference=reference)
    again = compare(workspace, reference, course.undisturbed(TWICE)) if order.twice else None
    deterministic = again.identical if again else None
    verdicts = [course.struck(fault, reference, deterministic) for fault in planned.faults]
    return Report(executor=order.executor, reference=reference, again=again, verdicts=tuple(verdicts))


@dataclass(frozen=True, slots=True)
class _Planned:
    """All runs of a drill, by what happens to them; read before the first begins."""

    plan: Plan
    faults: Sequence[str]
    specs: Mapping[str, SpecFile]

    @classmethod
    def of(cls, order: DrillOptions) -> _Planned:
        """Raises UserError, SpecError."""
        spec = load(order.path, order.overrides, ())
        if len(spec.runs) != 1:
            raise UserError(
                f"{order.path} has a sweep of {len(spec.runs)} runs, and a drill takes one; drill a spec without it"
            )
        plan = spec.runs[0].plan
        _check_apart(plan)
        faults = list(dict.fromkeys(order.faults)) or [
            name for name, fault in FAULTS.items() if not fault.asked_for or plan.spec.requeue.hang_after is not None
        ]
        wanted = [REFERENCE, *([TWICE] if order.twice else []), *faults]
        specs = {
            name: load(order.path, [*order.overrides, f"name={_name(plan.spec.name, name)}"], ()) for name in wanted
        }
        return cls(plan, faults, specs)


def _name(base: str, what: str) -> str:
    suffix = f"-drill-{what}"
    return base[: NAME_LIMIT - len(suffix)] + suffix


def _check_apart(plan: Plan) -> None:
    """Runs of a drill must not take up each other's checkpoints, nor write over a person's."""
    pattern = plan.spec.checkpoint.glob
    if pattern is not None and not pattern.startswith(("{checkpoint_dir}", "{run_dir}")):
        raise UserError(
            f"checkpoint.glob ({pattern}) finds checkpoints of any run, and those of a drill must be kept apart: begin "
            "the pattern with {checkpoint_dir}, and have the script save there"
        )


@dataclass(frozen=True, slots=True)
class _Course:
    """The runs of a drill, one after the other."""

    workspace: Workspace
    order: DrillOptions
    planned: _Planned
    say: Say
    look: Look

    def undisturbed(self, name: str) -> Run:
        """A run that nothing is done to, at its end."""
        return self._ended(self._submitted(name, "nothing is done to it"))

    def struck(self, name: str, reference: Run, deterministic: bool | None) -> FaultVerdict:
        """A run that a fault is inflicted on, judged at its end."""
        try:
            run_id = self._submitted(name, FAULTS[name].words)
        except SlurmtrainError as error:
            # What the runs before it have shown is not to be lost.
            return never_submitted(name, str(error))
        why = ""
        try:
            hit = self._hit(run_id, name, reference)
        except SlurmDown as error:
            hit, why = None, str(error)
        run = self._ended(run_id)
        if hit is None:
            return never_hit(name, run, why)
        found = (
            compare(self.workspace, reference, run)
            if run.state == "completed"
            else Comparison(identical=None, why="it did not complete")
        )
        kinds = ("session", "restored", "requeue")
        return judge(
            DrillFacts(
                run=run,
                injected=hit,
                events=[event for kind in kinds for event in self.workspace.store.events(run_id, kind)],
                steps={attempt.key: self._steps(run, attempt.key) for attempt in run.attempts},
                comparison=found,
                grace_s=self._grace(name),
                hang_after=self.planned.plan.spec.requeue.hang_after,
                deterministic=deterministic,
                world_sizes={
                    int(event.data.get("world_size", 0))
                    for event in self.workspace.store.events(reference.id, "session")
                },
            )
        )

    def _submitted(self, name: str, words: str) -> str:
        [run_id], notes = submit_spec(self.workspace, self.planned.specs[name], executor=self.order.executor)
        for note in notes:
            self.say(f"warning: {note}")
        self.say(f"{name}: run {run_id}; {words}")
        return run_id

    def _ended(self, run_id: str) -> Run:
        _, synced = wait(self.workspace, [run_id], self.look)
        for note in dict.fromkeys([*synced.notes, *synced.problems]):
            self.say(f"warning: {note}")
        return self._run(run_id)

    def _run(self, run_id: str) -> Run:
        run = self.workspace.store.load(run_id)
        assert run is not None
        return run

    def _hit(self, run_id: str, name: str, reference: Run) -> Injected | None:
        """Inflict the fault once the run is ready for it; None if it ended before."""
        pause = FIRST_LOOK_S
        while True:
            synced = sync(self.workspace, [run_id], track=False)
            self.look({run_id: synced.observed.runs[run_id]})
            run = self._run(run_id)
            if run.ended:
                return None
            if run.state == "running" and self._is_ready(run, name, reference):
                # It may have ended, or been interrupted, since it was looked at.
                with contextlib.suppress(RunBusy):
                    hit = inject(self.workspace, run, name)
                    at = "" if hit.step is None else f" at step {hit.step}"
                    self.say(f"{name}: {FAULTS[name].words}{at} ({hit.on})")
                    return hit
            # One that trains may soon be over.
            pause = FIRST_LOOK_S if run.state == "running" else min(pause * 1.2, LAST_LOOK_S)
            time.sleep(pause)

    def _is_ready(self, run: Run, name: str, reference: Run) -> bool:
        """Whether it trains, and has saved where it is not to be asked to before it ends."""
        place = place_of(self.workspace, run)
        if place is None or not place.complete or run.newest is None:
            return False
        if reference.step is None:
            return self._has_saved_itself(run) or self._runs_for(run) > _SHARE * (_took(reference) or 0.0)
        first, last = run.newest.first_step, run.newest.last_step
        if first is None or last is None or last <= first:
            return False
        return (
            FAULTS[name].announced
            or run.checkpoint is not None
            or (run.total_steps is not None and last >= _NO_LATER * run.total_steps)
        )

    def _has_saved_itself(self, run: Run) -> bool:
        """Whether a script of a person's own kind has left a checkpoint."""
        plan = self.planned.plan
        pattern = plan.spec.checkpoint.glob
        if pattern is None:
            return False
        return external.newest(external.absolute(pattern, plan.workdir, self.workspace.root.run(run.id))) is not None

    def _runs_for(self, run: Run) -> float:
        """For how many seconds its ranks have been there."""
        key = run.newest.key if run.newest else ""
        told = [e.time for e in self.workspace.store.events(run.id, "workers") if attempt_of(e.source) == key]
        return time.time() - max(told) if told else 0.0

    def _steps(self, run: Run, key: str) -> list[tuple[float, int]]:
        """When an attempt has finished which steps."""
        steps = []
        with contextlib.suppress(OSError):
            for line in (self.workspace.root.run(run.id).attempts / key / "metrics.jsonl").read_bytes().splitlines():
                # A killed rank leaves a torn line.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    record = json.loads(line)
                    steps.append((float(record["t"]), int(record["step"])))
        return steps

    def _grace(self, name: str) -> float:
        """Seconds that the run would have had, as far as the site says."""
        if self.order.executor != "slurm" or name != "preempt":
            return DEFAULT_GRACE_S
        from slurmtrain.slurm import limits

        try:
            return limits.grace(self.planned.plan, self.workspace.scheduler.partitions()) or DEFAULT_GRACE_S
        except SlurmDown:
            return DEFAULT_GRACE_S


def _took(run: Run) -> float | None:
    """Seconds from its start on nodes to its end."""
    if run.started_at is None or run.ended_at is None:
        return None
    return round(run.ended_at - run.started_at, 3)
