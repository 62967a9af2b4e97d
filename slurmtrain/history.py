"""What runs have logged: their metrics files, as far as possible from a history in columns, followed by new lines.

A history is read by whoever needs it, and grows when enough has been logged since: no process of a job knows it, and no
other command waits for it. It is a ZIP archive of arrays in the machine's own numbers, whose CRCs show what was not
written completely; more is appended. Whatever its writer left when it was killed, a history that is damaged, or does
not fit the metrics files any more since these were replaced, is made anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import zlib
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

from slurmtrain.errors import PathError
from slurmtrain.model.metrics.columns import Block, MetricColumn
from slurmtrain.model.metrics.curves import Curve, Segment, SurvivingLine, curves_of, start_of
from slurmtrain.model.run.layout import RunDir, RunsRoot
from slurmtrain.model.run.run import Run
from slurmtrain.system.files import make_directory
from slurmtrain.system.journal_files import JournalFile, journal_files, read_bytes, read_metric_lines
from slurmtrain.system.locks import locked
from slurmtrain.system.owned_files import open_checked

# An archive of another version, or of a machine with another order of bytes, is made anew.
_VERSION = [2, sys.byteorder]
# Lines take many times the memory of their columns.
_PIECE_BYTES = 1 << 20
# Fewer new bytes of metrics are parsed each time: small blocks would take more room, and more time to read.
_LEAST_BYTES = 1 << 16
# Of a run that has ended, what is stored stays as it is.
_LEAST_BYTES_ENDED = 1 << 12
# By so many bytes in front of the end of a block it is recognised whether metrics were replaced.
_TAIL_BYTES = 64


@dataclass(frozen=True, slots=True)
class History:
    """What a run has logged, by metric. ``problems``: files that cannot be read, with the reasons."""

    curves: Mapping[str, Curve]
    problems: tuple[str, ...] = ()


def read_history(
    run: Run, directory: RunDir, names: Collection[str] | None = None, *, keep_superseded: bool = False
) -> History:
    """The curves of a run's metrics, without what was rolled back. Only what was logged since the last time is parsed.

    Args:
        run: The run, with its attempts.
        directory: Its directory.
        names: The metrics to read; None: all.
        keep_superseded: Keep what was rolled back too, beside the rest.

    Raises:
        RunUnreadable: A metrics file is somebody else's, or cannot be read.
    """
    problems: list[str] = []
    line = _surviving(run, directory, names, problems)
    return History(curves_of(line, names, keep_superseded=keep_superseded), tuple(problems))


def read_rows(run: Run, directory: RunDir) -> list[Segment]:
    """When a run has finished its steps, without what was rolled back: rows that have no metrics.

    Args:
        run: The run, with its attempts.
        directory: Its directory.

    Raises:
        RunUnreadable: A metrics file is somebody else's, or cannot be read.
    """
    return _surviving(run, directory, (), []).kept


def _surviving(run: Run, directory: RunDir, names: Collection[str] | None, problems: list[str]) -> SurvivingLine:
    """What a run has logged of these metrics; ``problems`` receives what cannot be read."""
    files = [file for file in journal_files(directory, problems) if file.metrics_of is not None]
    blocks = read_blocks(RunsRoot(directory.path.parent).history(run.id), files, names, ended=run.ended)
    line = SurvivingLine()
    for attempt in run.attempts:
        line.add_attempt(start_of(attempt), blocks.get(attempt.key, ()))
    return line


def read_blocks(
    path: Path, files: Sequence[JournalFile], names: Collection[str] | None = None, *, ended: bool = False
) -> dict[str, list[Block]]:
    """The lines of metrics files, by the name of the attempt's directory.

    Args:
        path: The history of the run, which need not exist.
        files: The metrics files of the run.
        names: The metrics to read; None: all.
        ended: Whether the run has ended, so that hardly anything will be added.

    Raises:
        RunUnreadable: A metrics file is somebody else's, or cannot be read.
    """
    result: dict[str, list[Block]] = {str(file.metrics_of): [] for file in files}
    ends = dict.fromkeys(result, 0)
    size = 0
    with contextlib.suppress(OSError, PathError), os.fdopen(open_checked(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Whatever a damaged archive makes zipfile raise, it is made anew.
        with contextlib.suppress(Exception), ZipFile(file) as archive:
            stored = _stored(archive, files)
            result = {key: [_load(archive, each, names) for each in stored.get(key, ())] for key in result}
            ends |= {key: blocks[-1].end for key, blocks in stored.items() if key in result}
    unread = [(each, ends[str(each.metrics_of)]) for each in files if ends[str(each.metrics_of)] < each.size]
    is_enough = sum(each.size - begin for each, begin in unread) >= (_LEAST_BYTES_ENDED if ended else _LEAST_BYTES)
    with contextlib.ExitStack() as stack:
        target = _open_for_writing(stack, path, size, is_new=not any(ends.values())) if is_enough else None
        for each, begin in unread:
            for lines in read_metric_lines(each, begin, length=_PIECE_BYTES):
                # The last line may not be complete yet.
                if lines.end <= begin:
                    continue
                if target is not None:
                    target = _append(target, each, (begin, lines.end), lines.block)
                block = lines.block
                chosen_columns = {
                    name: column for name, column in block.columns.items() if names is None or name in names
                }
                result[str(each.metrics_of)].append(Block(block.steps, block.times, chosen_columns))
                begin = lines.end
    return result


class _Stored(NamedTuple):
    """A block in an archive, whose members are its ``number`` with the names of arrays.

    ``key``: the directory of the attempt whose lines these are, from byte ``begin`` of its metrics to ``end``;
    ``tail``: the CRC of the last of these bytes; ``even``: the first step, the distance of equidistant steps, and their
    number; ``columns``: each metric, and whether it has a value in each row.
    """

    number: int
    key: str
    begin: int
    end: int
    tail: int
    even: Sequence[int] | None
    columns: Sequence[tuple[str, bool]]


def _stored(archive: ZipFile, files: Sequence[JournalFile]) -> dict[str, list[_Stored]]:
    """The blocks of an archive, by the directory of their attempt, if they are the lines of metrics ``files``.

    There are none of another version.
    """
    stored: dict[str, list[_Stored]] = {}
    for name in archive.namelist():
        if name.endswith(".json"):
            version, *content = json.loads(archive.read(name))
            if version == _VERSION:
                block = _Stored(*content)
                stored.setdefault(block.key, []).append(block)
    for file in files:
        blocks = stored.get(str(file.metrics_of), ())
        ends = [0, *(block.end for block in blocks)]
        # A writer may have been killed between two blocks, and a metrics file may have been replaced.
        if [block.begin for block in blocks] != ends[:-1] or ends[-1] > file.size:
            return {}
        if blocks and _tail(file, ends[-1]) != blocks[-1].tail:
            return {}
    return stored


def _tail(file: JournalFile, end: int) -> int:
    begin = max(0, end - _TAIL_BYTES)
    return zlib.crc32(read_bytes(file, begin, end - begin))


def _load(archive: ZipFile, stored: _Stored, names: Collection[str] | None) -> Block:
    """A block with the metrics of these ``names``; None: all."""

    def read(kind: str, name: str) -> array[Any]:
        return array(kind, archive.read(f"{stored.number}.{name}"))

    columns = {
        name: MetricColumn(read("d", f"{place}.values"), None if is_full else read("i", f"{place}.rows"))
        for place, (name, is_full) in enumerate(stored.columns)
        if names is None or name in names
    }
    steps: Sequence[int]
    if stored.even is None:
        steps = read("q", "steps")
    else:
        first, distance, count = stored.even
        steps = range(first, first + distance * count, distance)
    return Block(steps, read("d", "times"), columns)


def _open_for_writing(stack: contextlib.ExitStack, path: Path, size: int, *, is_new: bool) -> ZipFile | None:
    """The archive, to append to; None if that is not possible now, for example since another process does.

    ``size``: how large it was when it was read, in bytes. ``is_new``: nothing of it is used.
    """
    with contextlib.suppress(Exception):  # as above
        make_directory(path.parent, private=True)
        if stack.enter_context(locked(path.with_name(".lock"), wait=False)) is None:
            return None
        # What cannot be written completely, as it shows when it is closed, is made anew by the next command.
        stack.enter_context(contextlib.suppress(OSError))
        file = stack.enter_context(os.fdopen(open_checked(path, os.O_RDWR | os.O_CREAT), "r+b"))
        # Another process has appended since it was read: these lines would be there twice.
        if os.fstat(file.fileno()).st_size != size:
            return None
        if is_new:
            file.truncate()
        return stack.enter_context(ZipFile(file, "w" if is_new else "a"))
    return None


def _append(archive: ZipFile, file: JournalFile, span: tuple[int, int], block: Block) -> ZipFile | None:
    """Append a block of lines; returns None if no further one can be, for example since the disk is full.

    ``span``: where the lines begin in the metrics ``file``, and where they end, in bytes.
    """
    number = len(archive.namelist())
    steps = array("q", block.steps)
    first, distance = (steps[0], steps[1] - steps[0]) if len(steps) > 1 else (0, 0)
    # Equidistant steps take no room.
    is_even = distance > 0 and steps == array("q", range(first, first + distance * len(steps), distance))
    arrays = {"times": array("d", block.times)} | ({} if is_even else {"steps": steps})
    for place, column in enumerate(block.columns.values()):
        arrays[f"{place}.values"] = array("d", column.values)
        if column.rows is not None:
            arrays[f"{place}.rows"] = array("i", column.rows)
    columns = [(name, column.rows is None) for name, column in block.columns.items()]
    even = (first, distance, len(steps)) if is_even else None
    stored = _Stored(number, str(file.metrics_of), *span, _tail(file, span[1]), even, columns)
    try:
        for name, values in arrays.items():
            archive.writestr(f"{number}.{name}", values.tobytes())
        # The description last: the arrays of a writer that was killed are nobody's.
        archive.writestr(f"{number}.json", json.dumps([_VERSION, *stored]))
    except OSError:
        return None
    return archive
