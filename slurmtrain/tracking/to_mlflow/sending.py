"""What an MLflow run is sent: metrics and params, without losing the others where one is refused, tags and times.

A refused batch is divided until the names that the store does not take are alone. An answer that says nothing about the
content, for example because the server is down or the disk full, ends the sending: the rest is sent again next time.
Metrics keep the time at which they were logged. MLflow identifies a metric by (key, timestamp, step, run, value), so
one that is sent twice is stored once.

MLflow accepts letters, digits, and ``_-. :/`` in names, at most 250 characters, and only paths in their shortest form,
since it may store each name as a file: ``train//loss`` is refused, and ``a/../b`` (``mlflow.utils.validation``). Such a
name is changed to one that is accepted.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from slurmtrain.errors import TrackingError
from slurmtrain.model.experiment.checkpoint import BestSpec
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.metrics.settled import Fate
from slurmtrain.model.query.fields import write_value
from slurmtrain.model.run.events.base import is_whole
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.lineage import Parent
from slurmtrain.model.run.run import Attempt, Checkpoint, Run
from slurmtrain.system.journal_files import JournalFile, read_pieces
from slurmtrain.tracking.tracker import MARK_LENGTH, TrackedPoint, is_marked, marked

# MAX_ENTITY_KEY_LENGTH in mlflow.utils.validation.
_LONGEST = 250
_ILLEGAL = re.compile(r"[^\w\-. :/]")
# Error codes of MLflow (mlflow/exceptions.py) that are about what was sent.
_REFUSALS = frozenset({"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS", "REQUEST_LIMIT_EXCEEDED"})
# What MLflow's store in files answers, among other things, if one name is the directory of another.
_UNEXPECTED = "INTERNAL_ERROR"
# MLflow's limit for one call.
_METRICS_A_CALL = 1000
PREFIXES = {Fate.FINAL: "", Fate.REPLAYED: "replayed/", Fate.OPEN: "live/"}
"""What the names of values begin with that do not belong to the surviving line."""
_SYSTEM_TAG = "slurmtrain.system_metrics"
# The charts of more nodes would hide each other, and MLflow shows a page for each name.
_NODES = 16
_SYSTEM_FILE = re.compile(r"system-([0-9]{1,9})\.jsonl")


def legal_name(name: str) -> str:
    """The name under which MLflow stores what is called ``name``; the same name if MLflow accepts it."""
    is_shortest = posixpath.normpath(name) == name and name != "." and not name.startswith(("..", "/"))
    if name and len(name) <= _LONGEST and not _ILLEGAL.search(name) and is_shortest and not is_marked(name):
        return name
    return _legal_mark(
        "/".join(part for part in _ILLEGAL.sub("_", name).split("/") if part not in ("", ".", "..")), name
    )


def flat_name(name: str) -> str:
    """Another such name, without slashes: where each name is a file, ``a`` and ``a/b`` exclude each other."""
    return _legal_mark(_ILLEGAL.sub("_", name).replace("/", "_"), name)


def _legal_mark(text: str, name: str) -> str:
    # MLflow refuses all names that begin with "..", even "..a".
    return marked(text.lstrip(".")[: _LONGEST - MARK_LENGTH], name)


class Api(NamedTuple):
    """What sends to the MLflow store at ``uri``.

    ``client``: an ``mlflow.MlflowClient``, or a :class:`.rest_client.RestClient`; ``entities``: the module of the
    classes that it sends; ``failure``: its exceptions.
    """

    uri: str
    client: Any
    entities: Any
    failure: tuple[type[Exception], ...]


class Sendable(Protocol):
    """Something to send: a named tuple with a ``name``."""

    @property
    def name(self) -> str:
        """Its name in the run."""

    def _replace(self, *, name: str) -> Self:
        """The same under another name."""


S = TypeVar("S", bound=Sendable)


@dataclass(slots=True)
class Sender(Generic[S]):
    """Sends batches of one kind to one MLflow run.

    ``log``: sends items under the names that they have then. ``failure``: its exceptions. ``present``: the names that
    the run has there already. ``refused``: the names that the store does not take, and why: they are not sent again.
    """

    log: Callable[[list[S]], None]
    failure: tuple[type[Exception], ...]
    present: Callable[[], Iterable[str]]
    refused: dict[str, str] = field(default_factory=dict)
    _accepted: dict[str, str] = field(default_factory=dict)

    def send(self, items: Sequence[S]) -> None:
        """Send a batch, except what the store refuses. Raises ``failure`` if the store cannot take anything now."""
        items = [item for item in items if item.name not in self.refused]
        if not items:
            return
        names = dict.fromkeys(item.name for item in items)
        try:
            self.log([item._replace(name=self._stored(item.name)) for item in items])
        except self.failure as error:
            if not self._is_about_content(error, list(names)):
                raise
            if len(names) == 1:
                self._send_one_name(items)
                return
            # Divided by names: all values of a name stay together, since it is a name that a store refuses.
            first = set(list(names)[: len(names) // 2])
            self.send([item for item in items if item.name in first])
            self.send([item for item in items if item.name not in first])
        else:
            self._accepted.update({name: self._stored(name) for name in names})

    def _send_one_name(self, items: Sequence[S]) -> None:
        """Send items of one name that the store does not take under its usual name: under another, or one by one."""
        name = items[0].name
        try:
            self.log([item._replace(name=flat_name(name)) for item in items])
            self._accepted[name] = flat_name(name)
        except self.failure as other:
            if not is_refusal(other):
                raise
            if len(items) == 1:
                self.refused[name] = first_line(other)
                return
            self.send(items[:1])
            self.send(items[1:])

    def _is_about_content(self, error: Exception, names: Sequence[str]) -> bool:
        """Whether sending less may help: the store refuses something, or one name is in the way of another."""
        if is_refusal(error):
            return True
        if getattr(error, "error_code", "") != _UNEXPECTED:
            return False
        stored = {self._stored(name) for name in names}
        others = {*self.present(), *self._accepted.values(), *stored}
        # Both cannot be files if one would be the directory of the other.
        return any(
            name.startswith(f"{other}/") or other.startswith(f"{name}/") for name in stored for other in others - {name}
        )

    def _stored(self, name: str) -> str:
        """The name under which the store takes a name, as far as is known."""
        return self._accepted.get(name) or legal_name(name)


def is_refusal(error: Exception) -> bool:
    """Whether an error of MLflow's is about what was sent."""
    return getattr(error, "error_code", "") in _REFUSALS


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class MlflowRunDeleted(TrackingError):
    """Somebody has deleted the MLflow run."""

    def __init__(self, mlflow_id: str) -> None:
        """``mlflow_id``: the MLflow run."""
        super().__init__(f"MLflow run {mlflow_id} was deleted in MLflow: 'slurmtrain sync' begins another one")


