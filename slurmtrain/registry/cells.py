"""What the cells of a registry hold: JSON as text, and maybe values that slurmtrain has not written.

Also what trackers have of runs: in the directory of each, and from there in the registry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from slurmtrain.errors import PathError, RegistryDamaged, UntrustedPath
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Checkpoint
from slurmtrain.system.files import read_json, write_json

T = TypeVar("T")

# What reading a value raises that slurmtrain has not written: SQLite notices damage to its own structures only.
NOT_OURS = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
# Most columns of an attempt are empty, and a look-up takes a tenth of the time of parsing JSON.
_EMPTY: Mapping[str | None, Callable[[], Any]] = {"{}": dict, "[]": list, "null": lambda: None}
_EMPTY_TEXTS: Mapping[type, str] = {dict: "{}", list: "[]", tuple: "[]"}
_MAPPING, _SEQUENCE = "Mapping[str, ", "Sequence["
_SCALARS: Mapping[str, type | tuple[type, ...]] = {"str": str, "bool": bool, "int": int, "float": (int, float)}
_CHECKPOINT_TYPES = {each.name: str(each.type) for each in fields(Checkpoint)}


def as_cell(value: Any) -> str | None:
    """``value`` as JSON text; None for NULL."""
    if value is None:
        return None
    return json.dumps(value) if value else _EMPTY_TEXTS.get(type(value)) or json.dumps(value)


def decode_as(text: str | None, annotation: str) -> Any:
    """The value of a field that :func:`as_cell` was given. Raises ValueError if it has another shape.

    Args:
        text: The cell. Rows of earlier versions may contain ``null`` instead of NULL.
        annotation: The type of the field, as in its class.
    """
    if text in _EMPTY:
        # A new object each time, since whoever gets it may change it.
        return _EMPTY[text]()
    value = None if text is None else json.loads(text)
    # SQLite stores any value in any column, so that damage shows only here.
    if value and not fits(value, annotation):
        raise ValueError(f"JSON of another shape than {annotation}")
    return value


def fits(value: object, annotation: str) -> bool:
    """Whether objects, lists, text and numbers are where an annotation has them."""
    bare = annotation.removesuffix(" | None")
    if value is None and bare != annotation:
        return True
    if bare.startswith(_MAPPING):
        return isinstance(value, dict) and all(fits(each, bare[len(_MAPPING) : -1]) for each in value.values())
    if bare.startswith(_SEQUENCE):
        return isinstance(value, list) and all(fits(each, bare[len(_SEQUENCE) : -1]) for each in value)
    return isinstance(value, _SCALARS.get(bare, object))


def read_checkpoint(text: str | None) -> Checkpoint | None:
    """The checkpoint in a run's own row. Raises ValueError or TypeError for JSON of another shape."""
    values = decode_as(text, "Mapping[str, Any]")
    if not values:
        return None
    wrong = [name for name, value in values.items() if not fits(value, _CHECKPOINT_TYPES.get(name, ""))]
    if wrong:
        raise ValueError(f"a checkpoint with another {wrong[0]}")
    return Checkpoint(**values)


def damaged_value(error: Exception, registry: object = None) -> RegistryDamaged:
    """What to raise for a value that cannot be read.

    Args:
        error: What reading it has raised.
        registry: The registry's file or database; None: unknown.
    """
    name = "the registry" if registry is None else f"the registry {registry}"
    problem = f"{type(error).__name__}: {error}"
    cure = "'slurmtrain registry rebuild' makes a new one"
    return RegistryDamaged(f"{name} has content that slurmtrain did not write ({problem}); {cure}")


def read_cell(read: Callable[[Any], T], cell: Any) -> T:
    """What ``read`` makes of a cell. Raises RegistryDamaged if slurmtrain has not written that."""
    try:
        return read(cell)
    except NOT_OURS as error:
        raise damaged_value(error) from error


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


_SENT_TYPES = {each.name: str(each.type) for each in fields(Sent)}


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
    return [
        Sent(**each)
        for each in (trackers if isinstance(trackers, list) else ())
        if isinstance(each, dict)
        # A newer version may have written fields that mean nothing here.
        and {"tracker", "uri"} <= each.keys() <= _SENT_TYPES.keys()
        and all(fits(value, _SENT_TYPES[name]) for name, value in each.items())
    ]
