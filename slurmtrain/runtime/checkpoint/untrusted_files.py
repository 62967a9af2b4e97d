"""Files of checkpoints that anybody may have written: their names, whether they are whole, their contents.

Nothing in them is executed. A pickle is a program for a small machine, which can import any name and call it. The
machine here imports and calls nothing: it builds plain values, and an :class:`Inert` object for everything else. It
needs no torch, and works for classes that are not installed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

from slurmtrain.errors import CheckpointError
from slurmtrain.system.owned_files import open_readable, read_readable

STEP_NAMES = ("global_step", "global_steps", "step", "iteration", "iter_num", "current_step", "train_step")
"""Names under which a checkpoint may hold its step, the most specific first."""

# Plain values are in small pickles: torch.save keeps tensors outside of them.
_MOST_PICKLED = 1 << 28
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
_BAD_PICKLE = (pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, EOFError, struct.error)


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


class _InertUnpickler(pickle._Unpickler):
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
            # Hashing nested tuples is recursive in C, so that deep ones would end this process.
            simple = all(isinstance(each, _SCALARS) for each in key) if type(key) is tuple else True
            if not simple or isinstance(key, list | dict):
                raise ValueError(f"a {type(key).__name__} as a key")
            target[key] = value

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


def read_plain(content: bytes, where: str, allowed: Callable[[Global], bool] = lambda _: True) -> Any:
    """The pickled object: plain values, lists, dictionaries, and :class:`Inert` objects for everything else.

    Args:
        content: The pickle.
        where: Its name for errors.
        allowed: Says which names it may contain; by default, any.

    Raises:
        CheckpointError: It is damaged, too large, or contains another name.
    """
    if len(content) > _MOST_PICKLED:
        raise CheckpointError(f"{where} cannot be read: it has {len(content)} bytes")
    try:
        return _InertUnpickler(content, allowed).load()
    except _BAD_PICKLE as error:
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


Contents = dict[str, Callable[[], Any]]
"""How to read each tensor and plain value of a checkpoint, by name."""

MAGIC = b"PK"
_LOCAL_MAGIC = b"PK\x03\x04"
# A local header: 26 bytes, the lengths of name and extra field, then these two fields (APPNOTE.TXT of PKWARE, 4.3.7).
_LOCAL_BYTES = 30
_LENGTHS = struct.Struct("<HH")
_ENCRYPTED = 1
_PICKLE = "data.pkl"
_CHUNK = 1 << 22
# What reading an archive raises that is none, or that somebody forged: RuntimeError for members that are encrypted,
# OverflowError for offsets that no file has.
_UNREADABLE = (zipfile.BadZipFile, struct.error, ValueError, OverflowError, RuntimeError, EOFError)


def archive_problem(path: Path) -> str | None:
    """Why an archive is not whole, as a phrase; None if it is.

    The directory comes last, so a truncated archive has none. The members must lie where it says, each whole. Their
    contents are not read. Raises OSError.
    """
    try:
        with open_readable(path) as file, zipfile.ZipFile(file) as archive:
            return _members_problem(archive, file)
    except _UNREADABLE:
        return "it is cut off: the archive has no directory at its end"


def _members_problem(archive: zipfile.ZipFile, file: IO[bytes]) -> str | None:
    members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    if not members:
        return "the archive is empty"
    # Otherwise bytes were lost or added: the offsets then belong to another file.
    if members[0].header_offset != 0:
        return "the members of the archive are not where its directory says they are"
    if packed := next(filter(_is_packed, members), None):
        return f"{packed.filename} in the archive is compressed or encrypted, and torch.save never does that"
    ends = [*(member.header_offset for member in members[1:]), archive.start_dir]
    for member, end in zip(members, ends, strict=True):
        file.seek(member.header_offset)
        header = file.read(_LOCAL_BYTES)
        is_there = len(header) == _LOCAL_BYTES and header.startswith(_LOCAL_MAGIC)
        begin = member.header_offset + len(header) + sum(_LENGTHS.unpack(header[-_LENGTHS.size :])) if is_there else 0
        if not is_there or begin + member.compress_size > end:
            return f"{member.filename} in the archive is incomplete"
    return None


def _is_packed(member: zipfile.ZipInfo) -> bool:
    """Whether a member is compressed or encrypted: reading it may fail, or yield many times its size in the file."""
    return member.compress_type != zipfile.ZIP_STORED or bool(member.flag_bits & _ENCRYPTED)


def is_archive(path: Path) -> bool:
    """Whether a file begins as an archive does. Raises OSError."""
    with open_readable(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def read_archive(source: Path | IO[bytes], where: str) -> Any:
    """What was saved by ``torch.save``, with inert objects for tensors.

    ``where``: the name for errors. Raises CheckpointError if it cannot be read, OSError.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            pickled = next((each for each in archive.infolist() if each.filename.rpartition("/")[2] == _PICKLE), None)
            if pickled is None:
                raise CheckpointError(f"{where} was not written by torch.save: it has no {_PICKLE}")
            if pickled.header_offset < 0:
                raise CheckpointError(f"{where} cannot be read: a part of it is missing")
            if _is_packed(pickled):
                raise CheckpointError(f"{where} was not written by torch.save: its {_PICKLE} is compressed")
            return read_plain(archive.read(pickled), where)
    except _UNREADABLE as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error


