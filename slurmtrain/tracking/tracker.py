"""The interface of a tracker, three calls that show a run; the names that it takes; which trackers there are."""

from __future__ import annotations

import contextlib
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from slurmtrain.errors import PathError, TrackingError, UserError
from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.interpreter import declared

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from slurmtrain.model.experiment.plan import Plan
    from slurmtrain.model.metrics.settled import Fate, Place
    from slurmtrain.model.run.layout import RunDir, RunsRoot
    from slurmtrain.model.run.run import Run


class NoAnswer(TrackingError):
    """Nobody answers at the place of a tracker, so that no other run need be tried there for now."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run that is to be shown: what is known of it, its plan, and its directory."""

    run: Run
    plan: Plan
    directory: RunDir


class Start(NamedTuple):
    """From where a tracker is going to be sent points."""

    remote_id: str | None
    """Its name for the run the last time; None: that is unknown."""
    step: int | None = None
    """It has the surviving line up to this step; its points of later steps must go. None: it has none."""
    anew: bool = False
    """Whether its points were rolled back: a tracker that does not truncate needs a new remote run."""
    refused: Sequence[str] = ()
    """The names that ``log`` has returned for the run so far."""


class Begun(NamedTuple):
    """A tracker's state of a run: its id there, and the last step of its surviving line there."""

    remote_id: str
    step: int | None = None
    """Trackers that truncate may have lost points, and are sent all points after this step; others are not asked."""


class TrackedPoint(NamedTuple):
    """What was logged in one line: the values after ``step`` finished steps, at ``time`` in seconds since 1970."""

    attempt: int
    step: int
    time: float
    metrics: Mapping[str, float]
    fate: Fate
    """``FINAL``: it belongs to the surviving line; ``REPLAYED``: its step was trained again; ``OPEN``: not decided."""


class Tracker(ABC):
    """Shows runs at one place. Importing its packages may take seconds: it is made when there is something to send.

    ``truncates``: whether it can drop all points of a remote run after a step, as :class:`Start` demands. Others are
    sent points only once these are final, and begin a new remote run if a failed run is resumed from before them.
    ``waits``: whether it is sent only final points, although it could truncate. ``package``: what has to be installed
    for it, an extra of its own name; empty: nothing.
    """

    truncates: ClassVar[bool] = False
    waits: ClassVar[bool] = True
    package: ClassVar[str] = ""
    uri: str
    """Where it shows runs."""

    def __init__(self, settings: Mapping[str, Any], root: RunsRoot) -> None:
        """Open it.

        Args:
            settings: Its section of the spec.
            root: The runs root.

        Raises:
            TrackingError: It cannot be reached.
        """
        self.settings = settings
        self.label = f"the tracker {type(self).__name__}"
        """How messages call it."""
        self.root = root
        self.notes: list[str] = []
        """The things that it did not take so far, as sentences without a full stop."""

    @classmethod  # noqa: B027 (most import little)
    def preload(cls) -> None:
        """Import what takes seconds to import; otherwise, :meth:`__init__` does."""

    @abstractmethod
    def begin(self, tracked: TrackedRun, start: Start) -> Begun:
        """Find or create the remote run. Raises TrackingError."""

    @abstractmethod
    def log(self, points: Sequence[TrackedPoint]) -> Mapping[str, str]:
        """Add points, in the order of logging; returns names that it does not take, and why.

        A metric of a name that it has returned is not sent again. The same points may come again. Points that it has
        taken must still be there after a kill, unless ``begin`` says otherwise. Raises TrackingError.
        """

    def sent_elsewhere(self, directory: RunDir, remote_id: str) -> Place | None:  # noqa: ARG002 (others use them)
        """How far a run was sent from elsewhere, such as from its own nodes, unknown to commands.

        If it was rolled back behind that place, the remote run has points that do not survive.

        Args:
            directory: The run's.
            remote_id: The tracker's name for the run.
        """
        return None

    @abstractmethod
    def finish(self, tracked: TrackedRun) -> None:
        """All points have been sent for now; ``run.state`` says whether the run has ended. Raises TrackingError."""


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What a tracker has written of a run, which goes with the run's own files.

    ``names``: files and folders in ``directory``; ``is_foreign``: whether a file in them, by its path relative to
    ``directory``, was not written by the tracker.
    """

    directory: Path
    names: Sequence[str]
    is_foreign: Callable[[str], bool] = lambda _: False


class FileTracker(Tracker):
    """Shows runs in a directory. Its setting ``dir`` is relative to the runs root.

    ``usual``: the value of ``dir`` where the spec has none; ``folder``: the folder that it makes there, if any;
    ``kind``: the purpose of the directory, for messages.
    """

    truncates: ClassVar[bool] = True
    usual: ClassVar[str]
    folder: ClassVar[str] = ""
    kind: ClassVar[str]

    def __init__(self, settings: Mapping[str, Any], root: RunsRoot) -> None:
        """As :meth:`Tracker.__init__` with its ``settings`` and ``root``."""
        super().__init__(settings, root)
        self._directory = self._directory_of(settings, root)
        self.uri = self._directory.absolute().as_uri()
        self.label = f"the directory {self._directory} for {self.kind}"

    @classmethod
    @abstractmethod
    def files_of(cls, settings: Mapping[str, Any], root: RunsRoot, run_id: str) -> WrittenFiles:
        """What there is of a run. Its package need not be installed any more.

        Args:
            settings: The tracker's section of the spec.
            root: The runs root.
            run_id: The run.
        """

    @classmethod
    def _directory_of(cls, settings: Mapping[str, Any], root: RunsRoot) -> Path:
        # An absolute path, or one below a home directory, replaces the root.
        return root.path / Path(settings.get("dir") or cls.usual).expanduser() / cls.folder

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises TrackingError for what writing may raise."""
        try:
            yield
        except OSError as error:
            raise TrackingError(f"cannot write to {self._directory}: {describe_os_error(error)}") from error
        except (PathError, ValueError) as error:
            raise TrackingError(f"cannot write to {self._directory}: {error}") from error


