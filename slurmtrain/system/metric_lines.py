"""What is new in a metrics file, in columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slurmtrain.model.metrics.blocks import Block, block_of
from slurmtrain.model.metrics.lines import read_plain_lines
from slurmtrain.model.run.journal import Garbage, garbage_of
from slurmtrain.model.run.progress import Point, read_point
from slurmtrain.system.journal_files import PIECE_BYTES, JournalFile, Piece, read_pieces


class MetricLines(NamedTuple):
    """Lines of a metrics file, up to byte ``end``.

    ``newest``: the step and time of the last point, with the last value of each metric; None if there is no point.
    ``garbage``: lines that are not points, or only in part.
    """

    block: Block
    newest: Point | None
    garbage: Sequence[Garbage]
    end: int


def read_metric_lines(file: JournalFile, offset: int = 0, *, length: int = PIECE_BYTES) -> Iterator[MetricLines]:
    """A metrics file's lines from byte ``offset`` up to the size it was listed with; none if it has been deleted.

    Args:
        file: The file.
        offset: Where to begin, in bytes.
        length: How much to read at once, in bytes. Lines take many times the memory of their columns.

    Raises:
        RunUnreadable: It cannot be read.
    """
    for piece in read_pieces(file, offset, length=length):
        plain = read_plain_lines(piece.whole_lines)
        yield _one_by_one(piece) if plain is None else MetricLines(*plain, (), piece.end)


def _one_by_one(piece: Piece) -> MetricLines:
    points, newest, garbage = [], None, list(piece.reading.garbage)
    metrics: dict[str, float] = {}
    for offset, record in piece.reading.records:
        flaws: list[str] = []
        point = read_point(record, flaws)
        if point is not None:
            points.append(point)
            metrics.update(point.metrics)
            newest = point._replace(metrics=metrics)
        if flaws:
            line = piece.line(offset).encode()
            garbage.append(garbage_of(piece.name, offset, line, f"values that are unusable: {', '.join(flaws)}"))
    return MetricLines(block_of(points), newest, garbage, piece.end)
