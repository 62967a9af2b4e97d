"""What MLflow shows of a run apart from its metrics: name, tags, params, times and status. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from slurmtrain.model.experiment.checkpoint import BestSpec
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.query.fields import write_value
from slurmtrain.model.run.lineage import Parent
from slurmtrain.model.run.run import Checkpoint, Run

RUN_TAG = "slurmtrain.run_id"
SWEEP_TAG = "slurmtrain.sweep_id"
"""What the parent of the runs of a sweep is found by."""
NOTE_TAG = "mlflow.note.content"
"""MLflow shows it as the description of a run."""
# MLflow's limits for one value.
_PARAM_LENGTH = 6000
_NAME_LENGTH = 200
_STATUS = {
    "created": "SCHEDULED", "pending": "SCHEDULED", "requeued": "SCHEDULED", "running": "RUNNING",
    "completed": "FINISHED", "failed": "FAILED", "lost": "FAILED", "cancelled": "KILLED",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run came from.

    ``by``: who submitted it, as ``user@host``; ``spec_file``: the path of its spec; ``varies``: its values of the keys
    of the spec that its sweep varies.
    """

    by: str = ""
    spec_file: str = ""
    varies: Mapping[str, Any] = field(default_factory=dict)


class FlatParam(NamedTuple):
    """A param: its ``name``, and its ``value`` as text."""

    name: str
    value: str


class QueueTime(NamedTuple):
    """How many ``seconds`` a run had spent in the queue when its ``attempt`` started, ``at`` seconds since 1970."""

    attempt: int
    at: float
    seconds: float


def run_name(run: Run, origin: Origin, spec: Mapping[str, Any]) -> str:
    """The name of a run: with what its sweep varies, else with its id.

    Args:
        run: The run.
        origin: Where it came from.
        spec: Its spec as it is now, as plain data: a resumed run may have other values than its sweep gave it.
    """
    name = run.name[:_NAME_LENGTH]
    values = {key.removeprefix("params."): _value_at(spec, key, value) for key, value in origin.varies.items()}
    varied = " ".join(f"{key}={write_value(value)}" for key, value in values.items())
    return f"{name} {varied}"[:_NAME_LENGTH] if varied else f"{name}-{run.id}"