# --- names that a tracker does not take, of metrics, params or projects -----------------------------------------------

# They are changed, and marked with a hash: the same name always gets the same other one, and no two names get the same.

# Part of every changed name at a tracker: with another number, runs that go on would have metrics under two names.
_DIGITS = 12
_MARK = re.compile(rf"-[0-9a-f]{{{_DIGITS}}}\Z")
MARK_LENGTH = _DIGITS + 1


def is_marked(name: str) -> bool:
    """Whether a name ends like a mark, so that it has to be changed as well: another one may be changed to it."""
    return _MARK.search(name) is not None


def marked(text: str, name: str) -> str:
    """A ``text`` that a tracker takes, marked with a hash of the ``name`` that it stands for."""
    # Names may have halves of characters, since JSON may: UTF-8 alone has no bytes for them.
    return f"{text}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:_DIGITS]}"


# --- which trackers there are: MLflow, and what plug-ins declare as entry points, slurmtrain's own among them ---------

GROUP = "slurmtrain.trackers"
_MLFLOW = "mlflow"
_OWN = "slurmtrain."


@cache
def _installed() -> Sequence[EntryPoint]:
    return declared(GROUP)


def _entry_point(name: str) -> EntryPoint | None:
    """The tracker of this name; one of slurmtrain's own is never replaced by another package's."""
    # Known without a look at the entry points of all packages, which takes long.
    if name == _MLFLOW:
        from importlib.metadata import EntryPoint

        return EntryPoint(name, "slurmtrain.tracking.to_mlflow.mlflow_tracker:MlflowTracker", GROUP)
    points = [point for point in _installed() if point.name == name]
    return min(points, key=lambda point: not point.value.startswith(_OWN), default=None)


def tracker_names() -> Sequence[str]:
    """The names of all trackers that are installed."""
    return sorted({_MLFLOW, *(point.name for point in _installed())})


def check_tracker(name: str) -> None:
    """Check that a tracker is installed, importing nothing of other packages.

    Args:
        name: Its name.

    Raises:
        UserError: It is not.
    """
    if name == _MLFLOW:
        return
    point = _entry_point(name)
    if point is None:
        raise UserError(
            f"there is no tracker {name!r}{suggestion(name, tracker_names())}; there are "
            f"{', '.join(tracker_names())}, and a package can add others with an entry point of the group {GROUP}"
        )
    # Looked for, not imported: that takes seconds for some.
    if point.value.startswith(_OWN) and (package := point.load().package) and find_spec(package) is None:
        raise UserError(f"the tracker {name} is not installed: pip install 'slurmtrain[{name}]'")


def preload_tracker(name: str) -> None:
    """Import the packages of the tracker of this ``name``; if that fails, :func:`open_tracker` says so."""
    with contextlib.suppress(Exception):  # other people's code raises anything
        if (point := _entry_point(name)) is not None:
            point.load().preload()


def open_tracker(name: str, settings: Mapping[str, Any], root: RunsRoot) -> Tracker:
    """Open the tracker of this name.

    Args:
        name: Its name.
        settings: Its section of the spec.
        root: The runs root.

    Raises:
        TrackingError: There is none of this name, or it cannot be opened.
    """
    try:
        # Once more: the environment may have lost a package since the run was submitted.
        check_tracker(name)
        point = _entry_point(name)
        assert point is not None
        tracker: Tracker = point.load()(settings, root)
    except UserError as error:
        raise TrackingError(str(error)) from error
    except TrackingError:
        raise
    except Exception as error:  # whatever other people's code raises, other trackers go on
        raise TrackingError(f"the tracker {name!r} cannot be opened: {type(error).__name__}: {error}") from error
    return tracker


def writes_files(name: str) -> bool:
    """Whether what slurmtrain's tracker of this ``name`` has of a run is in files that are deleted with the run."""
    point = None if name == _MLFLOW else _entry_point(name)
    return point is not None and point.value.startswith(_OWN) and issubclass(point.load(), FileTracker)


def files_of_tracker(name: str, settings: Mapping[str, Any], root: RunsRoot, run_id: str) -> WrittenFiles:
    """What a tracker that :func:`writes_files` has written of a run.

    Args:
        name: The tracker's name.
        settings: Its section of the spec.
        root: The runs root.
        run_id: The run.
    """
    point = _entry_point(name)
    assert point is not None
    tracker: type[FileTracker] = point.load()
    return tracker.files_of(settings, root, run_id)
