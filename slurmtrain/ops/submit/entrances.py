"""The entrances to submitting: of specs, of searches, and with an idempotency key; and what was submitted before.

They stand above what :mod:`slurmtrain.ops.sync` needs itself, since what a killed submission left undone is finished by
a sync, which in turn submits the next runs of searches.

Submitting again with the same key returns the runs of the first time. A key's record in ``<runs>/keys/`` names its
runs. It is written under the key's lock, before any of the runs can be seen, so a command that was killed anywhere
leaves runs that the next one with this key finds, and completes. The runs themselves stay the truth: one that is in the
record without a directory was never created, unless the record says that all of them were.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slurmtrain.errors import Mistake, PathError, SlurmtrainError, SpecError, SubmitFailed, UserError
from slurmtrain.model.experiment.kinds import MAX_RUNS
from slurmtrain.model.run.layout import created_ms
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.chained_runs import Chain
from slurmtrain.ops.submit.command_script import missing_script
from slurmtrain.ops.submit.submission import Submission, describe_failed_submission, name_runs, submit_sweeps
from slurmtrain.slurm.slurm_commands import read_options
from slurmtrain.specfile import SiteRules, SpecFile, load_spec
from slurmtrain.system.files import make_directory, read_json, write_json
from slurmtrain.system.inherited import current_directory
from slurmtrain.system.interpreter import SEARCHES, load_plugin
from slurmtrain.system.locks import locked

# Within so many seconds the same plan is rather a command repeated by mistake than a second run.
_RECENT_S = 60.0
# Characters of an idempotency key.
_LONGEST = 255


def submit_spec(workspace: Workspace, spec: SpecFile, *, executor: str, key: str | None = None) -> Submission:
    """Submit all runs of a ``spec`` that has been read: :func:`submit_specs` with one spec.

    ``workspace``: where the runs go. ``executor``: ``slurm`` or ``local``. ``key``: an idempotency key.
    """
    return submit_specs(workspace, [spec], executor=executor, key=key)


def submit_specs(
    workspace: Workspace, specs: Sequence[SpecFile], *, executor: str, key: str | None = None
) -> Submission:
    """Submit all runs of specs that have been read, each after those that its runs start after.

    Args:
        workspace: where the runs go.
        specs: the specs, in any order.
        executor: ``slurm`` or ``local``.
        key: an idempotency key: if something was submitted with it before, those runs are returned, and what a killed
            command left undone is done.

    Returns:
        The runs in the order of the specs; a sweep only of a single spec.

    Raises:
        UserError: something is wrong with the input; nothing was created.
        LaunchError: the job could not be submitted; nothing is left.
        SubmitFailed: as above, or something else failed, but runs exist; it names them.
        SubmitInterrupted: the same after SIGINT or SIGTERM.
    """
    if any(spec.search is not None for spec in specs):
        if key is not None or len(specs) > 1:
            manner = "with --idempotency-key" if key is not None else "together with other specs"
            raise UserError(f"a search cannot be submitted {manner}; nothing was created")
        submission: Submission = load_plugin(SEARCHES, "begin_search")(workspace, specs[0], executor)
        return submission
    if key is None:
        return submit_sweeps(workspace, specs, [_new_sweep(workspace, spec) for spec in specs], executor=executor)
    # Before there is anything of the key.
    Chain(workspace, specs, executor).order()
    workspace.prepare()
    with held_key(workspace, key, [run.plan.hash for spec in specs for run in spec.runs], executor) as held:
        return _submit_with_key(workspace, specs, executor, held)


def _submit_with_key(workspace: Workspace, specs: Sequence[SpecFile], executor: str, held: HeldKey) -> Submission:
    existing = held.existing(workspace)
    present = [run_id for run_id in existing if run_id is not None]
    notes: list[str] = []
    if present:
        from slurmtrain.ops.sync import sync

        # What a killed submission of these runs left undone.
        synced = sync(workspace, present, track=False)
        notes = [
            f"the idempotency key was already used, for {name_runs(present)}",
            *synced.notes,
            *synced.problems,
            *synced.observed.problems,
        ]
    recorded = held.record.sweeps or [None] * len(specs)
    sweeps = [sweep or _new_sweep(workspace, spec) for sweep, spec in zip(recorded, specs, strict=True)]
    rest = iter(existing)
    ids = [[next(rest) for _ in spec.runs] for spec in specs]
    run_ids = present
    if None in existing:
        try:
            submitted = submit_sweeps(workspace, specs, sweeps, executor=executor, ids=ids, held=held)
        except SlurmtrainError as error:
            if not present and not isinstance(error, SubmitFailed):
                # Nothing exists: the key may stand for something else next time.
                held.forget()
            if not present:
                raise
            if isinstance(error, SubmitFailed):
                earlier = f"{error}; submitted earlier: {name_runs(present)}"
                raise type(error)(earlier, [*present, *error.run_ids]) from error
            raise describe_failed_submission(error, present, existing.count(None)) from error
        run_ids, notes = submitted.run_ids, [*notes, *submitted.notes]
    if not held.record.complete:
        # If that fails, the runs are found all the same, only not missed if they are deleted.
        with contextlib.suppress(OSError):
            held.store(run_ids, sweeps, complete=True)
    return Submission(run_ids, notes, held.record.sweeps[0] if len(specs) == 1 else None)


def _new_sweep(workspace: Workspace, spec: SpecFile) -> str | None:
    return workspace.new_id() if len(spec.runs) > 1 else None


# --- keys and recent runs --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """What was submitted with a key.

    ``plans``: the hashes of the plans, in order. ``runs``: the ids of their runs, in the same order; empty before they
    are known. ``complete``: whether all of them were submitted. ``sweeps``: for each spec, the id that its runs share,
    if they do.
    """

    key: str
    executor: str
    plans: Sequence[str]
    runs: Sequence[str] = ()
    complete: bool = False
    sweeps: Sequence[str | None] = ()


class HeldKey:
    """A key whose lock this process holds."""

    def __init__(self, path: Path, record: KeyRecord) -> None:
        """``path``: the file of ``record``."""
        self._path = path
        self.record = record

    def existing(self, workspace: Workspace) -> list[str | None]:
        """The id of the run of each plan, None for a run that is still to be created.

        Raises UserError if a run has been deleted since it was submitted.
        """
        runs = self.record.runs or [""] * len(self.record.plans)
        existing = [run_id if run_id and workspace.root.run(run_id).path.exists() else None for run_id in runs]
        if self.record.complete and None in existing:
            deleted = runs[existing.index(None)]
            raise UserError(
                f"the idempotency key {self.record.key!r} belongs to run {deleted}, whose directory was deleted; "
                "choose another key to submit again"
            )
        return existing

    def store(self, runs: Sequence[str], sweeps: Sequence[str | None], *, complete: bool = False) -> None:
        """Record the ``runs``, and the ``sweeps`` of the specs. Raises OSError.

        ``complete``: all of them have been submitted.
        """
        self.record = replace(self.record, runs=tuple(runs), sweeps=tuple(sweeps), complete=complete)
        write_json(self._path, asdict(self.record))

    def forget(self) -> None:
        """Remove the record: there are no runs."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def held_key(workspace: Workspace, key: str, plans: Sequence[str], executor: str) -> Iterator[HeldKey]:
    """Hold a key, waiting for another submission with it to end.

    Args:
        workspace: where the runs are.
        key: any text.
        plans: the hashes of the plans to submit, in order.
        executor: ``slurm`` or ``local``.

    Raises:
        UserError: the key cannot be one, or belongs to other plans.
        PathError: its record cannot be read or written.
    """
    if not key.strip() or len(key) > _LONGEST or not key.isprintable():
        raise UserError(f"--idempotency-key: a key has 1 to {_LONGEST} printable characters")
    path = workspace.root.submission_key(key)
    make_directory(path.parent)
    with locked(path.with_suffix(".lock")):
        new = KeyRecord(key=key, executor=executor, plans=tuple(plans))
        data, record = read_json(path), new
        try:
            if data is not None:
                record = KeyRecord(
                    key=str(data["key"]),
                    executor=str(data["executor"]),
                    plans=tuple(map(str, data["plans"])),
                    runs=tuple(map(str, data["runs"])),
                    complete=bool(data["complete"]),
                    # Records of earlier versions have one, or none.
                    sweeps=tuple(str(sweep) if sweep else None for sweep in data.get("sweeps") or [data.get("sweep")]),
                )
        except (KeyError, TypeError, ValueError) as error:
            raise PathError(
                f"{path} is not a valid record of an idempotency key; remove it to use the key again"
            ) from error
        if (tuple(record.plans), record.executor) != (new.plans, new.executor):
            submitted = f" (run {', '.join(record.runs)})" if record.runs else ""
            raise UserError(
                f"the idempotency key {key!r} was used to submit something else{submitted}; nothing was created; "
                "choose another key"
            )
        yield HeldKey(path, record)