def directory_of_archive(path: Path) -> bytes:
    """The names, sizes and checksums of an archive's members. Raises CheckpointError, OSError."""
    try:
        with zipfile.ZipFile(path) as archive:
            # The first part of each name is the name of the file when it was written.
            rows = [(each.filename.partition("/")[2], each.file_size, each.CRC) for each in archive.infolist()]
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return repr(sorted(rows)).encode()


def checksum_problem(source: Path | IO[bytes]) -> str | None:
    """Read a whole archive and compare it with its checksums; returns what differs, as a phrase. Raises OSError."""
    try:
        with zipfile.ZipFile(source) as archive:
            return next(_damaged(archive), None)
    except _UNREADABLE as error:
        return f"it cannot be read: {error}"


def _damaged(archive: zipfile.ZipFile) -> Iterator[str]:
    for member in archive.infolist():
        # With torch.serialization.set_crc32_options(False) there are no checksums.
        if member.CRC == 0 or _is_packed(member):
            continue
        try:
            with archive.open(member) as data:
                while data.read(_CHUNK):
                    pass
        except (zipfile.BadZipFile, EOFError):
            yield f"{member.filename} in the archive has changed since it was written: its checksum differs"


# The library refuses larger headers.
_LIMIT_BYTES = 100 * 2**20
_LENGTH_BYTES = 8
METADATA = "__metadata__"
"""The key of the header under which text is stored; all others are tensors."""


def safetensors_problem(path: Path) -> str | None:
    """Why a file is not whole, as a phrase; None if it is exactly as long as its header says. Raises OSError."""
    header, begin = read_header(path)
    if header is None:
        return "its header is cut off or damaged"
    with contextlib.suppress(TypeError, LookupError, AttributeError, ValueError):
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != METADATA]
        spans = sorted((int(begin), int(end)) for begin, end, *_ in offsets)
        # Without gaps or overlaps, as the format demands.
        position = 0
        for start, end in spans:
            if start != position or end < start:
                return "its header is damaged"
            position = end
        length, size = begin + position, path.stat().st_size
        return None if size == length else f"it has {size} bytes, but its header says {length}"
    return "its header is damaged"


def read_header(path: Path) -> tuple[Mapping[str, Any] | None, int]:
    """The header, None if it cannot be read, and where the data begins. Raises OSError."""
    with open_readable(path) as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        content = file.read(length) if length <= _LIMIT_BYTES else b""
    with contextlib.suppress(ValueError, RecursionError):
        header = json.loads(content)
        if isinstance(header, dict) and len(content) == length:
            return header, _LENGTH_BYTES + length
    return None, 0


