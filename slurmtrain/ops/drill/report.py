"""The outcome of a drill, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.model.diagnosis.drill import Baseline, CheckpointComparison, FaultVerdict
from slurmtrain.model.diagnosis.drill_script import Findings
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.views import SCHEMA


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
                    "last": last.name if last else None,
                    "problems": [{"what": each.problem, "advice": each.advice} for each in self.script.problems],
                    "notes": list(self.script.notes),
                },
                "faults": [verdict.to_dict() for verdict in self.verdicts],
            },
        }
