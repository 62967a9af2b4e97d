"""Which trackers there are: slurmtrain's own, and those that other packages declare as entry points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import TrackingError

if TYPE_CHECKING:
    from slurmtrain.model.run.layout import RunsRoot
    from slurmtrain.tracking.tracker import Tracker

GROUP = "slurmtrain.trackers"
_OWN = {"mlflow": "slurmtrain.tracking.to_mlflow.tracker:MlflowTracker"}


@cache
def _declared() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def tracker_names() -> Sequence[str]:
    """The names of all trackers that are installed."""
    return sorted({*_OWN, *_declared()})


def open_tracker(name: str, settings: Mapping[str, Any], root: RunsRoot) -> Tracker:
    """Open the tracker of this name.

    Args:
        name: Its name.
        settings: Its section of the spec.
        root: The runs root.

    Raises:
        TrackingError: There is none of this name, or it cannot be opened.
    """
    point = EntryPoint(name, _OWN[name], GROUP) if name in _OWN else _declared().get(name)
    if point is None:
        raise TrackingError(f"there is no tracker {name!r}; there are {', '.join(tracker_names())}")
    try:
        tracker: Tracker = point.load()(settings, root)
    except TrackingError:
        raise
    except Exception as error:  # whatever other people's code raises, other trackers go on
        raise TrackingError(f"the tracker {name!r} cannot be opened: {type(error).__name__}: {error}") from error
    return tracker
