"""The results that a run gets from the runs that it starts after: checkpoints, directories and values."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.errors import NoCheckpoint, PathError, SlurmtrainError
from slurmtrain.model.run.chain.upstreams import Upstream
from slurmtrain.model.run.files.checkpoint_names import checkpoint_name
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.root import RunsRoot
from slurmtrain.model.run.run import Run
from slurmtrain.model.spec.chain import Reference, references_of
from slurmtrain.model.spec.checkpoint import StartFromSpec
from slurmtrain.model.spec.spec import Spec
from slurmtrain.runtime.chain.files import has_begun, read_facts, write_facts
from slurmtrain.runtime.chain.turn import read_upstream_runs
from slurmtrain.runtime.checkpoint.files import link_checkpoint, newest_published, published, start_point
from slurmtrain.system.files import describe_os_error


def take_from_upstreams(run: RunDir, spec: Spec, upstreams: Sequence[Upstream], *, is_node_0: bool) -> None:
    """Note the results that a run gets from the runs that it starts after, which have ended.

    Later attempts use the same; only what an override has added is looked up then.

    Args:
        run: The run.
        spec: Its spec.
        upstreams: The runs that it starts after.
        is_node_0: Whether this is the node that writes.

    Raises:
        SlurmtrainError: An upstream does not have it.
    """
    recorded = read_facts(run) if has_begun(run) else None
    references = [each for each in references_of(spec) if str(each) not in (recorded or {})]
    if recorded is not None and not references:
        return
    facts = find_facts(run, upstreams, references)
    if not is_node_0:
        return
    if recorded is None and spec.start_from is not None:
        link_upstream(run, upstreams, spec.start_from)
    write_facts(run, {**(recorded or {}), **facts})


def find_facts(run: RunDir, upstreams: Sequence[Upstream], references: Sequence[Reference]) -> dict[str, Any]:
    """What the references of a run stand for, by their text.

    Args:
        run: The run.
        upstreams: The runs that it starts after, which have ended.
        references: To facts of these.

    Raises:
        SlurmtrainError: An upstream has no such fact.
    """
    if not references:
        return {}
    runs, root = read_upstream_runs(run, upstreams), RunsRoot(run.path.parent)
    by_name = {upstream.name: upstream for upstream in upstreams}
    facts = {}
    for reference in references:
        upstream = by_name.get(reference.run)
        ended = None if upstream is None else runs.get(upstream.run)
        value = None if ended is None else _fact(root.run(ended.id), ended, reference.field)
        if value is None:
            raise SlurmtrainError(f"{reference}: run {upstream or reference.run} has no {_noun(reference.field)}")
        facts[str(reference)] = value
    return facts


def link_upstream(run: RunDir, upstreams: Sequence[Upstream], start_from: StartFromSpec) -> None:
    """Let a run begin with a checkpoint of one of the runs that it starts after, if it has not been given one before.

    Args:
        run: The run.
        upstreams: The runs that it starts after, which have ended.
        start_from: The checkpoint, and its run.

    Raises:
        SlurmtrainError: The upstream has no such checkpoint of slurmtrain's format, or it cannot be linked.
    """
    upstream = next((each for each in upstreams if start_from.run in (each.name, each.run)), None)
    if upstream is None or start_point(run) is not None:
        return
    checkpoints = RunsRoot(run.path.parent).run(upstream.run).checkpoints
    name = None if start_from.step is None else checkpoint_name(int(start_from.step))
    path = next((each for each in published(checkpoints) if name in (None, each.name)), None)
    if path is None:
        of_step = "" if start_from.step is None else f" of step {start_from.step}"
        raise NoCheckpoint(
            f"run {upstream} has no checkpoint{of_step} to begin with that slurmtrain.session() can read"
        )
    try:
        # A killed attempt may have linked only some of its files.
        shutil.rmtree(run.start, ignore_errors=True)
        link_checkpoint(path, run)
    except OSError as error:
        raise PathError(f"cannot link {path} into {run.start}: {describe_os_error(error)}") from error


def _fact(directory: RunDir, run: Run, field: str) -> Any:
    newest = run.checkpoint
    step = run.step if run.step is not None or newest is None else newest.step
    facts: Mapping[str, Any] = {"id": run.id, "dir": str(directory.path), "step": step}
    if field == "checkpoint":
        checkpoint = _newest_checkpoint(directory, run)
        return None if checkpoint is None else str(checkpoint)
    return run.metrics.get(field.removeprefix("metrics.")) if field.startswith("metrics.") else facts[field]


def _newest_checkpoint(directory: RunDir, run: Run) -> Path | None:
    """The newest complete checkpoint: the library's own, else one that the script saved itself."""
    published = newest_published(directory.checkpoints)
    if published is not None:
        return published
    complete = [directory.path / each.path for each in reversed(run.checkpoints) if each.on_disk and each.complete]
    return next((path for path in complete if path.exists()), None)


def _noun(field: str) -> str:
    return f"metric {field.removeprefix('metrics.')!r}" if field.startswith("metrics.") else field
