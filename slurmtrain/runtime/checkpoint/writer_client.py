"""A rank's side of the process that writes for it: memory that both share, orders and answers."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import subprocess
import sys
from typing import Any

import torch

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.writer_process import IGNORED
from slurmtrain.runtime.job.environment import environment_of_writer
from slurmtrain.system.process import block_signals

_PAGE = mmap.PAGESIZE
# Memory that is shared with a new process is made this much larger than asked for, since states grow by a little.
_SPARE = 1 << 20
_LAST_MOMENT_S = 5.0


class WriterGone(CheckpointError):
    """The process that writes for this rank has ended: killed, perhaps for want of memory."""


class ShardWriter:
    """The process that writes this rank's part of checkpoints; started when it is first needed, and again if it died.

    Orders are obeyed one after the other. Of each, :meth:`poll` or :meth:`wait` gives the answer, in the same order.
    """

    def __init__(self) -> None:
        # Anonymous memory, not /dev/shm, which is small in many containers; the kernel frees it with the last process.
        self._handle = os.memfd_create("slurmtrain-checkpoint", os.MFD_CLOEXEC)
        self._bytes = 0
        self._memory: torch.Tensor | None = None
        self._pinned = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._received = b""
        self._unanswered = 0
        self._number = 0

    @property
    def busy(self) -> bool:
        """Whether anything that was ordered is unanswered."""
        return self._unanswered > 0

    @property
    def memory_bytes(self) -> int:
        """How much memory is shared."""
        return self._bytes

    def memory(self, size: int) -> torch.Tensor:
        """The shared memory as a flat uint8 tensor of at least ``size`` bytes; no write may be unanswered."""
        if self._memory is None or size > self._bytes:
            self._grow(-(-(size + _SPARE) // _PAGE) * _PAGE)
        assert self._memory is not None
        return self._memory

    def _grow(self, size: int) -> None:
        self._unpin()
        self._memory = None
        os.ftruncate(self._handle, size)
        self._memory = torch.frombuffer(mmap.mmap(self._handle, size), dtype=torch.uint8)
        self._bytes = size

    def pin(self) -> None:
        """Let the GPU copy into the memory directly; where CUDA refuses, copies are slower and nothing else."""
        if self._memory is None or self._pinned:
            return
        error = _cudart().cudaHostRegister(self._memory.data_ptr(), self._bytes, 0)
        self._pinned = int(error) == 0

    def _unpin(self) -> None:
        if self._pinned and self._memory is not None:
            _cudart().cudaHostUnregister(self._memory.data_ptr())
        self._pinned = False

    # --- orders and answers -----------------------------------------------------------------------------------------

    def order(self, verb: str, **arguments: Any) -> int:
        """Send an order; the process is started where there is none. Returns its number, which its answer has too.

        Raises WriterGone.
        """
        ours = self._ensure()
        self._number += 1
        try:
            ours.sendall(json.dumps({"do": verb, "number": self._number, **arguments}).encode() + b"\n")
        except OSError as error:
            raise self._gone() from error
        self._unanswered += 1
        return self._number

    def poll(self) -> dict[str, Any] | None:
        """The next answer, if it is there. Raises WriterGone."""
        return self._answer(0.0)

    def wait(self) -> dict[str, Any]:
        """The next answer, however long it takes. Raises WriterGone."""
        answer = self._answer(None)
        assert answer is not None
        return answer

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send an order and wait for its answer; nothing may be unanswered. Raises WriterGone."""
        assert not self._unanswered
        self.order(verb, **arguments)
        return self.wait()

    def _answer(self, timeout: float | None) -> dict[str, Any] | None:
        """``timeout``: in milliseconds; None waits."""
        assert self._unanswered, "nothing was ordered"
        while b"\n" not in self._received:
            if self._socket is None:
                raise self._gone()
            ready = select.poll()
            ready.register(self._socket, select.POLLIN)
            if not ready.poll(timeout):
                return None
            try:
                more = self._socket.recv(1 << 16)
            except OSError as error:
                raise self._gone() from error
            if not more:
                raise self._gone()
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        self._unanswered -= 1
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ensure(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None and not self._unanswered:
            self._end()
        if self._socket is not None:
            return self._socket
        ours, theirs = socket.socketpair()
        handles = (self._handle, theirs.fileno())
        command = [sys.executable, "-P", "-m", "slurmtrain.runtime.checkpoint.writer_process", *map(str, handles)]
        # Its standard streams stay the rank's: what it prints should it fail belongs into the rank's log.
        # What it is to ignore is blocked from its beginning on: Slurm may send it before Python has begun there.
        with block_signals(IGNORED):
            self._process = subprocess.Popen(
                command, pass_fds=handles, stdin=subprocess.DEVNULL, env=environment_of_writer(), start_new_session=True
            )
        theirs.close()
        self._socket, self._received, self._unanswered = ours, b"", 0
        return ours

    def _gone(self) -> WriterGone:
        if self._process is not None:
            # Its side is closed, so it is as good as gone; how it went shows in a moment.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_MOMENT_S)
            self._process.kill()
        code = self._end()
        return WriterGone(f"the process that writes checkpoints has ended ({_words(code)})")

    def _end(self, *, wait: bool = True) -> int | None:
        """Let go of the process, which ends when it has done what it is at; returns its exit code."""
        process, self._process = self._process, None
        if self._socket is not None:
            self._socket.close()
        self._socket, self._received, self._unanswered = None, b"", 0
        return process.wait() if process is not None and wait else None

    def close(self, *, wait: bool = True) -> None:
        """End the process, when it has done what was ordered, and free the memory. ``wait``: until it has ended."""
        self._end(wait=wait)
        self._unpin()
        self._memory = None
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _words(code: int | None) -> str:
    if code is None:
        return "it is not known why"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
