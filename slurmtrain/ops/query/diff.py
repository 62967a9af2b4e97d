"""Two runs side by side: how their specs, code, environments, results and checkpoints differ."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import CheckpointError, PathError, RunUnreadable, UserError
from slurmtrain.model.environment import Changes, compare_environments
from slurmtrain.model.experiment.code import LINK, CodeSnapshot, Difference, compare_manifests
from slurmtrain.model.metrics.curves import Divergence, find_divergence
from slurmtrain.model.query.fields import identity
from slurmtrain.model.query.measures import is_larger_better
from slurmtrain.model.run.accounting import GPU_S, summed, tally
from slurmtrain.model.run.layout import RunDir, checkpoint_step
from slurmtrain.ops.query.compare import spec_settings
from slurmtrain.ops.shared.find import find
from slurmtrain.ops.shared.next_attempts import current_plan
from slurmtrain.ops.shared.run_details import newest_environment
from slurmtrain.ops.shared.views import SCHEMA, run_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.code_snapshots import describe_revision
from slurmtrain.runtime.code.code_copy import read_code, read_code_manifest

if TYPE_CHECKING:
    from slurmtrain.model.run.run import Run

# Larger files are data or generated.
_MOST_BYTES = 1 << 20
_MOST_LINES = 10_000
Pair = tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeDifference:
    """How the code of two runs differs.

    ``versions``: the snapshot, else the revision, of each, in words. ``same``: whether they are the same; None if that
    is not known, and ``why``. ``files``: which differ; None without two snapshots. ``lines``: of text files, as
    ``diff -u`` prints them.
    """

    versions: tuple[str, str]
    same: bool | None
    why: str = ""
    files: Difference | None = None
    lines: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """This as JSON."""
        return {**asdict(self), "files": self.files._asdict() if self.files else None}


@dataclass(frozen=True, slots=True)
class CheckpointEquality:
    """Whether checkpoints of two runs have equal files: ``equal`` is None if that is not known, and ``why``."""

    equal: bool | None
    step: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """How two runs differ.

    ``runs``: RUN of both. ``spec``: values by key, where they differ. ``environment``: by kind. ``result``: all
    compared values, also equal ones. ``metrics``: where the metrics that both have logged begin to differ. ``notes``:
    what cannot be read.
    """

    runs: tuple[Mapping[str, Any], Mapping[str, Any]]
    spec: Mapping[str, Pair]
    code: CodeDifference
    environment: Mapping[str, Changes]
    result: Mapping[str, Pair]
    metrics: Mapping[str, Divergence]
    checkpoints: CheckpointEquality
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """What ``diff --json`` prints."""
        return {
            "schema": SCHEMA,
            "runs": self.runs,
            "spec": self.spec,
            "code": self.code.to_json(),
            "environment": self.environment,
            "result": self.result,
            "metrics": {name: divergence.to_dict() for name, divergence in self.metrics.items()},
            "checkpoints": asdict(self.checkpoints),
        }


def diff(workspace: Workspace, first: str, second: str, *, lines: bool = False) -> RunDifference:
    """How two runs differ, as their newest attempts were.

    Args:
        workspace: Where they are.
        first: A run, by id, a prefix of it, name or ``@last``.
        second: Another one.
        lines: Also the differing lines of text files of the code.

    Raises:
        RunNotFound: A name refers to no run.
        UserError: Both refer to the same one.
    """
    ids, observed = find(workspace, [first, second])
    if ids[0] == ids[1]:
        raise UserError(f"{first!r} and {second!r} are the same run, {ids[0]}; name two different ones by their ids")
    loaded = workspace.store.load_all(ids)
    runs = (loaded[ids[0]], loaded[ids[1]])
    records = (run_json(workspace, observed.runs[ids[0]]), run_json(workspace, observed.runs[ids[1]]))
    notes = list(observed.warnings())
    settings = [spec_settings(workspace, record, run, notes) for record, run in zip(records, runs, strict=True)]
    # Of the interpreter says the section on environments more.
    keys = [name for name in dict.fromkeys((*settings[0], *settings[1])) if name != "python"]
    pairs = {name: (settings[0].get(name), settings[1].get(name)) for name in keys}
    environments = [newest_environment(workspace, run) for run in runs]
    return RunDifference(
        runs=records,
        spec={name: pair for name, pair in pairs.items() if identity(pair[0]) != identity(pair[1])},
        code=_code_difference(workspace, runs, records, notes, lines=lines),
        environment=compare_environments(*environments),
        result={**_outcomes(runs, records), **_metrics(workspace, records)},
        metrics=_divergences(workspace, runs, notes),
        checkpoints=_checkpoints(workspace, runs),
        notes=notes,
    )


# --- code -------------------------------------------------------------------------------------------------------------


def _code_difference(
    workspace: Workspace,
    runs: tuple[Run, Run],
    records: tuple[Mapping[str, Any], Mapping[str, Any]],
    notes: list[str],
    *,
    lines: bool,
) -> CodeDifference:
    first, second = (_snapshot(workspace, run, notes) for run in runs)
    revisions = (describe_revision(records[0]["git"]), describe_revision(records[1]["git"]))
    earlier, later = (
        f"snapshot {snapshot.short_hash}" if snapshot is not None else revision or "no snapshot, and no revision"
        for snapshot, revision in zip((first, second), revisions, strict=True)
    )
    difference = partial(CodeDifference, versions=(earlier, later))
    if first is not None and second is not None:
        if first.hash == second.hash:
            return difference(same=True)
        directory = workspace.root.run(runs[0].id)
        try:
            manifests = (read_code_manifest(directory, each.hash) for each in (first, second))
            files = compare_manifests(*manifests)
            text = differing_lines(directory, first.hash, second.hash, files) if lines else ()
        except PathError as error:
            return difference(same=False, why=f"how they differ is unknown: {str(error).partition('; ')[0]}")
        return difference(same=False, files=files, lines=text)
    if first is None and second is None and all(revisions):
        differences = [workspace.root.run(run.id).code_difference for run in runs]
        # There is no file if the code was clean, or if its difference was too long to keep (Provenance).
        texts = [path.read_bytes() if path.is_file() else b"" for path in differences]
        if revisions[0] != revisions[1] or texts[0] != texts[1]:
            return difference(same=False, why="they have no snapshots, only these revisions")
        return difference(same=True, why="as far as git can tell: they have no snapshots")
    return difference(same=None, why="at least one has neither a snapshot nor a revision")


def _snapshot(workspace: Workspace, run: Run, notes: list[str]) -> CodeSnapshot | None:
    try:
        return current_plan(workspace.root.run(run.id), run).code
    except PathError as error:
        notes.append(f"run {run.id}: {error}")
        return None


def differing_lines(run: RunDir, earlier: str, later: str, difference: Difference) -> list[str]:
    """The differing lines of files, as ``diff -u`` prints them, at most 10,000.

    Args:
        run: A run in the runs root of both.
        earlier: The hash of a snapshot.
        later: The hash of another one.
        difference: How they differ.

    Raises:
        PathError: One of them is missing or damaged.
    """
    before = _texts_of_files(run, earlier, {*difference.changed, *difference.removed})
    after = _texts_of_files(run, later, {*difference.changed, *difference.added})
    lines: list[str] = []
    for path in sorted({*before, *after}):
        old, new = before.get(path, []), after.get(path, [])
        if old is None or new is None:
            lines.append(f"{path} differs: it is not text, or larger than 1 MiB")
        else:
            lines += difflib.unified_diff(old, new, f"a/{path}", f"b/{path}", lineterm="")
        if len(lines) > _MOST_LINES:
            return [*lines[:_MOST_LINES], f"(and more; these are the first {_MOST_LINES} lines)"]
    return lines


def _texts_of_files(run: RunDir, name: str, paths: Collection[str]) -> dict[str, list[str] | None]:
    """The lines of some files of a snapshot; None for what is no text, or too large. Raises PathError."""
    texts: dict[str, list[str] | None] = {}
    for file, content in read_code(run, name) if paths else ():
        if file.path not in paths:
            continue
        texts[file.path] = [f"a link to {file.digest}"] if file.kind == LINK else None
        if file.kind != LINK and len(content) <= _MOST_BYTES and b"\0" not in content:
            with contextlib.suppress(UnicodeDecodeError):
                texts[file.path] = content.decode().splitlines()
    return texts


# --- results ----------------------------------------------------------------------------------------------------------


def _outcomes(runs: tuple[Run, Run], records: tuple[Mapping[str, Any], Mapping[str, Any]]) -> dict[str, Pair]:
    """What became of both: state, steps, attempts, seconds on nodes, GPU-hours."""
    gpu_seconds = [sum(of_place.get(GPU_S, 0.0) for of_place in tally(run).values()) for run in runs]
    first, second = (
        {
            "state": record["state"],
            "step": record["step"],
            "attempts": len(run.attempts),
            "lost_steps": record["lost_steps"],
            "seconds": round(sum(summed(run.attempts).values()), 1) if run.attempts else None,
            "gpu_hours": round(seconds / 3600, 4),
        }
        for run, record, seconds in zip(runs, records, gpu_seconds, strict=True)
    )
    return {name: (first[name], second[name]) for name in first}


def _metrics(workspace: Workspace, records: tuple[Mapping[str, Any], Mapping[str, Any]]) -> dict[str, Pair]:
    """The newest values of all metrics, and the best ones of metrics whose names show what is better."""
    summaries = workspace.store.surviving_metrics([record["id"] for record in records])
    result: dict[str, Pair] = {}
    for name in dict.fromkeys(name for record in records for name in record["metrics"]):
        result[name] = (records[0]["metrics"].get(name), records[1]["metrics"].get(name))
        larger = is_larger_better(name)
        if larger is not None:
            both = [summaries.get(record["id"], {}).get(name) for record in records]
            best = [None if each is None else each.max if larger else each.min for each in both]
            result[f"best {name}"] = (best[0], best[1])
    return result


def _divergences(workspace: Workspace, runs: tuple[Run, Run], notes: list[str]) -> dict[str, Divergence]:
    """Where the metrics that both runs have logged begin to differ, the earliest first."""
    from slurmtrain.history import read_history

    names = [name for name in runs[0].metrics if name in runs[1].metrics]
    if not names:
        return {}
    histories = []
    for run in runs:
        try:
            histories.append(read_history(run, workspace.root.run(run.id), names))
        except RunUnreadable as error:
            notes.append(str(error))
            return {}
        notes += histories[-1].problems
    first, second = (history.curves for history in histories)
    compared = {
        name: find_divergence(first[name].kept, second[name].kept) for name in names if name in first and name in second
    }
    return dict(sorted(compared.items(), key=lambda each: math.inf if each[1].step is None else each[1].step))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _checkpoints(workspace: Workspace, runs: tuple[Run, Run]) -> CheckpointEquality:
    """Whether the newest checkpoints of a step that both have saved are equal, by the hashes in their manifests."""
    from slurmtrain.runtime.checkpoint.checkpoint_files import published, read_manifest

    paths = [
        {checkpoint_step(path.name): path for path in published(workspace.root.run(run.id).checkpoints)} for run in runs
    ]
    steps = [step for step in paths[0] if step is not None and step in paths[1]]
    if not steps:
        has = []
        for run, of_run in zip(runs, paths, strict=True):
            own = [str(step) for step in of_run if step is not None]
            has.append(f"run {run.id} has " + (f"steps {', '.join(own[:5])}" if own else "none"))
        return CheckpointEquality(None, why=f"they have no checkpoint of the same step: {', '.join(has)}")
    step = max(steps)
    try:
        first, second = (read_manifest(of_run[step]) for of_run in paths)
    except CheckpointError as error:
        return CheckpointEquality(None, step, str(error))
    if first.world_size != second.world_size:
        sizes = f"{first.world_size} and {second.world_size}"
        return CheckpointEquality(None, step, f"each rank stores its part, and they were saved by {sizes} ranks")
    return CheckpointEquality(first.files == second.files, step)
