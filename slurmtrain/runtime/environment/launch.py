"""What a submission tells its node agents besides the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import PathError
from slurmtrain.model.run.layout import SubmissionDir
from slurmtrain.system.files import read_json

# Commands that only query Slurm import this module too; these imports take longer than all the others.
if TYPE_CHECKING:
    from slurmtrain.model.interruption.interval import InterruptionStats
    from slurmtrain.model.spec.sweep import Pack


@dataclass(frozen=True, slots=True)
class Turn:
    """What a run of a local sweep waits for. ``sweep``: the sweep's id.

    ``count``: how many of its runs may run at once. ``behind``: the run that was submitted before it; None: there is
    none, or it does not matter which of the two begins first.
    """

    sweep: str
    count: int
    behind: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {"sweep": self.sweep, "count": self.count, "behind": self.behind}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Turn:
        """Read what :meth:`to_dict` returned."""
        behind = plain.get("behind")
        return cls(str(plain["sweep"]), max(1, int(plain["count"])), None if behind is None else str(behind))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The facts that a submission tells its agents besides the plan. ``attempt`` is the number of its first attempt.

    ``turn``: the turn that a run of a local sweep waits for. ``since``: a script's own checkpoints count only if they
    are newer (seconds since 1970). ``history``: the known interruptions, at submission, where the job will run.
    ``array``: the id of the array that the job is an element of, which is no job's id, and its index. ``mlflow``: the
    URI of the MLflow server that shows the run; empty: it has none. ``pack``: how several runs share the job; ``slot``:
    the number of this run among them, from 0.
    """

    attempt: int
    turn: Turn | None = None
    from_start: bool = False
    since: float | None = None
    history: InterruptionStats | None = None
    array: tuple[str, int] | None = None
    mlflow: str = ""
    pack: Pack | None = None
    slot: int = 0

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {
            "attempt": self.attempt,
            **({"turn": self.turn.to_dict()} if self.turn else {}),
            "from_start": self.from_start,
            "since": self.since,
            "history": self.history.to_dict() if self.history else None,
            **({"array": {"id": self.array[0], "index": self.array[1]}} if self.array else {}),
            "mlflow": self.mlflow,
            **({"pack": {**self.pack.to_dict(), "slot": self.slot}} if self.pack else {}),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Launch:
        """Read what :meth:`to_dict` returned, in this version or in an earlier one."""
        from slurmtrain.model.interruption.interval import InterruptionStats
        from slurmtrain.model.spec.sweep import Pack

        turn, history, array, pack = plain.get("turn"), plain.get("history"), plain.get("array"), plain.get("pack")
        return cls(
            attempt=int(plain["attempt"]),
            turn=Turn.from_dict(turn) if turn else None,
            from_start=bool(plain["from_start"]),
            since=plain["since"],
            history=InterruptionStats.from_dict(history) if history else None,
            array=(str(array["id"]), int(array["index"])) if array else None,
            mlflow=str(plain.get("mlflow") or ""),
            pack=Pack.from_dict(pack) if pack else None,
            slot=int(pack["slot"]) if pack else 0,
        )


def read_launch(submission: SubmissionDir) -> Launch | None:
    """What the submission tells its agents besides the plan; None if it has no such file. Raises PathError."""
    types = {"attempt": "int", "from_start": "bool", "since": "float | None", "history": "Mapping[str, Any] | None",
             "turn": "Mapping[str, Any] | None"}  # fmt: skip
    data = read_json(submission.launch, types=types)
    try:
        return Launch.from_dict(data) if data is not None else None
    except (KeyError, TypeError, ValueError) as error:
        raise PathError(f"{submission.launch} is not what slurmtrain wrote there ({error!r})") from error
