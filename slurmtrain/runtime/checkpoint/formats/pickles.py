"""Reading plain values of a pickle, such as a step, without building anything that the pickle names.

A pickle can name any function and have it called. Here every name stands for an inert object instead, so nothing is
imported or executed. Needs no torch, and works for classes that are not installed here.
"""

from __future__ import annotations

import collections
import io
import pickle
from typing import Any, Self

from slurmtrain.errors import CheckpointError

STEP_NAMES = ("global_step", "global_steps", "step", "iteration")
"""Names under which a checkpoint may hold its step, the most specific first."""

# Plain values are in small pickles: torch.save keeps tensors outside of them.
_LIMIT_BYTES = 1 << 28


class Inert:
    """Stands for an object whose class is not imported: keeps the attributes and items that the pickle gives it."""

    state: Any
    items: dict[Any, Any]

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """An object without attributes, whatever its constructor would take."""
        made = super().__new__(cls)
        made.state, made.items = None, {}
        return made

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing with the arguments."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, _: Any) -> None:
        """Ignore an element: those of lists and sets are not needed."""

    extend = add = append

    def get(self, name: str) -> Any:
        """An attribute or item of the object; None if it has none of that name."""
        # An object with slots has a pair: its dictionary and its slots.
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        return next(
            (values[name] for values in (*states, self.items) if isinstance(values, dict) and name in values), None
        )


class _Unpickler(pickle.Unpickler):
    """Replaces every class and function, and every tensor's storage."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        return type("Inert", (Inert,), {})

    def persistent_load(self, _: Any) -> Any:
        return Inert()


def read_plain(content: bytes, where: str) -> Any:
    """The pickled object: plain values, lists, dictionaries, and :class:`Inert` objects for everything else.

    ``where`` names the pickle in errors. Raises CheckpointError if it cannot be read.
    """
    if len(content) > _LIMIT_BYTES:
        raise CheckpointError(f"{where} cannot be read: it has {len(content)} bytes")
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # a malformed pickle can raise anything
        raise CheckpointError(f"{where} cannot be read: {type(error).__name__}: {error}") from error


def member(value: Any, name: str) -> Any:
    """The item of a dictionary, or attribute of an :class:`Inert` object, called ``name``; None if there is none."""
    return value.get(name) if isinstance(value, dict | Inert) else None


def step_of(value: Any) -> int | None:
    """The step that a dictionary or object holds under one of ``STEP_NAMES``; None if there is none."""
    steps = (as_step(member(value, name)) for name in STEP_NAMES)
    return next((step for step in steps if step is not None), None)


def as_step(value: Any) -> int | None:
    """The value if it is a whole number that can be a step; else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
