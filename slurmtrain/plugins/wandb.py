"""Runs in Weights & Biases.

The surviving line of a run is kept in a file of steps, and written to a directory of W&B's offline mode from there.
Until that directory has been synced, it is replaced by a new one whenever there is more, so that ``wandb sync`` finds
one directory with the whole line. Synced steps are out of reach: the next directory goes on from there, or rewinds the
run to the step where it survives. In the mode ``online``, ``wandb sync`` is run at once.

W&B refuses some characters in the name of a project, and takes dashes off the ends of a param's name, so that ``-lr``
and ``lr`` would be one (``wandb_config.py``): such names are changed.
"""

from __future__ import annotations

import atexit
import contextlib
import netrc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from slurmtrain.errors import PathError, TrackingError
from slurmtrain.model.run.layout import RunsRoot
from slurmtrain.plugins.csv import StepFile, files_named
from slurmtrain.system.files import make_directory, read_json, write_json
from slurmtrain.tracking.tracker import (
    MARK_LENGTH,
    Begun,
    FileTracker,
    Start,
    TrackedPoint,
    TrackedRun,
    WrittenFiles,
    is_marked,
    marked,
)

# W&B's own columns of a history begin with it.
_RESERVED = "_"
# How long a project's name may be, and which characters it must not have (wandb_settings.py).
_LONGEST_PROJECT = 128
_ILLEGAL = re.compile(r"[/\\#?%:]")
_OWN_PARAM = "_wandb"


def project_name(name: str) -> str:
    """The name of W&B's project for what is called ``name``; the same if W&B takes it."""
    if len(name) <= _LONGEST_PROJECT and not _ILLEGAL.search(name) and not is_marked(name):
        return name
    return marked(_ILLEGAL.sub("-", name)[: _LONGEST_PROJECT - MARK_LENGTH] or "_", name)


def param_name(name: str) -> str:
    """The name under which W&B has the param ``name`` in a run's config; the same if W&B takes it."""
    if name == name.strip("-") and name != _OWN_PARAM and not is_marked(name):
        return name
    return marked(name.strip("-") or "_", name)


def refusal(name: str) -> str:
    """Why W&B does not take a metric of this ``name``; empty if it does. Others are stored as they are called."""
    if name.startswith(_RESERVED):
        return "names that begin with '_' are W&B's own"
    return "" if name else "a metric without a name is none to W&B"


# A server that is down is tried again at the next sync.
_SYNC_S = 300.0
# 'wandb sync' adds the names of this machine and of itself to the run, unless it is told what these are.
_ANONYMOUS = {"WANDB_HOST": "", "WANDB_PROGRAM": ""}


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """A run for W&B.

    ``base``: the last step that the server has of it, which is cut off there; None: it has nothing. ``names``: the
    metrics, by column. ``failed``: whether the run has failed.
    """

    run_id: str
    name: str
    project: str
    entity: str | None
    params: Mapping[str, Any]
    tags: Sequence[str]
    group: str | None
    base: int | None
    names: Sequence[str]
    failed: bool


def write_offline(parent: Path, offline: OfflineRun, rows: Sequence[Sequence[str]]) -> Path:
    """Write a directory for ``wandb sync``, and return it: it is in the folder ``wandb`` of ``parent``.

    Args:
        parent: The directory of that folder.
        offline: The run.
        rows: Its rows after ``base``: step, time and attempt, then the values of metrics.
    """
    _prepare_environment()
    import wandb

    # Nothing of this machine, of its repository or of what commands print.
    settings = wandb.Settings(
        silent=True, console="off", symlink=False, disable_git=True, disable_code=True, save_code=False,
        disable_job_creation=True, x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True,
        x_disable_viewer=True, x_save_requirements=False,
    )  # fmt: skip
    # W&B takes either an id or a step to resume from, which names the run, too.
    resume_from = None if offline.base is None else f"{offline.run_id}?_step={offline.base}"
    run = wandb.init(
        mode="offline", dir=str(parent), project=offline.project, entity=offline.entity, name=offline.name,
        config=dict(offline.params), tags=list(offline.tags), group=offline.group, settings=settings,
        reinit="create_new", id=None if resume_from else offline.run_id, resume_from=resume_from,
    )  # fmt: skip
    try:
        for step, time, _, *values in rows:
            metrics = {name: float(value) for name, value in zip(offline.names, values, strict=False) if value != ""}
            run.log({**metrics, "_timestamp": float(time)}, step=int(step))
    finally:
        run.finish(exit_code=1 if offline.failed else 0)
    directory = Path(run.dir).parent
    # A link to what W&B logs of itself, which goes with this process.
    (directory / "logs" / "debug-core.log").unlink(missing_ok=True)
    return directory


