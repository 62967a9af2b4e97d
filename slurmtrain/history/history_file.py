"""The file with the history of a run: blocks one behind the other; further ones are appended.

Whatever its writer left behind when it was killed, blocks up to the first incomplete one count, and the rest is
overwritten. Nothing is synchronised to the disk: lost or missing blocks are read from the metrics again.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurmtrain.history.encoding import (
    MAGIC,
    PREFIX_BYTES,
    BlockHeader,
    HistoryDamaged,
    read_block,
    read_header,
    read_prefix,
)
from slurmtrain.model.metrics.blocks import Block
from slurmtrain.system.owned_files import open_checked


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block in a file. ``place``: where its arrays begin; ``length``: theirs, both in bytes."""

    header: BlockHeader
    place: int
    length: int


@dataclass(slots=True)
class HistoryFile:
    """The blocks of an open file, by the directory of their attempt, in the order of storage.

    ``end``: where the next block goes; ``size``: of the file, all in bytes.
    """

    handle: int
    blocks: Mapping[str, list[StoredBlock]] = field(default_factory=dict)
    end: int = 0
    size: int = 0

    def load(self, block: StoredBlock, names: Collection[str] | None) -> Block:
        """A block with the metrics of these ``names``; None: all. Raises HistoryDamaged."""
        return read_block(block.header, names, lambda place, length: os.pread(self.handle, length, block.place + place))

    def begin_writing(self) -> None:
        """Cut off what is incomplete. Raises OSError."""
        os.ftruncate(self.handle, self.end)
        os.lseek(self.handle, self.end, os.SEEK_SET)
        if not self.end:
            self.append(MAGIC)

    def append(self, content: bytes) -> None:
        """Append a block, in one write. Raises OSError."""
        if os.write(self.handle, content) != len(content):
            raise OSError("no room for a block")


def open_history(path: Path, *, writing: bool) -> HistoryFile:
    """Open a history; one that is of another version, or damaged in front, is empty.

    Args:
        path: The file.
        writing: Create it if it does not exist, so that blocks can be appended.

    Raises:
        OSError: It cannot be opened; UntrustedPath: It, or its directory, is somebody else's.
    """
    handle = open_checked(path, os.O_RDWR | os.O_CREAT if writing else os.O_RDONLY)
    blocks: dict[str, list[StoredBlock]] = defaultdict(list)
    size = os.fstat(handle).st_size
    end = len(MAGIC) if os.pread(handle, len(MAGIC), 0) == MAGIC else 0
    for block in _stored(handle, end, size) if end else ():
        blocks[block.header.key].append(block)
        end = block.place + block.length
    return HistoryFile(handle, blocks, end, size)


def _stored(handle: int, place: int, size: int) -> Iterator[StoredBlock]:
    """The complete blocks of a file of ``size`` bytes from ``place`` on."""
    while place + PREFIX_BYTES <= size:
        length, crc, rest = read_prefix(os.pread(handle, PREFIX_BYTES, place))
        begin = place + PREFIX_BYTES + length
        place = begin + rest
        if place > size:
            return
        try:
            header = read_header(os.pread(handle, length, begin - length), crc)
        except HistoryDamaged:
            return
        yield StoredBlock(header, begin, rest)
