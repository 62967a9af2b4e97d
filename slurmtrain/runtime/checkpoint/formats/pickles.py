"""Reading the data of a pickle, such as a step or an index, without executing anything.

A pickle is a program for a small machine, which can import any name and call it. This machine imports and calls
nothing: it builds plain values, and an :class:`Inert` object for everything else. Needs no torch, and works for classes
that are not installed here.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from slurmtrain.errors import CheckpointError

STEP_NAMES = ("global_step", "global_steps", "step", "iteration", "iter_num", "current_step", "train_step")
"""Names under which a checkpoint may hold its step, the most specific first."""

# Plain values are in small pickles: torch.save keeps tensors outside of them.
_LIMIT_BYTES = 1 << 28
_LIMIT_STEP = 1 << 63
_SCALARS = (str, int, float, bytes, bool, type(None))
# Operations that torch and picklers of Python 3 do not write: Python 2's text, instances and extensions, integers of
# more than 255 bytes, and buffers outside of the pickle.
_NOT_NEEDED = frozenset(
    code[0]
    for code in (
        pickle.STRING, pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2,
        pickle.EXT4, pickle.LONG4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER,
    )
)  # fmt: skip


class Global(NamedTuple):
    """The name of a class, function or constant."""

    module: str
    name: str


_ORDERED = Global("collections", "OrderedDict")
# Operations check little: an operand of a wrong type, or none, is an error of Python.
_UNREADABLE = (pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, EOFError, struct.error)


class Inert:
    """Stands for an object whose class is not imported: keeps what the pickle gives it.

    ``made_by``: the name of its class, or of the function that would make it, if known. ``arguments``: for that call.
    """

    __slots__ = ("arguments", "items", "made_by", "state")

    def __init__(self, made_by: Global | None = None, arguments: tuple[Any, ...] = ()) -> None:
        """What the name ``made_by`` stands for would be called with ``arguments``."""
        self.made_by, self.arguments = made_by, arguments
        self.state: Any = None
        self.items: dict[Any, Any] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items = self.items or {}
        self.items[key] = value

    def append(self, _: Any) -> None:
        """Ignore an element: elements of lists and sets are not needed."""

    extend = add = append

    def get(self, name: str) -> Any:
        """An attribute or item of the object; None if it has none of that name."""
        # An object with slots has a pair: its dictionary and its slots.
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        return next(
            (values[name] for values in (*states, self.items) if isinstance(values, dict) and name in values), None
        )


class _Reader(pickle._Unpickler):
    """Python's own machine (the one written in Python), whose operations build plain values and inert objects alone.

    The one written in C recurses, and allocates what a pickle says that it needs.
    """

    # As Python's has them, which type checkers do not know.
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar = {code: read for code, read in pickle._Unpickler.dispatch.items() if code not in _NOT_NEEDED}

    def __init__(self, content: bytes, allowed: Callable[[Global], bool]) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """The name itself; nothing is imported."""
        named = Global(module, name)
        if not self._allowed(named):
            raise ValueError(f"{module}.{name} is not allowed in it")
        return named

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002 (as the machine calls it)
        """An object in place of what is outside of the pickle, as tensors are."""
        return Inert()

    def _call(self) -> None:
        arguments, made_by = self.stack.pop(), self.stack.pop()
        if not isinstance(made_by, Global) or not isinstance(arguments, tuple):
            raise ValueError("a call of something that has no name")
        self.append({} if made_by == _ORDERED and not arguments else Inert(made_by, arguments))

    def _call_with_keywords(self) -> None:
        self.stack.pop()
        self._call()

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Inert):
            target.state = state
        # An ordered dictionary may have attributes, such as the versions in a state_dict: they are not needed.
        elif not isinstance(target, dict):
            raise ValueError(f"attributes of a {type(target).__name__}")

    def _push_dict(self) -> None:
        flat = self.pop_mark()
        self.append({})
        self._set(flat)

    def _set_item(self) -> None:
        value = self.stack.pop()
        self._set([self.stack.pop(), value])

    def _set_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict | Inert) or len(flat) % 2:
            raise ValueError(f"items of a {type(target).__name__}")
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            target[_checked_key(key)] = value

    _own: ClassVar[dict[bytes, Any]] = {
            pickle.REDUCE: _call, pickle.NEWOBJ: _call, pickle.NEWOBJ_EX: _call_with_keywords, pickle.BUILD: _build,
            pickle.DICT: _push_dict, pickle.SETITEM: _set_item, pickle.SETITEMS: _set_items,
            # Hashing the elements of a set may be recursive, and sets are not needed as such.
            pickle.EMPTY_SET: dispatch[pickle.EMPTY_LIST[0]],
            pickle.FROZENSET: dispatch[pickle.LIST[0]],
            pickle.ADDITEMS: dispatch[pickle.APPENDS[0]],
            # Python's allocates as many bytes as it is told.
            pickle.BYTEARRAY8: dispatch[pickle.BINBYTES8[0]],
    }  # fmt: skip
    dispatch |= {code[0]: read for code, read in _own.items()}


def _checked_key(key: Any) -> Any:
    """A key of a dictionary. Hashing nested tuples is recursive in C, so that deep ones would end this process."""
    simple = all(isinstance(each, _SCALARS) for each in key) if type(key) is tuple else True
    if not simple or isinstance(key, list | dict):
        raise ValueError(f"a {type(key).__name__} as a key")
    return key


def read_plain(content: bytes, where: str, allowed: Callable[[Global], bool] = lambda _: True) -> Any:
    """The pickled object: plain values, lists, dictionaries, and :class:`Inert` objects for everything else.

    Args:
        content: The pickle.
        where: Its name for errors.
        allowed: Says which names it may contain; by default, any.

    Raises:
        CheckpointError: It is damaged, too large, or contains another name.
    """
    if len(content) > _LIMIT_BYTES:
        raise CheckpointError(f"{where} cannot be read: it has {len(content)} bytes")
    try:
        return _Reader(content, allowed).load()
    # The operations check little: an operand of a wrong type, or none, is an error of Python.
    except (
        pickle.UnpicklingError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        EOFError,
        struct.error,
    ) as error:
        raise CheckpointError(f"{where} cannot be read: {error or type(error).__name__}") from error


def member(value: Any, name: str) -> Any:
    """The item of a dictionary, or attribute of an :class:`Inert` object, called ``name``; None if there is none."""
    return value.get(name) if isinstance(value, dict | Inert) else None


def step_of(value: Any) -> int | None:
    """The step that a dictionary or object holds under one of ``STEP_NAMES``; None if there is none."""
    steps = (as_step(member(value, name)) for name in STEP_NAMES)
    return next((step for step in steps if step is not None), None)


def as_step(value: Any) -> int | None:
    """The value if it is a whole number that can be a step; else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LIMIT_STEP else None
