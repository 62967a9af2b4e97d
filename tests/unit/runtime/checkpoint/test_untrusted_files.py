"""Checkpoints that somebody forged, so that looking at them would fail, take for ever, or leave their directory."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import pickle
import pickletools
import resource
import struct
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint import untrusted_files
from slurmtrain.runtime.checkpoint.external import Search, find_checkpoints, fingerprint, read_contents
from slurmtrain.runtime.checkpoint.untrusted_files import Global, Inert, list_tree, read_plain

HUGE = 2**500
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """What takes more than some gigabytes fails."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * 2**30, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def archive(path: Path, compression: int = zipfile.ZIP_STORED) -> Path:
    """A file like one of torch.save, whose members may be compressed."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("a/data.pkl", pickle.dumps({"step": 7, "x": bytes(10_000_000)}, 2))
        file.writestr("a/version", "3")
    return path


def encrypted(path: Path) -> Path:
    """An archive whose members need a password."""
    content = bytearray(archive(path).read_bytes())
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.find(magic)
        while at >= 0:
            content[at + flags] |= 1
            at = content.find(magic, at + 1)
    path.write_bytes(content)
    return path


def far_away(path: Path) -> Path:
    """An archive with a member at an offset that no file has."""
    content = archive(path).read_bytes()
    at = content.rfind(b"PK\x01\x02")
    entry, end = bytearray(content[at : content.rfind(b"PK\x05\x06")]), content[content.rfind(b"PK\x05\x06") :]
    extra = struct.pack("<HHQ", 1, 8, 2**64 - 2)
    entry[30:32] = struct.pack("<H", len(extra))
    entry[42:46] = b"\xff" * 4
    path.write_bytes(content[:at] + bytes(entry) + extra + end)
    return path


def of_transformers(state: str) -> Callable[[Path], Path]:
    """A directory of the Trainer of transformers with this state."""

    def make(path: Path) -> Path:
        directory = path.with_name("checkpoint-7")
        directory.mkdir()
        (directory / "trainer_state.json").write_text(state)
        (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(DEEP)) + DEEP.encode())
        return directory

    return make


def distributed(**info: Any) -> Callable[[Path], Path]:
    """A directory of torch.distributed.checkpoint whose index says this of where its contents are."""

    def make(path: Path) -> Path:
        dcp.save({"w": torch.zeros(9), "step": 7}, checkpoint_id=path)
        index = path / ".metadata"
        metadata = pickle.loads(index.read_bytes())
        for place in metadata.storage_data.values():
            vars(place).update(info)
        index.write_bytes(pickle.dumps(metadata))
        return path

    return make


FORGED: dict[str, Callable[[Path], Path]] = {
    "a compressed archive": lambda path: archive(path, zipfile.ZIP_DEFLATED),
    "an encrypted archive": encrypted,
    "an archive that goes on elsewhere": far_away,
    "deep JSON": of_transformers(DEEP),
    "a step of many digits": of_transformers(json.dumps({"global_step": HUGE})),
    "an index of huge lengths": distributed(length=HUGE),
    "an index of huge offsets": distributed(offset=HUGE),
    "an index whose contents overlap": distributed(offset=0, length=2000),
    "an index that leads elsewhere": distributed(relative_path="../secret"),
    "an index that leads to a file of the system": distributed(relative_path="/etc/passwd"),
}


@pytest.mark.parametrize("make", FORGED.values(), ids=FORGED)
def test_looking_at_it_costs_little_and_finds_no_whole_checkpoint(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path / "a.pt")
    began = time.process_time()
    [checkpoint] = find_checkpoints(Search(pattern=str(path)))
    assert not checkpoint.complete, checkpoint
    assert fingerprint(list_tree(path))
    assert time.process_time() - began < 10, "it took too long"


def nested(path: Path) -> Path:
    """A file of torch.save with lists in each other, deeper than functions can call each other."""
    content = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    torch.save({}, path)
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as before, zipfile.ZipFile(path, "w") as after:
        for name in before.namelist():
            after.writestr(name, content if name.endswith("data.pkl") else before.read(name))
    return path


def itself(path: Path) -> Path:
    """A file of torch.save with a dictionary that contains itself."""
    state: dict[str, Any] = {"step": 7}
    state["state"] = state
    torch.save(state, path)
    return path


@pytest.mark.parametrize("make", [nested, itself])
def test_contents_without_an_end_are_refused(make: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="levels deep"):
        read_contents(make(tmp_path / "a.pt"))


# --- pickles ----------------------------------------------------------------------------------------------------------


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