# As docs/scripts.md lists them for users.
_UNFINISHED = (".tmp", ".part", ".partial", ".incomplete", "~")
# How pickles of protocol 2 and later begin: what torch.save wrote before it wrote archives.
_PICKLE_MAGIC = b"\x80"
# After a crash of the machine, file systems return zeros for what was written last.
_ZEROS = bytes(len(MAGIC))
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
"""How the names of files that torch.save wrote commonly end."""


@dataclass(frozen=True, slots=True)
class FileTree:
    """A file, or a directory with all files below it.

    ``sizes`` are in bytes, ``times`` are times of modification in seconds since 1970, both by path relative to
    ``path``; a file has itself under the empty name.
    """

    path: Path
    sizes: Mapping[str, int]
    times: Mapping[str, float]
    is_directory: bool

    @property
    def bytes(self) -> int:
        """The total size."""
        return sum(self.sizes.values())

    @property
    def saved_at(self) -> float:
        """When one of the files was last written to, in seconds since 1970."""
        return max(self.times.values(), default=0.0)

    @property
    def top(self) -> set[str]:
        """The names of files directly in the directory."""
        return {name for name in self.sizes if "/" not in name}

    @property
    def folders(self) -> set[str]:
        """The names of folders directly in the directory that have files."""
        return {name.partition("/")[0] for name in self.sizes if "/" in name}

    def below(self, folder: str) -> FileTree:
        """The part of it in a ``folder``."""
        start = f"{folder}/"
        return FileTree(
            self.path / folder,
            {name.removeprefix(start): size for name, size in self.sizes.items() if name.startswith(start)},
            {name.removeprefix(start): time for name, time in self.times.items() if name.startswith(start)},
            is_directory=True,
        )

    def unfinished_problem(self) -> str | None:
        """That a file is being written, by its name, as a phrase; None if none is.

        One that is older than all other files was left by an earlier save, which was repeated since.
        """
        marked = {name: self.times[name] for name in self.sizes if is_unfinished(name)}
        others = [time for name, time in self.times.items() if name not in marked]
        unfinished = (name for name, time in marked.items() if not others or time >= min(others))
        return next((f"{name} is still being written" for name in unfinished), None)


def list_tree(path: Path) -> FileTree:
    """List a file, or a directory with everything below it. Raises OSError."""
    status = path.stat()
    if not path.is_dir():
        return FileTree(path, {"": status.st_size}, {"": status.st_mtime}, is_directory=False)
    places = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    files = {place.relative_to(path).as_posix(): place.stat() for place in places}
    return FileTree(
        path,
        {name: each.st_size for name, each in files.items()},
        {name: each.st_mtime for name, each in files.items()},
        is_directory=True,
    )


def is_unfinished(name: str) -> bool:
    """Whether the name of a file or directory says that it is still being written."""
    last = name.rpartition("/")[2]
    return last.endswith(_UNFINISHED) or last.startswith(".tmp")


def file_problem(tree: FileTree, name: str, *, by_torch: bool = True) -> str | None:
    """Why the file ``name`` in ``tree`` is missing or not whole, as a phrase; None if it is there and whole.

    ``by_torch``: whether it is known that ``torch.save`` has written it, unless its name ends in ``.safetensors``.
    Raises OSError.
    """
    called = name or tree.path.name
    size = tree.sizes.get(name)
    if size is None:
        return f"{called} is missing"
    if size == 0:
        return f"{called} is empty"
    path = tree.path / name
    if called.endswith(".safetensors"):
        problem = safetensors_problem(path)
    else:
        with open_readable(path) as file:
            start = file.read(len(MAGIC))
        problem = "it begins with zeros" if start == _ZEROS else None
        if MAGIC.startswith(start):
            problem = archive_problem(path)
        elif problem is None and by_torch and not start.startswith(_PICKLE_MAGIC):
            problem = "it does not begin like a file of torch.save"
    return f"{called} is incomplete: {problem}" if problem else None


def read_json_file(path: Path) -> Any:
    """What a JSON file holds; None if it holds no JSON. Raises OSError."""
    try:
        return json.loads(read_readable(path))
    except (ValueError, RecursionError):
        return None