@dataclass(frozen=True, slots=True)
class RecentRun:
    """A run that was submitted ``seconds`` ago."""

    id: str
    seconds: float

    def __str__(self) -> str:
        return f"the same plan was submitted {self.seconds:.0f} s ago as run {self.id}, which has not ended"


def find_recent(workspace: Workspace, spec: SpecFile) -> RecentRun | None:
    """The newest run of a plan of ``spec`` that was submitted within the last minute and has not ended."""
    hashes = {planned.plan.hash for planned in spec.runs}
    now, same = time.time(), list[RecentRun]()
    # By the times in their ids, the newest first.
    for run_id in reversed(workspace.run_ids()):
        seconds = now - created_ms(run_id) / 1000
        if seconds > _RECENT_S:
            break
        # An id from the future is from before the clock was set back, or from another machine.
        with contextlib.suppress(PathError):
            if seconds > -_RECENT_S and (read_json(workspace.root.run(run_id).plan) or {}).get("hash") in hashes:
                same.append(RecentRun(run_id, max(0.0, seconds)))
    if not same:
        return None
    runs = observe(workspace, [run.id for run in same], ask_slurm=False).runs
    return next((run for run in same if run.id in runs and not runs[run.id].ended), None)


# --- reading specs ---------------------------------------------------------------------------------------------------

