"""Tags that say where the newest and the best checkpoint of a run are, and their hashes."""

from __future__ import annotations

from slurmtrain.errors import CheckpointError
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Checkpoint, Run
from slurmtrain.model.spec.checkpoint import CheckpointSpec
from slurmtrain.runtime.checkpoint.files import read_manifest
from slurmtrain.tracking.to_mlflow.description import best_checkpoint, checkpoint_tags


def tags_of_checkpoints(run: Run, spec: CheckpointSpec, directory: RunDir) -> dict[str, str]:
    """The tags of the newest checkpoint of a run, and of the best, if its spec says which metric decides that.

    Args:
        run: The run.
        spec: Its section of the spec.
        directory: Its directory.
    """
    chosen = {"newest": run.checkpoint}
    if spec.keep.best is not None:
        chosen["best"] = best_checkpoint(run, spec.keep.best)
    tags: dict[str, str] = {}
    for name, checkpoint in chosen.items():
        if run.checkpoints:
            path = "" if checkpoint is None else str(directory.path / checkpoint.path)
            tags |= checkpoint_tags(name, checkpoint, path, _hash_of(directory, checkpoint))
    return tags


def _hash_of(directory: RunDir, checkpoint: Checkpoint | None) -> str:
    """The hash of a checkpoint's manifest; empty for a checkpoint of a script's own, or one that cannot be read."""
    if checkpoint is None or not checkpoint.published:
        return ""
    try:
        return str(read_manifest(directory.path / checkpoint.path).to_json()["xxh3_128"])
    except CheckpointError:
        return ""
