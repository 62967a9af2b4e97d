"""The lines of a run's metrics files, as far as possible from its history, followed by new ones.

A history is read by whoever needs it, and grows when enough has been logged since: no process of a job knows it, and no
other command waits for it. A history that does not fit the metrics files any more, since these were replaced, is made
anew.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.history.encoding import HistoryDamaged, encode
from slurmtrain.history.history_file import HistoryFile, StoredBlock, open_history
from slurmtrain.model.metrics.blocks import Block
from slurmtrain.system.files import make_directory
from slurmtrain.system.journal_files import JournalFile, read_bytes, read_metric_lines
from slurmtrain.system.locks import locked

# Lines take many times the memory of their columns.
_PIECE_BYTES = 1 << 20
# Fewer new bytes of metrics are parsed each time: small blocks would take more room, and more time to read.
_LEAST_BYTES = 1 << 16
# Of a run that has ended, what is stored stays as it is.
_LEAST_BYTES_ENDED = 1 << 12
# By so many bytes in front of the end of a block it is recognised whether metrics were replaced.
_TAIL_BYTES = 64


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
    for is_new in (False, True):
        with contextlib.ExitStack() as stack:
            history = _open(stack, path, files, is_new=is_new)
            try:
                return _read(stack, path, history, _Request(files, names, ended))
            except HistoryDamaged:
                continue
    raise AssertionError("a history without blocks is not damaged")


@dataclass(frozen=True, slots=True)
class _Request:
    files: Sequence[JournalFile]
    names: Collection[str] | None
    ended: bool


def _open(stack: contextlib.ExitStack, path: Path, files: Sequence[JournalFile], *, is_new: bool) -> HistoryFile | None:
    """The history, as far as it fits the metrics ``files``; None if there is none. ``is_new``: without its blocks."""
    with contextlib.suppress(OSError, PathError):
        history = open_history(path, writing=False)
        stack.callback(os.close, history.handle)
        if is_new or not all(_fits(history, file) for file in files):
            return HistoryFile(history.handle, size=history.size)
        return history
    return None


def _fits(history: HistoryFile, file: JournalFile) -> bool:
    """Whether the blocks of a metrics file are its lines, without gaps."""
    blocks = [block.header for block in _blocks(history, file)]
    if not blocks:
        return True
    ends = [0, *(header.end for header in blocks)]
    if [header.begin for header in blocks] != ends[:-1] or ends[-1] > file.size:
        return False
    return _tail(file, ends[-1]) == blocks[-1].tail


def _blocks(history: HistoryFile | None, file: JournalFile) -> Sequence[StoredBlock]:
    return () if history is None else history.blocks.get(str(file.metrics_of), ())


def _tail(file: JournalFile, end: int) -> int:
    begin = max(0, end - _TAIL_BYTES)
    return zlib.crc32(read_bytes(file, begin, end - begin))


def _read(
    stack: contextlib.ExitStack, path: Path, history: HistoryFile | None, request: _Request
) -> dict[str, list[Block]]:
    """The blocks of the history, then the blocks of the lines logged since, which are stored."""
    result: dict[str, list[Block]] = {}
    unread: list[tuple[JournalFile, int]] = []
    for file in request.files:
        stored = _blocks(history, file)
        result[str(file.metrics_of)] = [history.load(block, request.names) for block in stored] if history else []
        begin = stored[-1].header.end if stored else 0
        if begin < file.size:
            unread.append((file, begin))
    news = sum(file.size - begin for file, begin in unread)
    is_enough = news >= (_LEAST_BYTES_ENDED if request.ended else _LEAST_BYTES)
    target = _open_for_writing(stack, path, history) if is_enough else None
    for file, begin in unread:
        for end, block in _new_blocks(file, begin):
            if target is not None:
                content = encode(str(file.metrics_of), (begin, end), _tail(file, end), block)
                target = _append(target, content)
            result[str(file.metrics_of)].append(_only(block, request.names))
            begin = end
    return result


def _new_blocks(file: JournalFile, begin: int) -> Iterator[tuple[int, Block]]:
    """Blocks of the lines from byte ``begin`` on, and where each ends."""
    for lines in read_metric_lines(file, begin, length=_PIECE_BYTES):
        if lines.end > begin:
            yield lines.end, lines.block
        begin = lines.end


def _only(block: Block, names: Collection[str] | None) -> Block:
    if names is None or not block.columns.keys() - set(names):
        return block
    return Block(block.steps, block.times, {name: each for name, each in block.columns.items() if name in names})


def _open_for_writing(stack: contextlib.ExitStack, path: Path, before: HistoryFile | None) -> HistoryFile | None:
    """The history, to append to; None if that is not possible now, for example since another process does.

    ``before``: what has been read of it; None: there was none.
    """
    with contextlib.suppress(OSError, PathError):
        make_directory(path.parent, private=True)
        if stack.enter_context(locked(path.with_name(".lock"), wait=False)) is None:
            return None
        history = open_history(path, writing=True)
        stack.callback(os.close, history.handle)
        if history.size != (0 if before is None else before.size):
            return None
        history.end = 0 if before is None else before.end
        history.begin_writing()
        return history
    return None


def _append(history: HistoryFile, content: bytes) -> HistoryFile | None:
    """Append a block; returns None if no further one can be, for example since the disk is full."""
    try:
        history.append(content)
    except OSError:
        return None
    return history