_SUFFIXES = frozenset({".yaml", ".yml"})


def split_sources(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The specs and the overrides among the words behind the first spec of a command line."""
    specs = [word for word in words if "=" not in word and (Path(word).suffix in _SUFFIXES or Path(word).is_file())]
    return [Path(word) for word in specs], [word for word in words if word not in specs]


def load(
    spec: Path | Mapping[str, Any],
    overrides: Sequence[str],
    sweep: Sequence[str],
    *,
    max_runs: int = MAX_RUNS,
    after: Sequence[str] = (),
) -> SpecFile:
    """Read a spec, using this working directory and the ``python`` on this PATH.

    Args:
        spec: its file, or what would be in it, as plain data.
        overrides: ``KEY=VALUE`` for all runs.
        sweep: ``KEY=VALUE,VALUE``: a run for each value.
        max_runs: how many runs the sweep may have.
        after: runs to start after, in addition to those that the spec names.

    Raises:
        SpecError: the spec is invalid.
        PathError: it cannot be read.
    """
    site = SiteRules(read_options, max_runs, missing_script)
    cwd, python = current_directory(), which_python()
    loaded = load_spec(spec, overrides, sweep, cwd=cwd, python=python, site=site)
    if not after:
        return loaded
    entries = dict.fromkeys([*loaded.runs[0].plan.spec.after, *after])
    # Quoted, since an id may look like a number.
    more = [*overrides, f"after={json.dumps(list(entries))}"]
    return load_spec(spec, more, sweep, cwd=cwd, python=python, site=site)


def which_python() -> str:
    """The interpreter that ``python`` refers to: the one on PATH, else the one that runs this."""
    return shutil.which("python") or sys.executable


def load_all(
    sources: Sequence[Path | Mapping[str, Any]],
    overrides: Sequence[str],
    sweep: Sequence[str],
    after: Sequence[str],
    *,
    max_runs: int,
) -> list[SpecFile]:
    """Read specs that are submitted together.

    Args:
        sources: their files, or what would be in them, as plain data.
        overrides: ``KEY=VALUE`` for all runs.
        sweep: ``KEY=VALUE,VALUE``: a run for each value; with a single spec only.
        after: runs to start after, in addition to those that a spec names.
        max_runs: how many runs the sweep of each may have.

    Raises:
        UserError: they cannot be submitted together.
        SpecError: lists all mistakes in all of them.
        PathError: one cannot be read.
    """
    if len(sources) > 1 and sweep:
        raise UserError("--sweep: with several specs, write a section 'sweep' into the spec that it is for")
    paths = [source for source in sources if isinstance(source, Path)]
    twice = next((path for index, path in enumerate(paths) if path.resolve() in map(Path.resolve, paths[:index])), None)
    if twice is not None:
        raise UserError(f"{twice} is given twice; to submit it twice, call 'submit' twice")
    specs: list[SpecFile] = []
    mistakes: list[Mistake] = []
    for source in sources:
        try:
            specs.append(load(source, overrides, sweep, max_runs=max_runs, after=after))
        except SpecError as error:
            # A mistake on the command line is one in each of them.
            mistakes += [mistake for mistake in error.mistakes if mistake not in mistakes]
    if mistakes:
        raise SpecError(mistakes)
    return specs


def merge_specs(specs: Sequence[SpecFile]) -> SpecFile:
    """All runs of some specs, as if one spec had them."""
    if len(specs) == 1:
        return specs[0]
    runs = tuple(run for spec in specs for run in spec.runs)
    return SpecFile(text="", runs=runs, warnings=tuple(each for spec in specs for each in spec.warnings))
