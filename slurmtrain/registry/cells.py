"""What the cells of a registry hold: JSON as text, and maybe values that slurmtrain has not written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from slurmtrain.errors import RegistryDamaged
from slurmtrain.model.run.run import Checkpoint

T = TypeVar("T")

# What reading a value raises that slurmtrain has not written: SQLite notices damage to its own structures only.
NOT_OURS = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
# Most columns of an attempt are empty, and a look-up takes a tenth of the time of parsing JSON.
_EMPTY: Mapping[str | None, Callable[[], Any]] = {"{}": dict, "[]": list, "null": lambda: None}
_EMPTY_TEXTS: Mapping[type, str] = {dict: "{}", list: "[]", tuple: "[]"}
_MAPPING, _SEQUENCE = "Mapping[str, ", "Sequence["
_SCALARS: Mapping[str, type | tuple[type, ...]] = {"str": str, "bool": bool, "int": int, "float": (int, float)}
_CHECKPOINT_TYPES = {each.name: str(each.type) for each in fields(Checkpoint)}


def encode(value: Any) -> str | None:
    """``value`` as JSON text; None for NULL."""
    if value is None:
        return None
    return json.dumps(value) if value else _EMPTY_TEXTS.get(type(value)) or json.dumps(value)


def decode_as(text: str | None, annotation: str) -> Any:
    """The value of a field that :func:`encode` was given. Raises ValueError if it has another shape.

    Args:
        text: The cell. Rows of earlier versions may contain ``null`` instead of NULL.
        annotation: The type of the field, as in its class.
    """
    if text in _EMPTY:
        return _EMPTY[text]()
    value = None if text is None else json.loads(text)
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
    return RegistryDamaged(f"{name} holds what slurmtrain has not written ({problem}); {cure}")


def read_cell(read: Callable[[Any], T], cell: Any) -> T:
    """What ``read`` makes of a cell. Raises RegistryDamaged if slurmtrain has not written that."""
    try:
        return read(cell)
    except NOT_OURS as error:
        raise damaged_value(error) from error
