"""The files of a checkpoint: names, sizes and times, listed once; and whether single files are whole."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.formats.pickles import read_plain
from slurmtrain.system.owned_files import open_readable, read_readable

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
        return "the members of the archive are not where its directory says"
    if packed := next(filter(_is_packed, members), None):
        return f"{packed.filename} in the archive is compressed or encrypted, which torch.save does not do"
    ends = [*(member.header_offset for member in members[1:]), archive.start_dir]
    for member, end in zip(members, ends, strict=True):
        begin = _data_offset(file, member)
        if begin is None or begin + member.compress_size > end:
            return f"{member.filename} in the archive is not whole"
    return None


def _is_packed(member: zipfile.ZipInfo) -> bool:
    """Whether a member is compressed or encrypted: reading it may fail, or yield many times its size in the file."""
    return member.compress_type != zipfile.ZIP_STORED or bool(member.flag_bits & _ENCRYPTED)


def _data_offset(file: IO[bytes], member: zipfile.ZipInfo) -> int | None:
    """Where a member's data begins; None if there is no header for it."""
    file.seek(member.header_offset)
    header = file.read(_LOCAL_BYTES)
    if len(header) < _LOCAL_BYTES or not header.startswith(_LOCAL_MAGIC):
        return None
    return int(member.header_offset + _LOCAL_BYTES + sum(_LENGTHS.unpack(header[-_LENGTHS.size :])))


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
                raise CheckpointError(f"{where} was not written by torch.save: its {_PICKLE} is not stored as it is")
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
            yield f"{member.filename} in the archive is not what was written: its checksum differs"


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
        return None if size == length else f"it has {size} bytes, and its header says {length}"
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

    def unfinished(self) -> str | None:
        """The name of a file that is being written, by its name; None if there is none.

        One that is older than all other files was left by an earlier save, which was repeated since.
        """
        marked = {name: self.times[name] for name in self.sizes if is_unfinished(name)}
        others = [time for name, time in self.times.items() if name not in marked]
        return next((name for name, time in marked.items() if not others or time >= min(others)), None)


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
    in_safetensors = called.endswith(".safetensors")
    problem = safetensors_problem(path) if in_safetensors else _torch_problem(path, by_torch=by_torch)
    return f"{called} is not whole: {problem}" if problem else None


def _torch_problem(path: Path, *, by_torch: bool) -> str | None:
    with open_readable(path) as file:
        start = file.read(len(MAGIC))
    if MAGIC.startswith(start):
        return archive_problem(path)
    if start == _ZEROS:
        return "it begins with zeros"
    if by_torch and not start.startswith(_PICKLE_MAGIC):
        return "it does not begin like a file of torch.save"
    return None


def read_json_file(path: Path) -> Any:
    """What a JSON file holds; None if it holds no JSON. Raises OSError."""
    try:
        return json.loads(read_readable(path))
    except (ValueError, RecursionError):
        return None
