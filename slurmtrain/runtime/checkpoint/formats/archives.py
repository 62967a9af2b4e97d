"""Zip archives, which ``torch.save`` writes: whether one is whole, its members, its checksums."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.formats.pickles import read_plain
from slurmtrain.system.owned_files import open_readable

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
