"""Heartbeats of a node's ranks, for its agent: in shared memory that does not outlive them.

The agent creates a :class:`Board` without a name in any file system (memfd_create(2)) and passes its path below /proc
to the ranks, which the same user may open. Each rank has a record there, which its :class:`Pulse` writes. A beat is a
store to memory: no system call, no lock, and nothing that a rank could wait for. What a pause is for, and how long it
may take, is in a second record, so that the beats of steps stay small.

A record has a checksum. If it is read while being written, the checksum does not match, on any processor, and it is
read again. If the mismatch persists, because the rank was stopped or killed halfway through a beat, the previous beat
stays valid.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
import zlib
from dataclasses import replace
from typing import Any

from slurmtrain.model.diagnosis.hang import NEVER, PAUSE_S, Beat, Phase

__all__ = ["Beat", "Board", "Phase", "Pulse"]

# Step, phase, pid, and times: at, step_s, own_s, save_s; then the checksum of these. Adler-32, since a CRC looks up
# each byte in a table, which training has driven out of the processor's caches: a third of what a beat costs.
_BODY = struct.Struct("<qIIdddd")
_CHECKSUM = struct.Struct("<I")
_USED = _BODY.size + _CHECKSUM.size
# One cache line: ranks do not slow each other down.
_SIZE = 64
_HEADER = b"slurmtrain heartbeat 3\n".ljust(_SIZE, b"\0")
# A pause: its limit in seconds, and its activity, in UTF-8.
_PAUSE = struct.Struct("<d48s")
_RANK_SIZE = 2 * _SIZE
_TRIES = 5


class Board:
    """The agent's side: the beats of all ranks on this node."""

    def __init__(self, count: int) -> None:
        """``count``: the number of ranks on this node. Raises OSError if the kernel has no memory for it."""
        self._count = count
        self._handle = os.memfd_create("slurmtrain-heartbeat")
        size = _offset_of(count)
        os.ftruncate(self._handle, size)
        self._memory = mmap.mmap(self._handle, size)
        self._memory[:_SIZE] = _HEADER
        self._beats = [NEVER] * count
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"
        """The path where ranks of the same user find the board as long as this process lives."""

    def read(self) -> list[Beat]:
        """The last beat of each rank, by local rank."""
        for index in range(self._count):
            self._beats[index] = self._read(index)
        return list(self._beats)

    def reset(self) -> None:
        """Forget all beats, before the ranks of another round start."""
        self._memory[_SIZE:] = bytes(_RANK_SIZE * self._count)
        self._beats = [NEVER] * self._count

    def close(self) -> None:
        """Release the memory; ranks that have it open keep it."""
        self._memory.close()
        os.close(self._handle)

    def _read(self, index: int) -> Beat:
        begin = _offset_of(index)
        record = self._record(begin, _BODY)
        if record is None:
            return self._beats[index]
        if not record:
            return NEVER
        step, phase, pid, at, step_s, own_s, save_s = record
        beat = Beat(step, Phase(phase), at, step_s, own_s, save_s, pid)
        if beat.phase is Phase.PAUSED and (pause := self._record(begin + _SIZE, _PAUSE)):
            return replace(beat, pause_s=pause[0], activity=pause[1].rstrip(b"\0").decode(errors="ignore"))
        return beat

    def _record(self, begin: int, layout: struct.Struct) -> tuple[Any, ...] | None:
        """The record that begins there; empty if none was ever written, None if it is only half written."""
        for _ in range(_TRIES):
            record = self._memory[begin : begin + layout.size + _CHECKSUM.size]
            if not any(record):
                return ()
            body = record[: layout.size]
            if _CHECKSUM.unpack_from(record, layout.size)[0] == zlib.adler32(body):
                return layout.unpack(body)
        return None


class Pulse:
    """A rank's side, which records its activity. Without a board, beats go to memory that is never read."""

    def __init__(self, memory: mmap.mmap | bytearray, index: int) -> None:
        self._memory = memory
        self._begin = _offset_of(index)
        self._end = self._begin + _USED
        self._pid = os.getpid()
        self._save_s = 0.0
        self.phase = Phase.NONE
        """The last phase that was recorded."""

    @classmethod
    def open(cls, path: str | None, index: int) -> Pulse:
        """The pulse of the rank with local rank ``index``, on the board at ``path``. Never raises.

        A board may be unreachable, as in a container with its own process ids; that must not keep the rank from
        training.
        """
        memory: mmap.mmap | None = None
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    memory = mmap.mmap(handle, os.fstat(handle).st_size)
                finally:
                    os.close(handle)
        if memory is not None and memory[:_SIZE] == _HEADER and len(memory) >= _offset_of(index + 1):
            return cls(memory, index)
        return cls(bytearray(_offset_of(1)), 0)

    def beat(self, step: int, phase: Phase, step_s: float = 0.0, own_s: float = 0.0) -> None:
        """Record that ``step`` steps are finished, and the ``phase`` that begins.

        ``step_s``: seconds that a step takes; ``own_s``: the same without waiting for other ranks; 0: not known. Takes
        about a microsecond.
        """
        self.phase = phase
        body = _BODY.pack(step, phase, self._pid, time.monotonic(), step_s, own_s, self._save_s)
        self._memory[self._begin : self._end] = body + _CHECKSUM.pack(zlib.adler32(body))

    def pause(
        self, step: int, activity: str, limit_s: float = PAUSE_S, step_s: float = 0.0, own_s: float = 0.0
    ) -> None:
        """Record that training pauses after ``step`` steps, until the next beat.

        ``activity``: what for; 48 bytes of it are kept. ``limit_s``: how long that may take, in seconds. ``step_s`` and
        ``own_s``: as for :meth:`beat`.
        """
        body = _PAUSE.pack(limit_s, activity.encode(errors="replace")[:48])
        begin = self._begin + _SIZE
        self._memory[begin : begin + len(body) + _CHECKSUM.size] = body + _CHECKSUM.pack(zlib.adler32(body))
        # Only now: whoever reads the phase reads the record of the pause next.
        self.beat(step, Phase.PAUSED, step_s, own_s)

    def saved(self, took_s: float) -> None:
        """Record that a save took ``took_s`` seconds; the next beats carry the longest so far."""
        self._save_s = max(self._save_s, took_s)


def _offset_of(index: int) -> int:
    """Where the records of the rank with this local rank begin, in bytes."""
    return _SIZE + _RANK_SIZE * index