class MetricValue(NamedTuple):
    """The value of a metric after ``step`` finished steps, ``at_ms`` milliseconds after 1970."""

    name: str
    value: float
    at_ms: int
    step: int


class MetricLog:
    """The metrics of one MLflow run."""

    def __init__(self, api: Api, mlflow_id: str, refused: Sequence[str] = ()) -> None:
        """Begin sending.

        Args:
            api: Of the store that has the run.
            mlflow_id: The MLflow run.
            refused: Names that the store does not take, as :meth:`send` has returned them.
        """
        self._api = api
        self._mlflow_id = mlflow_id
        self._sender: Sender[MetricValue] = Sender(
            self._log, api.failure, lambda: api.client.get_run(mlflow_id).data.metrics, dict.fromkeys(refused, "")
        )

    def send(self, points: Sequence[TrackedPoint]) -> Mapping[str, str]:
        """Send points; returns the names that the store does not take, prefixed names on their own, and why."""
        values = [
            MetricValue(f"{PREFIXES[point.fate]}{name}", float(value), milliseconds(point.time), point.step)
            for point in points
            for name, value in point.metrics.items()
        ]
        for start in range(0, len(values), _METRICS_A_CALL):
            self._sender.send(values[start : start + _METRICS_A_CALL])
        return self._sender.refused

    def _log(self, values: Sequence[MetricValue]) -> None:
        try:
            log_values(self._api, self._mlflow_id, values)
        except self._api.failure as error:
            # MLflow refuses everything then, in the same words as an invalid name.
            if is_refusal(error) and self._api.client.get_run(self._mlflow_id).info.lifecycle_stage == "deleted":
                raise MlflowRunDeleted(self._mlflow_id) from error
            raise


def log_values(api: Api, mlflow_id: str, values: Sequence[MetricValue]) -> None:
    """Add values to an MLflow run, in as many calls as it takes.

    Args:
        api: Of the store that has the run.
        mlflow_id: The MLflow run.
        values: The values, under names that MLflow takes.
    """
    metrics = [api.entities.Metric(*value) for value in values]
    for start in range(0, len(metrics), _METRICS_A_CALL):
        api.client.log_batch(mlflow_id, metrics=metrics[start : start + _METRICS_A_CALL])