def sync_offline(directory: Path) -> None:
    """Send such a directory to the server. Raises TrackingError."""
    _prepare_environment()
    command = [sys.executable, "-m", "wandb", "sync", "--yes", str(directory)]
    try:
        completed = subprocess.run(
            command, cwd=directory.parent, env=os.environ | _ANONYMOUS, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=_SYNC_S, errors="replace", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise TrackingError(f"'wandb sync {directory}' did not end within {_SYNC_S:g} s") from error
    if completed.returncode != 0:
        lines = (completed.stderr or completed.stdout).strip().splitlines()
        raise TrackingError(
            f"'wandb sync {directory}' failed: {lines[-1] if lines else f'exit {completed.returncode}'}"
        )


def _prepare_environment() -> None:
    """Let W&B report nothing to its makers, and leave nothing but runs: each process of it begins a log of its own."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    if "WANDB_CACHE_DIR" not in os.environ:
        # It goes with this process: before W&B registers the end of its own process, so that this comes after it.
        os.environ["WANDB_CACHE_DIR"] = tempfile.mkdtemp(prefix="slurmtrain-wandb-")
        atexit.register(shutil.rmtree, os.environ["WANDB_CACHE_DIR"], ignore_errors=True)


_SERVER = "https://api.wandb.ai"
# The mark that ``wandb sync`` leaves in a directory.
_SYNCED = "*.wandb.synced"
# What W&B calls such a directory, in local time, but for the id of the run.
_NAME = "offline-run-%Y%m%d_%H%M%S"


class WandbTracker(FileTracker):
    """A project of W&B, by directories for it."""

    usual: ClassVar[str] = "."
    folder: ClassVar[str] = "wandb"
    kind: ClassVar[str] = "Weights & Biases"
    package: ClassVar[str] = "wandb"
    # What was synced is out of reach, but for rewinding, which not every server can.
    waits: ClassVar[bool] = True

    def __init__(self, settings: Mapping[str, Any], root: RunsRoot) -> None:
        """As :meth:`Tracker.__init__` with its ``settings`` and ``root``."""
        super().__init__(settings, root)
        self._file = StepFile(self._directory)
        self._state: dict[str, Any] = {}
        self._state_file = self._directory

    def begin(self, tracked: TrackedRun, start: Start) -> Begun:
        """As :meth:`Tracker.begin`."""
        run_id = tracked.run.id
        with self._writing():
            make_directory(self._directory)
            self._file = StepFile(self._directory / f"{run_id}.csv")
            self._state_file = self._directory / f"{run_id}.json"
            self._state = _read_state(self._state_file)
            self._note_synced()
            step = self._file.keep(start.step)
            base = self._state.get("base")
            # The server has steps that did not survive: the next directory rewinds the run there.
            if base is not None and base > (step or 0):
                self._note(base=step or 0, written=None)
            elif self._state.get("written") is not None and self._state["written"] > (step or 0):
                self._note(written=None)
        return Begun(run_id, step)

    def log(self, points: Sequence[TrackedPoint]) -> Mapping[str, str]:
        """As :meth:`Tracker.log`."""
        refused = {name: why for point in points for name in point.metrics if (why := refusal(name))}
        with self._writing():
            self._file.append(
                [
                    point._replace(metrics={name: v for name, v in point.metrics.items() if name not in refused})
                    for point in points
                ]
            )
        return refused

    def finish(self, tracked: TrackedRun) -> None:
        """As :meth:`Tracker.finish`."""
        with self._writing():
            base = self._state.get("base")
            rows = [row for row in self._file.rows() if base is None or int(row[0]) > base]
            newest = int(rows[-1][0]) if rows else None
            if newest is not None and (self._state.get("written") != newest or not self._present()):
                self._write(tracked, rows, base)
            if self._is_online() and self._state.get("written") is not None:
                sync_offline(self._directory / self._state["directory"])
                self._note_synced()

    def _write(self, tracked: TrackedRun, rows: Sequence[Sequence[str]], base: int | None) -> None:
        """Write a directory with these rows, at least one, instead of the directory that has not been synced."""
        project = self.settings.get("project") or tracked.plan.spec.tracking.mlflow.experiment or tracked.run.name
        offline = OfflineRun(
            run_id=tracked.run.id,
            name=tracked.run.name,
            project=project_name(str(project)),
            entity=self.settings.get("entity"),
            params={param_name(name): value for name, value in tracked.plan.spec.params.items()},
            tags=tuple(tracked.run.tags),
            group=tracked.run.sweep,
            base=base,
            names=tuple(self._file.names),
            failed=tracked.run.state in ("failed", "lost"),
        )
        place = self._directory / _draft_name(tracked.run.id)
        shutil.rmtree(place, ignore_errors=True)
        try:
            self._put(write_offline(make_directory(place), offline, rows), int(rows[-1][0]))
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _put(self, written: Path, newest: int) -> None:
        """Put a directory that was written up to the step ``newest`` in the place of what has not been synced."""
        earlier = [name for name in self._state["directories"] if (self._directory / name).is_dir()]
        # The name that W&B gave it, with the first second at which there is none of this name.
        final, (prefix, _, run_id) = written.name, written.name.rpartition("-")
        moment = datetime.strptime(prefix, _NAME)
        while (self._directory / final).exists():
            moment += timedelta(seconds=1)
            final = f"{moment.strftime(_NAME)}-{run_id}"
        # Noted before anything gets this name: what others have written is never taken for ours.
        self._note(directory=final, directories=[*earlier, final], written=newest)
        for name in earlier:
            if not self._is_synced(name):
                shutil.rmtree(self._directory / name)
        written.rename(self._directory / final)

    def _note(self, **changes: Any) -> None:
        self._state = {**self._state, **changes}
        write_json(self._state_file, self._state)

    def _present(self) -> bool:
        return bool(self._state.get("directory")) and (self._directory / self._state["directory"]).is_dir()

    def _note_synced(self) -> None:
        """Go on behind what ``wandb sync`` has sent: it leaves a mark in the directory."""
        directory, written = self._state.get("directory"), self._state.get("written")
        if directory and written is not None and self._is_synced(directory):
            self._note(base=written, directory=None, written=None)

    def _is_synced(self, name: str) -> bool:
        return any((self._directory / name).glob(_SYNCED))

    def _is_online(self) -> bool:
        mode = self.settings.get("mode", "auto")
        if mode != "auto" or os.environ.get("WANDB_MODE") is not None:
            return bool(mode == "online")
        # With an API key for the server, where ``wandb login`` leaves it, or in the environment.
        if os.environ.get("WANDB_API_KEY"):
            return True
        host = urlsplit(os.environ.get("WANDB_BASE_URL") or _SERVER).hostname or ""
        try:
            return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
        except (OSError, netrc.NetrcParseError):
            return False

    @classmethod
    def files_of(cls, settings: Mapping[str, Any], root: RunsRoot, run_id: str) -> WrittenFiles:
        """As :meth:`FileTracker.files_of` with its ``settings``, ``root`` and ``run_id``."""
        directory = cls._directory_of(settings, root)
        names = files_named(directory, f"{run_id}.json", _draft_name(run_id))
        with contextlib.suppress(PathError):
            state = _read_state(directory / f"{run_id}.json")
            names += [name for name in state["directories"] if (directory / name).is_dir()]
        return WrittenFiles(directory, [*StepFile(directory / f"{run_id}.csv").files(), *names])


def _draft_name(run_id: str) -> str:
    """The name of the folder where a directory for W&B is written."""
    return f".{run_id}.tmp"


def _read_state(path: Path) -> dict[str, Any]:
    """What was noted of a run. Raises PathError.

    ``directory``: the newest directory, unless that was synced; ``written``: its last step; ``directories``: all that
    were written; ``base``: the last step that was synced.
    """
    state = read_json(path) or {}
    listed = state.get("directories")
    names = [*(listed if isinstance(listed, list) else ()), state.get("directory")]
    ours = re.compile(rf"offline-run-[0-9_]+-{re.escape(path.stem)}")
    state["directories"] = [name for name in dict.fromkeys(names) if isinstance(name, str) and ours.fullmatch(name)]
    return state
