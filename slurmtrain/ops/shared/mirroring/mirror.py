"""Sending runs to the trackers named by their plans or the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import LockHeld, SlurmtrainError
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.locks import locked

if TYPE_CHECKING:
    from slurmtrain.registry.choice.listed import Listed
    from slurmtrain.registry.sent import Sent


@dataclass(slots=True)
class MirrorOutcome:
    """The results of mirroring: the ids of runs with anything sent, the failures, and what trackers refused."""

    mirrored: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def mirror_runs(workspace: Workspace, runs: Mapping[str, Listed], *, wait: bool = True) -> MirrorOutcome:
    """Send what is new in these runs to their trackers. A tracker that is down is a problem, never a failure.

    Args:
        workspace: Where the runs are.
        runs: The runs by id, as just observed.
        wait: Wait while another command sends; otherwise nothing is sent meanwhile.
    """
    outcome = MirrorOutcome()
    if workspace.store.in_memory:  # it is unknown what was sent already
        return outcome
    from slurmtrain.registry.sent import Sent

    sent = workspace.store.sent()
    waiting = [
        run_id
        for run_id, listed in runs.items()
        if listed.attempt and not listed.unreadable and listed.row["tracked"] is not False and _has_begun(listed.row)
        and any(each.revision != listed.revision for each in sent.get(run_id, {"": Sent("", "")}).values())
        and workspace.root.run(run_id).path.exists()
    ]  # fmt: skip
    if not waiting:
        return outcome
    try:
        with locked(workspace.root.tracking_lock, wait=wait) as lock:
            if lock is not None:
                _send(workspace, sent, waiting, outcome)
    except LockHeld as error:
        outcome.problems.append(f"nothing was sent to trackers: {error}")
    return outcome


def _has_begun(row: Mapping[str, Any]) -> bool:
    """Whether a run can be shown with the time at which it started, which some trackers never change."""
    return row["started_at"] is not None or row["ended_at"] is not None or row["mlflow_run_id"] is not None


def _send(
    workspace: Workspace, sent: Mapping[str, Mapping[str, Sent]], run_ids: Sequence[str], outcome: MirrorOutcome
) -> None:
    from slurmtrain.ops.shared.mirroring.sending import Trackers, send_run

    trackers = Trackers(workspace)
    for run_id in run_ids:
        if not workspace.root.run(run_id).path.exists():  # it was deleted while the lock was waited for
            continue
        try:
            problems = send_run(workspace, trackers, run_id, sent.get(run_id, {}))
        except (SlurmtrainError, OSError) as error:
            outcome.problems.append(f"run {run_id} cannot be mirrored: {error}")
            continue
        # A tracker that is down is so for all runs.
        outcome.problems += [problem for problem in problems.values() if problem and problem not in outcome.problems]
        if not all(problems.values()):
            outcome.mirrored.append(run_id)
    outcome.notes += trackers.notes
