"""How a block of lines is stored: a header in JSON, then its columns as arrays of the machine's own numbers.

Steps at equal distances take no room, and values that fit into 32 bits, as most of torch's do, only these. The header
and each array have a CRC-32: after a power failure, a file may have bytes that nobody has written.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurmtrain.model.metrics.blocks import Block, MetricColumn

# A file that begins otherwise is of another version, or of a machine with another order of bytes.
MAGIC = f"slurmtrain history 1 {sys.byteorder}\n".encode()
# Of each block: the length of its header, the header's CRC, and the length of its arrays, in bytes.
_PREFIX = struct.Struct("=IIQ")
PREFIX_BYTES = _PREFIX.size
_SIZES = {"q": 8, "d": 8, "f": 4, "i": 4}


class HistoryDamaged(Exception):
    """A history contains what was not written, or not completely: it is to be made anew."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """The header in front of the arrays of a block.

    ``key``: the directory of the attempt whose lines these are, from byte ``begin`` of its metrics to ``end``;
    ``tail``: the CRC of the last of these bytes; ``rows``: how many lines; ``even``: the first step and the distance of
    equidistant steps; ``columns``: for each metric, the type of its values and how many there are, None: one in each
    row; ``crcs``: of the arrays.
    """

    key: str
    begin: int
    end: int
    tail: int
    rows: int
    even: Sequence[int] | None
    columns: Mapping[str, Sequence[Any]]
    crcs: Sequence[int]

    def arrays(self) -> Iterator[tuple[str, str, int]]:
        """The arrays in the order of storage: name, type, and number of values.

        The row numbers of a metric precede its values.
        """
        if self.even is None:
            yield "steps", "q", self.rows
        yield "times", "d", self.rows
        for name, (kind, count) in self.columns.items():
            if count is not None:
                yield f"rows:{name}", "i", count
            yield f"values:{name}", kind, self.rows if count is None else count


def encode(key: str, span: tuple[int, int], tail: int, block: Block) -> bytes:
    """A stored block.

    Args:
        key: The directory of the attempt.
        span: Where its lines begin in the attempt's metrics, and where they end, in bytes.
        tail: The CRC of the last of these bytes.
        block: The lines.
    """
    even = _even(block.steps)
    arrays: list[array[Any]] = [] if even else [array("q", block.steps)]
    arrays.append(array("d", block.times))
    columns = {}
    for name, column in block.columns.items():
        values = _smallest(column.values)
        if column.rows is not None:
            arrays.append(array("i", column.rows))
        arrays.append(values)
        columns[name] = (values.typecode, None if column.rows is None else len(values))
    contents = [each.tobytes() for each in arrays]
    header = BlockHeader(key, *span, tail, len(block), even, columns, [zlib.crc32(each) for each in contents])
    text = json.dumps(asdict(header)).encode()
    return b"".join([_PREFIX.pack(len(text), zlib.crc32(text), sum(map(len, contents))), text, *contents])


def _even(steps: Sequence[int]) -> tuple[int, int] | None:
    if len(steps) < 2 or steps[1] <= steps[0]:
        return None
    distance = steps[1] - steps[0]
    even = range(steps[0], steps[0] + distance * len(steps), distance)
    return (steps[0], distance) if steps == even or array("q", even) == steps else None


def _smallest(values: Sequence[float]) -> array[float]:
    """Values in 32 bits if nothing is lost."""
    exact = array("d", values)
    short = array("f", values)
    return short if array("d", short).tobytes() == exact.tobytes() else exact


def read_prefix(prefix: bytes) -> tuple[int, int, int]:
    """The length of a block's header, its CRC, and the length of its arrays, from the bytes in front of them."""
    length, crc, rest = _PREFIX.unpack(prefix)
    return length, crc, rest


def read_header(text: bytes, crc: int) -> BlockHeader:
    """A block's header from its ``text``. Raises HistoryDamaged if its CRC is not ``crc``."""
    if zlib.crc32(text) != crc:
        raise HistoryDamaged
    try:
        return BlockHeader(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise HistoryDamaged from error


def read_block(header: BlockHeader, names: Collection[str] | None, read: Callable[[int, int], bytes]) -> Block:
    """A block with the metrics of these ``names``; None: all.

    Args:
        header: Its header.
        names: The metrics.
        read: Returns bytes of its arrays: from a place among them on, so many.

    Raises:
        HistoryDamaged: Its arrays are not what was written.
    """
    arrays: dict[str, array[Any]] = {}
    place = 0
    for (name, kind, count), crc in zip(header.arrays(), header.crcs, strict=True):
        length = _SIZES[kind] * count
        if names is None or ":" not in name or name.partition(":")[2] in names:
            content = read(place, length)
            if len(content) != length or zlib.crc32(content) != crc:
                raise HistoryDamaged
            arrays[name] = array(kind, content)
        place += length
    steps: Sequence[int] = arrays.get("steps", ())
    if header.even is not None:
        first, distance = header.even
        steps = range(first, first + distance * header.rows, distance)
    columns = {
        name: MetricColumn(_doubles(arrays[f"values:{name}"]), arrays.get(f"rows:{name}"))
        for name in header.columns
        if f"values:{name}" in arrays
    }
    return Block(steps, arrays["times"], columns)


def _doubles(values: array[float]) -> array[float]:
    return values if values.typecode == "d" else array("d", values)