def send_system_metrics(api: Api, shown: Any, run: Run, directory: RunDir) -> None:
    """Send what nodes have measured of themselves since the last time, as ``system/<node>/<name>``.

    How far that went is in a tag of the MLflow run, which is set afterwards: whatever is sent twice is stored once.

    Args:
        api: Of the store that has the run.
        shown: The MLflow run.
        run: The run.
        directory: Its directory.
    """
    newest, sent = 0, {}
    with suppress(ValueError, TypeError, AttributeError):
        # The attempt whose files were sent last, and how far, in bytes by node.
        number, ends = json.loads(shown.data.tags.get(_SYSTEM_TAG, ""))
        newest, sent = int(number), {str(node): int(end) for node, end in ends.items()}
    for attempt in run.attempts:
        if attempt.number < newest:
            continue
        # Files of earlier attempts are complete.
        offsets = dict(sent) if attempt.number == newest else {}
        files = {}
        with suppress(OSError):
            for path in directory.attempt(attempt.job_id, attempt.restart).logs.iterdir():
                if match := _SYSTEM_FILE.fullmatch(path.name):
                    files[match[1]] = JournalFile(path.name, str(path), path.lstat().st_size)
        nodes = sorted(files, key=int)[:_NODES]
        new = [(node, files[node]) for node in nodes if files[node].size > offsets.get(node, 0)]
        for node, file in new:
            host = attempt.hosts.get(node, "node")
            # Several nodes of a local run are one machine.
            name = host if [*attempt.hosts.values()].count(host) == 1 else f"{host}-{node}"
            for piece in read_pieces(file, offsets.get(node, 0)):
                values = [value for _, record in piece.reading.records for value in _measured(name, attempt, record)]
                log_values(api, shown.info.run_id, values)
                offsets[node] = piece.end
        if new:
            api.client.set_tag(shown.info.run_id, _SYSTEM_TAG, json.dumps([attempt.number, offsets]))


def _measured(node: str, attempt: Attempt, record: Any) -> Iterator[MetricValue]:
    """The figures in a line; without a step, seconds since the attempt began stand for it."""
    time, metrics, step = float(record["t"]), record.get("metrics"), record.get("step")
    if not is_whole(step):
        step = max(0, int(time - (attempt.started_at or time)))
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        if isinstance(value, int | float):
            yield MetricValue(legal_name(f"system/{node}/{name}"), float(value), milliseconds(time), step)


# --- what MLflow shows of a run apart from its metrics: name, tags, params, times and status. Pure. -------------------

RUN_TAG = "slurmtrain.run_id"
SWEEP_TAG = "slurmtrain.sweep"
"""What the runs of a sweep are found by."""
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


def run_name(run: Run, origin: Origin, spec: Mapping[str, Any]) -> str:
    """The name of a run: with what its sweep varies, else with its id.

    Args:
        run: The run.
        origin: Where it came from.
        spec: Its spec as it is now, as plain data: a resumed run may have other values than its sweep gave it.
    """
    name = run.name[:_NAME_LENGTH]
    words = []
    for key, requested in origin.varies.items():
        value: Any = spec
        for part in key.split("."):
            value = value[part] if isinstance(value, Mapping) and part in value else None
        words.append(f"{key.removeprefix('params.')}={write_value(requested if value is None else value)}")
    varied = " ".join(words)
    return f"{name} {varied}"[:_NAME_LENGTH] if varied else f"{name}-{run.id}"


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


def queue_times(run: Run) -> list[MetricValue]:
    """How many seconds a run had spent in the queue when each of its attempts, whose number is the step, started."""
    times, total = [], 0.0
    for attempt in run.attempts:
        if attempt.started_at is not None:
            submitted_at = run.submitted_at if attempt.submitted_at is None else attempt.submitted_at
            waited = 0.0 if submitted_at is None else attempt.started_at - submitted_at
            total += max(0.0, attempt.spent.get("queue", waited))
            at_ms = milliseconds(attempt.started_at)
            times.append(MetricValue("system/queue_s", round(total, 3), at_ms, attempt.number))
    return times


def lasting_tags(run: Run, origin: Origin, spec: Spec, directory: str) -> dict[str, str]:
    """The tags that a run has from the beginning.

    Args:
        run: The run.
        origin: Where it came from.
        spec: Its spec.
        directory: The path of its directory.
    """
    git, parents = run.git or {}, [Parent.from_dict(parent) for parent in run.parents]
    tags = {
        RUN_TAG: run.id,
        "slurmtrain.name": run.name,
        "slurmtrain.dir": directory,
        "slurmtrain.plan_hash": run.plan_hash,
        SWEEP_TAG: run.sweep,
        # Not as ``mlflow.parentRunId``, under which MLflow hides a run in lists.
        "slurmtrain.parents": "; ".join(parent.phrase for parent in parents),
        "slurmtrain.parent_run_id": parents[0].run if parents else "",
        "slurmtrain.spec_file": origin.spec_file,
        "slurmtrain.executor": run.executor,
        "mlflow.user": origin.by.rpartition("@")[0] or origin.by,
        "mlflow.source.name": source_of(spec.command),
        "mlflow.source.type": "LOCAL",
        **{f"mlflow.source.git.{key}": git.get(key) for key in ("commit", "branch", "dirty")},
    }
    return {name: str(value) for name, value in tags.items() if value not in (None, "")}


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
    # Empty values are sent, too: each has to replace what was there before.
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


def best_checkpoint(run: Run, best: BestSpec | None) -> Checkpoint | None:
    """The best checkpoint on disk by what the spec calls best, of equal ones the last; None if that is unknown."""
    if best is None:
        return None
    sign = 1 if best.mode == "max" else -1
    valued = [
        (sign * value, each.step or 0, each)
        for each in run.on_disk
        # What is not a number differs from itself, and would be the best or not by its place in the list.
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
