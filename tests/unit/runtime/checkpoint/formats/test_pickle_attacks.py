"""Pickles that somebody forged: reading one executes, imports and changes nothing, and costs little."""

from __future__ import annotations

import collections
import contextlib
import pickle
import pickletools
import struct
import sys
import time
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.formats import untrusted_files
from slurmtrain.runtime.checkpoint.formats.untrusted_files import Global, Inert, read_plain

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inside: st.lists(inside) | st.tuples(inside, inside) | st.dictionaries(st.text() | st.integers(), inside),
    max_leaves=20,
)
LAYERS = 50_000
# Very many values, kept under a number for calls that get them again and again.
MANY = b"(" + b"N" * 900_000 + b"tq\x010cos\nsystem\nq\x000("
PAIRS = b"(" + b"NN\x86q\x02" + b"h\x02" * 20_000 + b"lq\x010ccollections\nOrderedDict\nq\x000"


@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    # In protocols 0 to 2, bytes are the result of a call.
    content = pickle.dumps(value, protocol)
    if b"_codecs" not in content and b"__builtin__" not in content:
        assert read_plain(content, "x") == value


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        read_plain(content, "x")


def test_dictionaries_in_order_and_objects_keep_their_contents() -> None:
    class Point:
        def __init__(self) -> None:
            self.x = 3

    Point.__qualname__ = "Point"
    globals()["Point"] = Point
    ordered = collections.OrderedDict(a=1, b=[2, {3}])
    value = read_plain(pickle.dumps({"o": ordered, "p": Point(), "s": torch.Size([2, 3])}), "x")
    assert value["o"] == {"a": 1, "b": [2, [3]]}
    assert (value["p"].made_by, value["p"].get("x")) == (Global(__name__, "Point"), 3)
    assert (value["s"].made_by, value["s"].arguments) == (Global("torch", "Size"), ((2, 3),))


# Each would set attributes on a class, a function or a module, or call something that was not meant to be called.
BUILDS = {
    "a class": b"ctorch\nSize\n}Vstolen\nI1\nsb.",
    "the slots of a class": b"ccollections\nOrderedDict\n(N}Vstolen\nI1\nstb.",
    "an enumeration": b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n(N}V_value2member_map_\nNstb.",
    "a dataclass": b"ctorch.distributed.checkpoint.metadata\nMetadata\n}V__init__\nNsb.",
    "a function": b"ctorch.serialization\n_get_layout\n}V__code__\nNsb.",
    "a list": b"]}Vappend\nNsb.",
    "a number": b"I1\n}Vx\nNsb.",
    "text": b"Vtext\n}Vx\nNsb.",
}


@pytest.mark.parametrize("content", BUILDS.values(), ids=BUILDS)
def test_attributes_are_set_on_nothing_but_inert_objects(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="attributes of a"):
        read_plain(content, "x")


def test_the_class_and_state_of_an_object_cannot_be_exchanged() -> None:
    value = read_plain(b"cos\nsystem\n(Vtrue\ntR}V__class__\ncbuiltins\ndict\nsVget\nNsb.", "x")
    assert isinstance(value, Inert)
    assert value.made_by == Global("os", "system")
    assert type(value) is Inert
    assert value.get("__class__") == Global("builtins", "dict")


@pytest.mark.parametrize(
    "content",
    [
        b"(Vx\nios\nsystem\n.",
        b"(cos\nsystem\nVx\no.",
        b"\x82\x01.",
        b"\x83\x01\x00.",
        b"\x84\x01\x00\x00\x00.",
        b"\x97.",
        b"I1\n(tR.",
        b"cos\nsystem\nNR.",
        b"Vos\nI1\n\x93.",
        b"}(I1\nu.",
        b"}]Ns.",
        b"\x85.",
        b"(\x85.",
        b"h\x07.",
        b"t.",
        b"N",
    ],
)
def test_what_no_pickler_writes_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError):
        read_plain(content, "x")


@pytest.mark.parametrize(
    "content",
    [
        b"Nr\xff\xff\xff\x7f.",
        b"Np4000000000\n.",
        b"\x8e" + struct.pack("<Q", 1 << 60) + b".",
        b"\x96" + struct.pack("<Q", 1 << 40) + b".",
        b"\x8d" + struct.pack("<Q", (1 << 63) + 1) + b".",
        b"\x8b" + struct.pack("<i", 1 << 30) + b".",
        b"\x8b" + struct.pack("<i", -5) + b".",
        b"I" + b"9" * 5000 + b"\n.",
        b"\x80\x05" + b"(" * 300_000,
        b"]" * 300_000,
        b"}" + b"N" + b"\x85" * LAYERS + b"Ns.",
        b"}" + b"N" + b"N\x86" * LAYERS + b"Ns.",
        MANY + b"h\x00h\x01R" * 1000 + b"t.",
        b"](" + b"P\n" * 100_000 + b"e.",
        PAIRS + b"(" + b"h\x00h\x01\x85R" * 20_000 + b"t.",
        b"(" + b"N" * 20_000 + b"lq\x020(" + b"h\x02" * 20_000 + b"lq\x030ccollections\nOrderedDict\nh\x03\x85R.",
    ],
    ids=["memo", "written memo", "bytes", "bytearray", "text", "integer", "negative", "digits", "marks", "lists",
         "deep key", "deep pairs", "calls", "objects", "dictionaries", "pairs"],
)  # fmt: skip
def test_a_small_pickle_costs_little(content: bytes) -> None:
    tracemalloc.start()
    began = time.process_time()
    with contextlib.suppress(CheckpointError):
        read_plain(content, "x")
    spent, (_, most) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 64 * len(content) + 200_000_000
    assert spent < 20


def test_deep_values_are_read_without_recursion() -> None:
    value = read_plain(b"N" + b"\x85" * LAYERS + b".", "x")
    depth = 0
    while value is not None:
        [value] = value
        depth += 1
    assert depth == LAYERS > sys.getrecursionlimit()


def test_a_pickle_that_is_too_large_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted_files, "_MOST_PICKLED", 10)
    with pytest.raises(CheckpointError, match="it has 11 bytes"):
        read_plain(b"N" * 11, "x")


def test_every_operation_that_picklers_write_is_known() -> None:
    # Operations of Python 2's own text, of registered extensions, of calls with a mark, and of buffers outside.
    unknown = {
        opcode.name
        for opcode in pickletools.opcodes
        if ord(opcode.code) not in untrusted_files._InertUnpickler.dispatch
    }
    assert unknown == {"STRING", "BINSTRING", "SHORT_BINSTRING", "EXT1", "EXT2", "EXT4", "INST", "OBJ", "LONG4",
                       "NEXT_BUFFER", "READONLY_BUFFER"}  # fmt: skip


def test_no_operation_of_python_that_could_call_or_change_something_is_left() -> None:
    """Operations that a later Python adds, or changes, must be looked at."""
    own = {pickle.REDUCE, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.BUILD, pickle.DICT, pickle.SETITEM, pickle.SETITEMS,
           pickle.EMPTY_SET, pickle.FROZENSET, pickle.ADDITEMS, pickle.BYTEARRAY8}  # fmt: skip
    assert untrusted_files._InertUnpickler.dispatch.keys() <= {ord(opcode.code) for opcode in pickletools.opcodes}
    python: Any = pickle._Unpickler  # type: ignore[attr-defined]
    assert all(untrusted_files._InertUnpickler.dispatch[code[0]] is not python.dispatch[code[0]] for code in own)
