"""The MLflow runs that show runs: their params, tags and status, apart from metrics.

MLflow never changes a param or the time at which a run started (``runs/update`` takes a status, the end and a name
only). So a run is created there once it has started, and a run that goes on with other params gets a new MLflow run,
with everything that the one before has: that one is deleted, unless somebody else has logged something there, and names
its successor in a tag.

Node 0 of a run creates its MLflow run, and so may a command at the same time. MLflow has no tag that only one run can
have, and cannot create a run on condition that there is none. So it is a file that decides: whoever has created an
MLflow run links a file that names it, which only one process can do, and the others use that one and delete their own.
If a process is killed before it links the file, the next one finds its MLflow run by a tag, and links that. When the
MLflow run that was chosen is replaced, or deleted by somebody, another choice says what comes after it.

The runs of a sweep have its id as a tag. They have no parent: MLflow's list hides runs below one, and draws the curves
of the parent instead, which has none.
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.errors import CheckpointError, PathError, TrackingError
from slurmtrain.model.run.events.base import select
from slurmtrain.model.run.events.command_events import RunCreated
from slurmtrain.model.run.layout import RunDir, RunsRoot
from slurmtrain.model.run.run import Run
from slurmtrain.runtime.checkpoint.checkpoint_files import read_manifest
from slurmtrain.runtime.environment.node import read_plan
from slurmtrain.runtime.job.run_reader import read_events
from slurmtrain.system.files import link_json, make_directory, read_json
from slurmtrain.tracking.to_mlflow import sending
from slurmtrain.tracking.to_mlflow.database import artifacts_of, make_shared
from slurmtrain.tracking.to_mlflow.sending import Api, Sender, flat_name, legal_name, log_values
from slurmtrain.tracking.tracker import TrackedRun

ARTIFACTS = "slurmtrain"
"""The folder of the artifacts of a run that slurmtrain sends."""
# MLflow's limits for one call and for one value.
_PARAMS_A_CALL = 100
_TAGS_A_CALL = 100
_TAG_LENGTH = 5000
_REPLACED_BY = "slurmtrain.replaced_by"
_REPLACES = "slurmtrain.replaces"
_PARENT = "mlflow.parentRunId"
# What earlier versions found the parent of the runs of a sweep by.
_SWEEP_PARENT = "slurmtrain.sweep_id"
_SERVERS = ("http://", "https://")
# What MLflow and slurmtrain set themselves; other tags are people's own.
_OURS = ("slurmtrain.", "mlflow.")
_OWN_METRICS = ("slurmtrain/", "system/", "replayed/", "live/")
# Instead of an MLflow run, for the choice of the first one.
_FIRST = ""


class Choices:
    """The MLflow runs that were chosen for one subject, one after the other."""

    def __init__(self, folder: Path, *subject: str) -> None:
        """``folder``: where the files are. ``subject``: what tells this subject from others with the same folder."""
        self._folder = folder
        self._subject = subject

    def after(self, mlflow_id: str = _FIRST) -> str | None:
        """The MLflow run that was chosen after ``mlflow_id``, or first; None: that is still open. Raises PathError."""
        choice = read_json(self._file(mlflow_id), types={"mlflow_run_id": "str"})
        if choice is None:
            return None
        if not choice.get("mlflow_run_id"):
            raise PathError(f"{self._file(mlflow_id)} names no MLflow run; remove it")
        return str(choice["mlflow_run_id"])

    def choose(self, mlflow_id: str, after: str) -> str:
        """Choose an MLflow run ``after`` another one; returns the one that is chosen, maybe by somebody else.

        Raises OSError; PathError.
        """
        make_directory(self._folder)
        link_json(self._file(after), {"mlflow_run_id": mlflow_id, "after": after, "of": list(self._subject)})
        chosen = self.after(after)
        assert chosen is not None
        return chosen

    def _file(self, after: str) -> Path:
        name = hashlib.sha256("\n".join([*self._subject, after]).encode()).hexdigest()[:24]
        return self._folder / f"{name}.json"


class MlflowRuns:
    """Runs in one MLflow store."""

    def __init__(self, api: Api, root: RunsRoot) -> None:
        """``api``: of the store. ``root``: the runs root."""
        self._api = api
        self._client = api.client
        self._root = root
        self.notes: list[str] = []
        """What the store did not take, as sentences."""

    def open(self, tracked: TrackedRun, earlier: str | None, *, anew: bool) -> str:
        """The id of the MLflow run that shows a run as it is now: an existing one, or a new one.

        Args:
            tracked: The run.
            earlier: What showed it the last time; None: that is unknown.
            anew: Whether that shows points that were rolled back.
        """
        choices = Choices(tracked.directory.mlflow_runs, self._api.uri)
        # What was chosen last is mostly known, and earlier versions have left no files of choices. Whoever replaced
        # one may have been killed before it was deleted.
        last, shown = self._newest_choice(choices, earlier, tracked)
        if shown is None:
            present = next(iter(self._present(tracked)), None)
            created = self._create(tracked, {}) if present is None else str(present.info.run_id)
            shown = self._client.get_run(self._settle(choices, created, last))
        mlflow_id, params = str(shown.info.run_id), shown.data.params
        has_other_params = any(
            params.get(name, param.value) != param.value
            for param in sending.flat_params(tracked.plan.spec.params)
            for name in (legal_name(param.name), flat_name(param.name))
        )
        # What another command has put in the place of the one before has nothing yet.
        is_stale = anew and earlier in (None, mlflow_id)
        if is_stale or has_other_params:
            return self._replace(shown, tracked, choices)
        # Whoever created it may have been killed before all of them were sent.
        self._log_params(mlflow_id, tracked.plan.spec.params, params)
        return mlflow_id

    def describe(self, shown: Any, tracked: TrackedRun) -> None:
        """Set the values that change while a run goes on: tags, time in the queue and status.

        Args:
            shown: The MLflow run.
            tracked: The run.
        """
        mlflow_id, run = str(shown.info.run_id), tracked.run
        tags = sending.changing_tags(run) | _checkpoint_tags(tracked)
        tags |= sending.former_params(_params_by_attempt(tracked))
        # Each request may take a while on a server far away.
        changed = {name: value for name, value in tags.items() if shown.data.tags.get(name) != value}
        entities = [self._api.entities.RunTag(legal_name(name), value[:_TAG_LENGTH]) for name, value in changed.items()]
        for start in range(0, len(entities), _TAGS_A_CALL):
            self._client.log_batch(mlflow_id, tags=entities[start : start + _TAGS_A_CALL])
        log_values(self._api, mlflow_id, sending.queue_times(run))
        if run.ended or shown.info.status != sending.status_of(run):
            self._set_status(mlflow_id, run)
        # What processes have left that were killed right after another one had been faster.
        for other in self._present(tracked) if run.ended else ():
            if other.info.run_id != mlflow_id:
                self._client.set_tag(other.info.run_id, _REPLACED_BY, mlflow_id)
                self._discard(other, tracked)

    # --- finding and creating -----------------------------------------------------------------------------------------

    def _newest_choice(self, choices: Choices, first: str | None, tracked: TrackedRun) -> tuple[str, Any | None]:
        """The id that was chosen last, from ``first`` on, and that MLflow run, if it was not deleted or replaced."""
        last, chosen = _FIRST, first or choices.after()
        while chosen is not None:
            try:
                shown = self._client.get_run(chosen)
            except self._api.failure as error:
                if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                    raise
                shown = None  # the store has lost it
            if shown is not None and shown.info.lifecycle_stage == "active":
                if not shown.data.tags.get(_REPLACED_BY):
                    return chosen, shown
                self._discard(shown, tracked)
            last, chosen = chosen, choices.after(chosen)
        return last, None

    def _settle(self, choices: Choices, mlflow_id: str, after: str) -> str:
        """Choose an MLflow run to come ``after`` another; returns what was chosen, if another process was faster."""
        chosen = choices.choose(mlflow_id, after)
        if chosen != mlflow_id:
            self._client.set_tag(mlflow_id, _REPLACED_BY, chosen)
            self._client.delete_run(mlflow_id)
        return chosen

    def _present(self, tracked: TrackedRun) -> Iterator[Any]:
        """The MLflow runs of a run that were not deleted or replaced, newest first."""
        name = tracked.plan.spec.tracking.mlflow.experiment or tracked.run.name
        present = self._client.search_runs(
            [self._experiment(name)], f"tags.`{sending.RUN_TAG}` = '{tracked.run.id}'", order_by=["start_time DESC"]
        )
        return (run for run in present if not run.data.tags.get(_REPLACED_BY))

    def _create(self, tracked: TrackedRun, tags: Mapping[str, str]) -> str:
        run, origin = tracked.run, _origin(tracked.directory)
        experiment = self._experiment(tracked.plan.spec.tracking.mlflow.experiment or run.name)
        own = sending.lasting_tags(run, origin, tracked.plan.spec, str(self._root.path / run.id))
        name = sending.run_name(run, origin, tracked.plan.content)
        created = str(
            self._client.create_run(
                experiment,
                start_time=sending.started_ms(run),
                tags={legal_name(key): value[:_TAG_LENGTH] for key, value in {**tags, **own}.items()},
                run_name=name,
            ).info.run_id
        )
        if run.started_at is None:
            self._set_status(created, run)
        self._log_params(created, tracked.plan.spec.params)
        return created

    def _replace(self, shown: Any, tracked: TrackedRun, choices: Choices) -> str:
        """Create another MLflow run in the place of one; the tags that people have added to it move along."""
        mlflow_id = str(shown.info.run_id)
        tags = {
            name: value
            for name, value in shown.data.tags.items()
            if not name.startswith(_OURS) or name == sending.NOTE_TAG
        }
        # Whoever created one may have been killed before it was known.
        successors = self._client.search_runs([shown.info.experiment_id], f"tags.`{_REPLACES}` = '{mlflow_id}'")
        if successors:
            created = str(successors[0].info.run_id)
            self._log_params(created, tracked.plan.spec.params, successors[0].data.params)
        else:
            created = self._create(tracked, {**tags, _REPLACES: mlflow_id})
        created = self._settle(choices, created, mlflow_id)
        self._client.set_tag(mlflow_id, _REPLACED_BY, created)
        self._discard(shown, tracked)
        return created

    def _discard(self, replaced: Any, tracked: TrackedRun) -> None:
        """Delete an MLflow run that another one has replaced, unless a script has logged something there itself."""
        # Scripts know their MLflow run on a server only.
        if self._api.uri.startswith(_SERVERS):
            metrics = _stored_as(tracked.run.metrics)
            params = _stored_as(param.name for param in sending.flat_params(tracked.plan.spec.params))
            if any(name not in metrics and not name.startswith(_OWN_METRICS) for name in replaced.data.metrics):
                return
            if not params.issuperset(replaced.data.params):
                return
            try:
                if any(file.path != ARTIFACTS for file in self._client.list_artifacts(replaced.info.run_id)):
                    return
            except self._api.failure:
                return
        self._client.delete_run(replaced.info.run_id)

    def _experiment(self, name: str) -> str:
        """The id of an experiment. Raises TrackingError if somebody has deleted it, which keeps its name taken."""
        existing = self._client.get_experiment_by_name(name)
        if existing is None:
            # Without an explicit location, a local store would put artifacts below the current directory.
            artifacts = artifacts_of(self._api.uri, self._root)
            if artifacts is not None:
                make_shared(artifacts)
            location = None if artifacts is None else artifacts.as_uri()
            try:
                return str(self._client.create_experiment(name, artifact_location=location))
            except self._api.failure:
                # Another process may have been faster.
                existing = self._client.get_experiment_by_name(name)
                if existing is None:
                    raise
        identifier = str(existing.experiment_id)
        if existing.lifecycle_stage == "deleted":
            restore = f"MLFLOW_TRACKING_URI={shlex.quote(self._api.uri)} mlflow experiments restore -x {identifier}"
            raise TrackingError(
                f"the experiment {name!r} of the MLflow store {self._api.uri} was deleted: '{restore}' restores it, "
                f"and tracking.mlflow.experiment in the spec names another one for new runs"
            )
        return identifier

    # --- sending ------------------------------------------------------------------------------------------------------

    def _log_params(self, mlflow_id: str, params: Mapping[str, Any], present: Collection[str] = ()) -> None:
        """Send the params of a plan, without ``present`` ones: MLflow never changes a param."""

        def log(items: list[sending.FlatParam]) -> None:
            self._client.log_batch(mlflow_id, params=[self._api.entities.Param(*item) for item in items])

        sender: Sender[sending.FlatParam] = Sender(
            log, self._api.failure, lambda: self._client.get_run(mlflow_id).data.params
        )
        flat = [
            param
            for param in sending.flat_params(params)
            if not {legal_name(param.name), flat_name(param.name)} & set(present)
        ]
        for start in range(0, len(flat), _PARAMS_A_CALL):
            sender.send(flat[start : start + _PARAMS_A_CALL])
        self.notes += [
            f"the MLflow store {self._api.uri} does not take the param {name!r}: {why}"
            for name, why in sender.refused.items()
        ]

    def _set_status(self, mlflow_id: str, run: Run) -> None:
        status = sending.status_of(run)
        if run.ended and status is not None:
            ended = sending.milliseconds(run.ended_at) if run.ended_at is not None else None
            self._client.set_terminated(mlflow_id, status, ended)
        elif status is not None:
            self._client.update_run(mlflow_id, status=status)


def flatten_sweep(client: Any, experiment: str, sweep: str) -> None:
    """Put the runs of a sweep into MLflow's list, if an earlier version has nested them below a parent.

    Args:
        client: An ``mlflow.MlflowClient``, or a :class:`.rest_client.RestClient`.
        experiment: The id of the experiment.
        sweep: The id of the sweep.
    """
    for parent in client.search_runs([experiment], f"tags.`{_SWEEP_PARENT}` = '{sweep}'"):
        for run in client.search_runs([experiment], f"tags.`{_PARENT}` = '{parent.info.run_id}'"):
            client.delete_tag(run.info.run_id, _PARENT)
        # Unless somebody has described it.
        if all(name.startswith(_OURS) and name != sending.NOTE_TAG for name in parent.data.tags):
            client.delete_run(parent.info.run_id)


def _stored_as(names: Iterable[str]) -> set[str]:
    """The names that MLflow may have for these."""
    return {stored for name in names for stored in (legal_name(name), flat_name(name))}


def _origin(directory: RunDir) -> sending.Origin:
    """Where a run came from, as far as its journal says so."""
    source = "journal/created.jsonl"
    created = next(iter(select(read_events(directory.path / source, source), RunCreated)), None)
    if created is None:
        return sending.Origin()
    payload = created.payload
    return sending.Origin(payload.by or "", payload.spec_file or "", payload.varies)


def _params_by_attempt(tracked: TrackedRun) -> Sequence[tuple[int, Mapping[str, str]]]:
    """The params of each attempt with a submission of its own, and the newest one's; empty if there is only one."""
    first_of = {attempt.submission: attempt.number for attempt in reversed(tracked.run.attempts)}
    if len(first_of) < 2:
        return []
    history = []
    for submission, number in sorted(first_of.items(), key=lambda item: item[1])[:-1]:
        plan = read_plan(tracked.directory.submission(submission).plan)
        if plan is not None:
            history.append((number, dict(sending.flat_params(plan.spec.params))))
    return [*history, (len(tracked.run.attempts), dict(sending.flat_params(tracked.plan.spec.params)))]


def _checkpoint_tags(tracked: TrackedRun) -> dict[str, str]:
    """The tags of the newest checkpoint of a run, and of the best, if its spec says which metric decides that."""
    run, best, directory = tracked.run, tracked.plan.spec.checkpoint.keep.best, tracked.directory
    chosen = {"newest": run.checkpoint}
    if best is not None:
        chosen["best"] = sending.best_checkpoint(run, best)
    tags: dict[str, str] = {}
    # Empty ones if there is none any more.
    for name, checkpoint in chosen.items() if run.checkpoints else ():
        step, path, digest = "", "", ""
        if checkpoint is not None:
            step = "" if checkpoint.step is None else str(checkpoint.step)
            path = str(directory.path / checkpoint.path)
            if checkpoint.published:
                with contextlib.suppress(CheckpointError):
                    digest = f"xxh3_128:{read_manifest(directory.path / checkpoint.path).to_json()['xxh3_128']}"
        values = {"step": step, "path": path, "hash": digest}
        tags |= {f"slurmtrain.checkpoint.{name}.{key}": value for key, value in values.items()}
    return tags