def _value_at(spec: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    """The value of a dotted key in plain data."""
    value: Any = spec
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return otherwise
        value = value[part]
    return value


def status_of(run: Run) -> str | None:
    """MLflow's status of a run; None: nothing is known that would change it."""
    return _STATUS.get(run.state)


def started_ms(run: Run) -> int | None:
    """When training started, in milliseconds since 1970; when it was to start or ended, if it never did."""
    for time in (run.started_at, run.ended_at, run.submitted_at):
        if time is not None:
            return milliseconds(time)
    return None


def milliseconds(time: float) -> int:
    """A time in milliseconds since 1970. MLflow refuses earlier ones."""
    return max(0, int(time * 1000))


def queue_times(run: Run) -> list[QueueTime]:
    """The time that a run had spent in the queue when each of its attempts started."""
    times, total = [], 0.0
    for attempt in run.attempts:
        if attempt.started_at is not None:
            submitted_at = run.submitted_at if attempt.submitted_at is None else attempt.submitted_at
            waited = 0.0 if submitted_at is None else attempt.started_at - submitted_at
            total += max(0.0, attempt.spent.get("queue", waited))
            times.append(QueueTime(attempt.number, attempt.started_at, round(total, 3)))
    return times


def lasting_tags(run: Run, origin: Origin, spec: Spec, directory: str) -> dict[str, str]:
    """The tags that a run has from the beginning.

    Args:
        run: The run.
        origin: Where it came from.
        spec: Its spec.
        directory: The path of its directory.
    """
    git = run.git or {}
    tags = {
        RUN_TAG: run.id,
        "slurmtrain.name": run.name,
        "slurmtrain.dir": directory,
        "slurmtrain.plan_hash": run.plan_hash,
        "slurmtrain.sweep": run.sweep,
        **_parents(run),
        "slurmtrain.spec_file": origin.spec_file,
        "slurmtrain.executor": run.executor,
        "mlflow.user": origin.by.rpartition("@")[0] or origin.by,
        "mlflow.source.name": source_of(spec.command),
        "mlflow.source.type": "LOCAL",
        **{f"mlflow.source.git.{key}": git.get(key) for key in ("commit", "branch", "dirty")},
    }
    return {name: str(value) for name, value in tags.items() if value not in (None, "")}


def _parents(run: Run) -> dict[str, str]:
    """The runs that a run comes from. Not as ``mlflow.parentRunId``, under which MLflow hides a run in lists."""
    if not run.parents:
        return {}
    parents = [Parent.from_dict(parent) for parent in run.parents]
    return {
        "slurmtrain.parents": "; ".join(parent.phrase for parent in parents),
        "slurmtrain.parent_run_id": parents[0].run,
    }


def source_of(command: str) -> str:
    """What a command runs: its script or module, else its program."""
    words = shlex.split(command)
    scripts = (word for word in words if word.endswith((".py", ".sh")))
    modules = (after for word, after in pairwise(words) if word == "-m")
    return next(scripts, None) or next(modules, None) or words[0]


def changing_tags(run: Run) -> dict[str, str]:
    """The tags that change while a run goes on."""
    ended = next((attempt for attempt in reversed(run.attempts) if attempt.cause), None)
    number = run.newest.number if run.newest else 0
    tags = {
        "slurmtrain.state": run.state,
        "slurmtrain.reason": run.reason,
        "slurmtrain.cause": ended.cause if ended else "",
        "slurmtrain.attempt": number,
        "slurmtrain.attempts": len(run.attempts),
        "slurmtrain.job_id": run.newest.job_id if run.newest else "",
        "slurmtrain.nodes": ",".join(run.newest.nodes) if run.newest else "",
        "slurmtrain.total_steps": "" if run.total_steps is None else run.total_steps,
        "slurmtrain.lost_steps": "" if run.lost_steps is None else run.lost_steps,
        "slurmtrain.goodput": "" if run.goodput is None else f"{run.goodput:.4f}",
        "slurmtrain.tags": ", ".join(run.tags),
    }
    # A description that somebody has written in MLflow stays, unless there is a note.
    note = {NOTE_TAG: run.note} if run.note else {}
    return {name: str(value) for name, value in tags.items()} | note


def checkpoint_tags(name: str, checkpoint: Checkpoint | None, path: str, digest: str) -> dict[str, str]:
    """The tags of one checkpoint; empty ones if there is none any more.

    Args:
        name: Which one it is: ``newest`` or ``best``.
        checkpoint: The checkpoint.
        path: Its absolute path.
        digest: The hash of its manifest, which holds the hashes of its files; empty: it has none.
    """
    step = "" if checkpoint is None or checkpoint.step is None else str(checkpoint.step)
    tags = {"step": step, "path": path if checkpoint else "", "hash": f"xxh3_128:{digest}" if digest else ""}
    return {f"slurmtrain.checkpoint.{name}.{key}": value for key, value in tags.items()}


def best_checkpoint(run: Run, best: BestSpec | None) -> Checkpoint | None:
    """The best checkpoint on disk by what the spec calls best, of equal ones the last; None if that is unknown."""
    if best is None:
        return None
    sign = 1 if best.mode == "max" else -1
    valued = [
        (sign * value, each.step or 0, each)
        for each in run.on_disk
        if each.complete and (value := each.metrics.get(best.metric)) is not None and value == value
    ]
    return max(valued, key=lambda ranked: ranked[:2])[2] if valued else None


def flat_params(params: Mapping[str, Any], prefix: str = "") -> Iterator[FlatParam]:
    """The params of sections and their subsections by dotted names."""
    for name, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from flat_params(value, f"{prefix}{name}.")
        else:
            yield FlatParam(f"{prefix}{name}", str(value)[:_PARAM_LENGTH])


def former_params(history: Sequence[tuple[int, Mapping[str, str]]]) -> dict[str, str]:
    """Tags with the values that params had in earlier attempts, each where it was new.

    Args:
        history: The params of attempts by the attempts' numbers, in order; the newest attempt's come last.
    """
    tags: dict[str, str] = {}
    newest = history[-1][1] if history else {}
    before: Mapping[str, str] = {}
    for number, params in history[:-1]:
        for name, value in params.items():
            if newest.get(name) != value and before.get(name) != value:
                tags[f"slurmtrain.attempt_{number}.params.{name}"] = value
        before = params
    return tags


def sweep_name(run: Run) -> str:
    """The name of the parent of the runs of a sweep."""
    return f"{run.name[:_NAME_LENGTH]} sweep {run.sweep}"
