"""Reading the data of a pickle, such as a step or an index, without executing anything.

A pickle is a program for a small machine, which can import any name and call it. This machine imports and calls
nothing: it builds plain values, and an :class:`Inert` object for everything else. Needs no torch, and works for classes
that are not installed here.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from slurmtrain.errors import CheckpointError

STEP_NAMES = ("global_step", "global_steps", "step", "iteration", "iter_num", "current_step", "train_step")
"""Names under which a checkpoint may hold its step, the most specific first."""

# Plain values are in small pickles: torch.save keeps tensors outside of them.
_LIMIT_BYTES = 1 << 28
# Picklers write long lists and dictionaries in batches of 1,000, so that few values wait for their container.
_LIMIT_STACK = 1 << 20
# Of an integer; picklers write larger ones too, but nothing that is read here contains any.
_LIMIT_INTEGER_BYTES = 64
_SCALARS = (str, int, float, bytes, bool, type(None))


class Global(NamedTuple):
    """The name of a class, function or constant."""

    module: str
    name: str


class Inert:
    """Stands for an object whose class is not imported: keeps what the pickle gives it.

    ``made_by``: the name of its class, or of the function that would make it, if known. ``arguments``: for that call.
    """

    __slots__ = ("arguments", "items", "made_by", "state")

    made_by: Global | None
    arguments: tuple[Any, ...]
    state: Any
    items: dict[Any, Any] | None

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """An object without attributes, whatever its constructor would take."""
        made = super().__new__(cls)
        made.made_by, made.arguments, made.state, made.items = None, (), None, None
        return made

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing with the arguments."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

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


class _Machine:
    """The machine of a pickle: the methods are its operations (documented in Python's ``pickletools``)."""

    def __init__(self, content: bytes, allowed: Callable[[Global], bool]) -> None:
        self.content = content
        self.allowed = allowed
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.pairs_left = len(content)

    def run(self) -> Any:
        """The pickled object. Raises ValueError, IndexError and the like if the content is not a whole pickle."""
        content, operations, stack, marks = self.content, _OPERATIONS, self.stack, self.marks
        while (code := content[self.at]) != _STOP:
            self.at += 1
            operations[code](self)
            if len(stack) > _LIMIT_STACK or len(marks) > _LIMIT_STACK:
                raise ValueError("too many values wait for their container")
        [result] = stack
        return result

    # --- arguments of operations ---

    def take(self, count: int) -> bytes:
        """The next bytes."""
        part = self.content[self.at : self.at + count]
        if len(part) != count:
            raise ValueError("it is cut off")
        self.at += count
        return part

    def number(self, format: struct.Struct) -> Any:
        """The next number."""
        begin = self.at
        self.at += format.size
        return format.unpack_from(self.content, begin)[0]

    def line(self, encoding: str = "utf-8") -> str:
        """The rest of the line."""
        end = self.content.index(b"\n", self.at)
        text = self.content[self.at : end].decode(encoding)
        self.at = end + 1
        return text

    def to_mark(self) -> list[Any]:
        """Take what was pushed since the last mark."""
        begin = self.marks.pop()
        part = self.stack[begin:]
        del self.stack[begin:]
        return part

    # --- operations ---

    def push_text(self, length: struct.Struct) -> None:
        self.stack.append(self.take(self.number(length)).decode("utf-8", "surrogatepass"))

    def push_bytes(self, length: struct.Struct) -> None:
        self.stack.append(self.take(self.number(length)))

    def push_integer(self, length: struct.Struct) -> None:
        size = self.number(length)
        if not 0 <= size <= _LIMIT_INTEGER_BYTES:
            raise ValueError(f"an integer of {size} bytes")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def push_written_integer(self) -> None:
        text = self.line().removesuffix("L")
        # The booleans of protocol 0.
        self.stack.append({"00": False, "01": True}.get(text) if text in ("00", "01") else int(text))

    def push_tuple(self, count: int) -> None:
        begin = len(self.stack) - count
        if begin < (self.marks[-1] if self.marks else 0):
            raise ValueError("a tuple of values that are not there")
        self.stack[begin:] = [tuple(self.stack[begin:])]

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def remember(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def remember_as(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def append(self, elements: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(elements)
        elif not isinstance(target, Inert):
            raise ValueError(f"elements of a {type(target).__name__}")

    def set_items(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict | Inert) or len(flat) % 2:
            raise ValueError(f"items of a {type(target).__name__}")
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            target[_checked_key(key)] = value

    def push_dict(self) -> None:
        flat = self.to_mark()
        self.stack.append({})
        self.set_items(flat)

    def push_global(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is not text")
        named = Global(module, name)
        if not self.allowed(named):
            raise ValueError(f"{module}.{name} is not allowed in it")
        self.stack.append(named)

    def push_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.push_global(module, name)

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.make(function, arguments)

    def make(self, made_by: object, arguments: object) -> None:
        if not isinstance(made_by, Global) or not isinstance(arguments, tuple):
            raise ValueError("a call of something that has no name")
        if made_by == _ORDERED:
            self.push_ordered(*arguments)
            return
        inert = Inert()
        inert.made_by, inert.arguments = made_by, arguments
        self.stack.append(inert)

    def push_ordered(self, pairs: Any = ()) -> None:
        # Picklers write the pairs of each dictionary, but a forged pickle may give the same ones to many.
        self.pairs_left -= len(pairs)
        if self.pairs_left < 0:
            raise ValueError("its dictionaries have more items than it has bytes")
        self.stack.append({})
        for key, value in pairs:
            self.set_items([key, value])

    def make_with_keywords(self) -> None:
        self.stack.pop()
        self.call()

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Inert):
            target.state = state
        # An ordered dictionary may have attributes, such as the versions in a state_dict: they are not needed.
        elif not isinstance(target, dict):
            raise ValueError(f"attributes of a {type(target).__name__}")

    def push_inert(self) -> None:
        self.stack.append(Inert())

    def push_persistent(self) -> None:
        self.line()
        self.push_inert()

    def replace_with_inert(self) -> None:
        self.stack.pop()
        self.push_inert()

    def pop(self) -> None:
        # A mark is popped like a value.
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()


def _checked_key(key: Any) -> Any:
    """A key of a dictionary. Hashing nested tuples is recursive in C, so that deep ones would end this process."""
    simple = all(isinstance(each, _SCALARS) for each in key) if type(key) is tuple else True
    if not simple or isinstance(key, list | dict):
        raise ValueError(f"a {type(key).__name__} as a key")
    return key


_ORDERED = Global("collections", "OrderedDict")
_STOP = pickle.STOP[0]
_U1, _U2, _U4, _U8, _I4 = (struct.Struct(f"<{letter}") for letter in "BHIQi")
_F8 = struct.Struct(">d")
_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    code[0]: operation
    for code, operation in {
        pickle.PROTO: lambda m: _drop(m.take(1)),
        pickle.FRAME: lambda m: _drop(m.take(8)),
        pickle.MARK: _Machine.mark,
        pickle.POP: _Machine.pop,
        pickle.POP_MARK: lambda m: _drop(m.to_mark()),
        pickle.DUP: lambda m: m.stack.append(m.stack[-1]),
        pickle.NONE: lambda m: m.stack.append(None),
        pickle.NEWTRUE: lambda m: m.stack.append(True),
        pickle.NEWFALSE: lambda m: m.stack.append(False),
        pickle.INT: _Machine.push_written_integer,
        pickle.LONG: _Machine.push_written_integer,
        pickle.BININT: lambda m: m.stack.append(m.number(_I4)),
        pickle.BININT1: lambda m: m.stack.append(m.number(_U1)),
        pickle.BININT2: lambda m: m.stack.append(m.number(_U2)),
        pickle.LONG1: lambda m: m.push_integer(_U1),
        pickle.LONG4: lambda m: m.push_integer(_I4),
        pickle.FLOAT: lambda m: m.stack.append(float(m.line())),
        pickle.BINFLOAT: lambda m: m.stack.append(m.number(_F8)),
        pickle.UNICODE: lambda m: m.stack.append(m.line("raw-unicode-escape")),
        pickle.SHORT_BINUNICODE: lambda m: m.push_text(_U1),
        pickle.BINUNICODE: lambda m: m.push_text(_U4),
        pickle.BINUNICODE8: lambda m: m.push_text(_U8),
        pickle.SHORT_BINBYTES: lambda m: m.push_bytes(_U1),
        pickle.BINBYTES: lambda m: m.push_bytes(_U4),
        pickle.BINBYTES8: lambda m: m.push_bytes(_U8),
        pickle.BYTEARRAY8: lambda m: m.push_bytes(_U8),
        pickle.EMPTY_TUPLE: lambda m: m.push_tuple(0),
        pickle.TUPLE1: lambda m: m.push_tuple(1),
        pickle.TUPLE2: lambda m: m.push_tuple(2),
        pickle.TUPLE3: lambda m: m.push_tuple(3),
        pickle.TUPLE: lambda m: m.stack.append(tuple(m.to_mark())),
        pickle.EMPTY_LIST: lambda m: m.stack.append([]),
        pickle.LIST: lambda m: m.stack.append(m.to_mark()),
        pickle.APPEND: lambda m: m.append([m.stack.pop()]),
        pickle.APPENDS: lambda m: m.append(m.to_mark()),
        # Sets are not needed as such.
        pickle.EMPTY_SET: lambda m: m.stack.append([]),
        pickle.FROZENSET: lambda m: m.stack.append(m.to_mark()),
        pickle.ADDITEMS: lambda m: m.append(m.to_mark()),
        pickle.EMPTY_DICT: lambda m: m.stack.append({}),
        pickle.DICT: _Machine.push_dict,
        pickle.SETITEM: lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
        pickle.SETITEMS: lambda m: m.set_items(m.to_mark()),
        pickle.GET: lambda m: m.stack.append(m.memo[int(m.line())]),
        pickle.BINGET: lambda m: m.stack.append(m.memo[m.number(_U1)]),
        pickle.LONG_BINGET: lambda m: m.stack.append(m.memo[m.number(_U4)]),
        pickle.PUT: lambda m: m.remember_as(int(m.line())),
        pickle.BINPUT: lambda m: m.remember_as(m.number(_U1)),
        pickle.LONG_BINPUT: lambda m: m.remember_as(m.number(_U4)),
        pickle.MEMOIZE: _Machine.remember,
        pickle.GLOBAL: lambda m: m.push_global(m.line(), m.line()),
        pickle.STACK_GLOBAL: _Machine.push_stack_global,
        pickle.REDUCE: _Machine.call,
        pickle.NEWOBJ: _Machine.call,
        pickle.NEWOBJ_EX: _Machine.make_with_keywords,
        pickle.BUILD: _Machine.build,
        pickle.PERSID: _Machine.push_persistent,
        pickle.BINPERSID: _Machine.replace_with_inert,
    }.items()
}


def _drop(_: object) -> None:
    """Ignore an argument."""


def _any_name(_: Global) -> bool:
    return True


def read_plain(content: bytes, where: str, allowed: Callable[[Global], bool] = _any_name) -> Any:
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
        return _Machine(content, allowed).run()
    # The operations check little: an operand of a wrong type, or none, is an error of Python.
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
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
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
