"""One round of a watch: a sync, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurmtrain.config import Config
from slurmtrain.errors import SlurmtrainError
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import Synced, sync
from slurmtrain.system.files import describe_os_error


@dataclass(frozen=True, slots=True)
class WatchRound:
    """What one round did, or why it failed.

    ``synced``: None if the round failed. ``failure``: why it did. ``before``: the runs' states in the registry before
    the round. ``slurm_down``: squeue did not answer.
    """

    synced: Synced | None = None
    failure: str = ""
    before: Mapping[str, str] = field(default_factory=dict)
    slurm_down: bool = False


def do_round(config: Config) -> WatchRound:
    """Do one round, with new answers from Slurm. Never raises: the result of a failed round says why.

    Slurm is asked with one squeue, and with sacct only for what squeue leaves open.
    """
    # A new workspace: its caches, such as Slurm's answers, would become outdated over months.
    warnings: list[str] = []
    notes: list[str] = []
    workspace = Workspace(config, warn=warnings.append, note=notes.append)
    before: Mapping[str, str] = {}
    try:
        if workspace.has_registry:
            before = {run_id: row.state for run_id, row in workspace.store.index().items()}
        synced = sync(workspace)
        synced.problems += warnings
        synced.notes += notes
        return WatchRound(synced, before=before, slurm_down=_is_slurm_down(workspace, synced))
    except SlurmtrainError as error:
        return WatchRound(failure=str(error), before=before)
    except OSError as error:
        return WatchRound(failure=f"{error.filename or config.runs}: {describe_os_error(error)}", before=before)
    except Exception as error:  # noqa: BLE001 (whatever one round stumbles over may be gone by the next)
        return WatchRound(failure=f"an unexpected error: {type(error).__name__}: {error}", before=before)
    finally:
        # The store is opened on first use; accessing it here would open it.
        if "store" in vars(workspace):
            workspace.store.close()


def _is_slurm_down(workspace: Workspace, synced: Synced) -> bool:
    """Whether squeue did not answer.

    A round that submitted or ended a job has discarded the answer, and would have to ask again; but squeue did answer,
    or the round would not have acted.
    """
    acted = synced.started or synced.released or synced.cancelled
    return bool(synced.observed.problems) and not acted and not workspace.scheduler.queue().answered
