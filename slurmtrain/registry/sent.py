"""What trackers have of runs: in the directory of each, and from there in the registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from slurmtrain.errors import PathError, UntrustedPath
from slurmtrain.model.run.layout import RunDir
from slurmtrain.registry.cells import fits
from slurmtrain.system.files import read_json, write_json


@dataclass(frozen=True, slots=True)
class Sent:
    """How much of a run a tracker has."""

    tracker: str
    """The tracker's name."""
    uri: str
    """Where it keeps runs."""
    remote_id: str | None = None
    """Its id of the run; None: unknown."""
    offsets: Mapping[str, int] = field(default_factory=dict)
    """How far each metrics file was sent, in bytes."""
    step: int | None = None
    """The largest step of the surviving line that was sent."""
    sending: Mapping[str, Any] = field(default_factory=dict)
    """The rest of the place that was reached in sending; empty for rows of versions before 8."""
    revision: int = -1
    """The run's revision when everything that could be sent had been sent."""
    refused: Sequence[str] = field(default_factory=list)
    """The names of metrics that it does not take."""
    problem: str = ""
    """Why nothing can be sent; empty if that went well the last time."""
    since: float | None = None
    """Since when there has been a problem, in seconds since 1970."""


_TYPES = {each.name: str(each.type) for each in fields(Sent)}


def write_sent(run: RunDir, sent: Mapping[str, Sent]) -> None:
    """Write what trackers have of a run into its directory: a registry that is lost or made anew reads it there.

    Args:
        run: The run.
        sent: What each has, by its name.
    """
    write_json(run.sent, {"trackers": [asdict(each) for each in sent.values()]}, private=True)


def read_sent(run: RunDir) -> list[Sent]:
    """What trackers have of a run, by its directory; nothing that cannot be read, which is then sent again."""
    try:
        trackers = (read_json(run.sent) or {}).get("trackers")
    except (PathError, UntrustedPath):
        return []
    return [Sent(**each) for each in trackers if _is_sent(each)] if isinstance(trackers, list) else []


def _is_sent(record: object) -> bool:
    """Whether this is the JSON of a :class:`Sent`."""
    return (
        isinstance(record, dict)
        and {"tracker", "uri"} <= record.keys() <= _TYPES.keys()
        and all(fits(value, _TYPES[name]) for name, value in record.items())
    )
