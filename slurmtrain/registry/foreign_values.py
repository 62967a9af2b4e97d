"""Values in a registry that slurmtrain has not written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from slurmtrain.errors import RegistryDamaged

T = TypeVar("T")

# What reading such a value raises: SQLite notices damage to its own structures only.
NOT_OURS = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


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
