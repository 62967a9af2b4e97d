"""Which trackers there are: MLflow, and what plug-ins declare as entry points, slurmtrain's own among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import TrackingError, UserError
from slurmtrain.model.experiment.kinds import suggestion

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from slurmtrain.model.run.layout import RunsRoot
    from slurmtrain.tracking.tracker import FileTracker, Tracker, WrittenFiles

GROUP = "slurmtrain.trackers"
_MLFLOW = "mlflow"
_OWN = "slurmtrain."


@cache
def _declared() -> Mapping[str, Sequence[EntryPoint]]:
    """The entry points of all packages by name; several may have the same name."""
    # Imported here: it takes a submission longer than all else that it has to know of trackers.
    from importlib.metadata import entry_points

    declared: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        declared.setdefault(point.name, []).append(point)
    return declared


def _own(name: str) -> EntryPoint | None:
    """Slurmtrain's own tracker of this name, which packages never replace; None if there is none."""
    if name == _MLFLOW:
        from importlib.metadata import EntryPoint

        return EntryPoint(name, "slurmtrain.tracking.to_mlflow.mlflow_tracker:MlflowTracker", GROUP)
    return next((point for point in _declared().get(name, ()) if point.value.startswith(_OWN)), None)


def _others(name: str) -> Sequence[EntryPoint]:
    """The trackers of this name of other packages."""
    return [point for point in _declared().get(name, ()) if not point.value.startswith(_OWN)]


def _packages(name: str) -> str:
    return " and ".join(sorted({point.dist.name if point.dist else point.value for point in _others(name)}))


def tracker_names() -> Sequence[str]:
    """The names of all trackers that are installed."""
    return sorted({_MLFLOW, *_declared()})


def check_tracker(name: str) -> None:
    """Check that a tracker is installed, and which one is meant, importing nothing of other packages.

    Args:
        name: Its name.

    Raises:
        UserError: It is not, or several packages have one of this name.
    """
    if name == _MLFLOW:
        return
    if (own := _own(name)) is not None:
        package = own.load().package
        if package and find_spec(package) is None:
            raise UserError(f"the tracker {name} is not installed: pip install 'slurmtrain[{name}]'")
    elif len(_others(name)) > 1:
        raise UserError(f"{_packages(name)} each have a tracker {name!r}: uninstall all of these packages but one")
    elif not _others(name):
        raise UserError(
            f"there is no tracker {name!r}{suggestion(name, tracker_names())}; there are {', '.join(tracker_names())}, "
            f"and a package adds one by an entry point of the group {GROUP}"
        )


def note_on_tracker(name: str) -> str | None:
    """What is to be known before a tracker is used: packages never replace one of slurmtrain's; None: nothing.

    Args:
        name: The tracker's name.
    """
    if _others(name) and _own(name) is not None:
        return f"the tracker {name!r} is slurmtrain's own; that of {_packages(name)} is not used: it needs another name"
    return None


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
        check_tracker(name)
        point = _own(name) or _others(name)[0]
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
    from slurmtrain.tracking.tracker import FileTracker

    point = None if name == _MLFLOW else _own(name)
    return point is not None and issubclass(point.load(), FileTracker)


def files_of_tracker(name: str, settings: Mapping[str, Any], root: RunsRoot, run_id: str) -> WrittenFiles:
    """What a tracker that :func:`writes_files` has written of a run.

    Args:
        name: The tracker's name.
        settings: Its section of the spec.
        root: The runs root.
        run_id: The run.
    """
    point = _own(name)
    assert point is not None
    tracker: type[FileTracker] = point.load()
    return tracker.files_of(settings, root, run_id)
