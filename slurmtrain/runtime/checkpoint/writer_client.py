"""A rank's interface to the process that writes for it: shared memory, orders and answers."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

import torch

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.writer_process import IGNORED
from slurmtrain.runtime.environment.variables import environment_of_helper
from slurmtrain.system.interpreter import own_python
from slurmtrain.system.process import block_signals

_PAGE = mmap.PAGESIZE
# Shared memory is made this much larger than requested, since states grow by a little.
_SPARE = 1 << 20
# How long to wait for the exit code of a writer that has closed its end of the socket, in seconds.
_LAST_MOMENT_S = 5.0


class WriterGone(CheckpointError):
    """The process that writes for this rank has ended: killed, perhaps because memory ran out."""


class ShardWriter:
    """The process that writes this rank's part of checkpoints; started when first needed, and restarted if it died.

    Orders are executed one after another; :meth:`poll` and :meth:`wait` return their answers in the same order.
    """

    def __init__(self, inherited: Sequence[int] = ()) -> None:
        """``inherited``: descriptors, besides its own, that the process gets under the same numbers."""
        self._inherited = tuple(inherited)
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
        """Whether any order is unanswered."""
        return self._unanswered > 0

    @property
    def memory_bytes(self) -> int:
        """The size of the shared memory, in bytes."""
        return self._bytes

    def memory(self, size: int) -> torch.Tensor:
        """The shared memory as a flat uint8 tensor of at least ``size`` bytes. No write order may be unanswered."""
        if self._memory is None or size > self._bytes:
            self._unpin()
            self._memory = None
            size = -(-(size + _SPARE) // _PAGE) * _PAGE
            os.ftruncate(self._handle, size)
            self._memory = torch.frombuffer(mmap.mmap(self._handle, size), dtype=torch.uint8)
            self._bytes = size
        return self._memory

    def pin(self) -> None:
        """Let the GPU copy into the memory directly. If CUDA refuses, copies are merely slower."""
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
        """Send an order, starting the process if necessary. Returns the order's number, which its answer repeats.

        Raises WriterGone.
        """
        # One that died with orders unanswered is left for _answer() to notice: somebody waits for these.
        if self._process is not None and self._process.poll() is not None and not self._unanswered:
            self._end()
        if self._socket is None:
            ours, theirs = socket.socketpair()
            own = (self._handle, theirs.fileno())
            command = own_python("-P", "-m", "slurmtrain.runtime.checkpoint.writer_process", *map(str, own))
            # It inherits the rank's standard output and error: its last messages when it fails belong in the rank's
            # log. Signals that it ignores are blocked from the start: Slurm may send them before Python runs there.
            with block_signals(IGNORED):
                self._process = subprocess.Popen(
                    command,
                    pass_fds=(*own, *self._inherited),
                    stdin=subprocess.DEVNULL,
                    env=environment_of_helper(),
                    start_new_session=True,
                )
            # As long as this process had the other end, too, it would never read that the writer is gone.
            theirs.close()
            self._socket, self._received, self._unanswered = ours, b"", 0
        self._number += 1
        try:
            self._socket.sendall(json.dumps({"do": verb, "number": self._number, **arguments}).encode() + b"\n")
        except OSError as error:
            raise self._gone() from error
        self._unanswered += 1
        return self._number

    def poll(self) -> dict[str, Any] | None:
        """The next answer; None if it is not there yet. Raises WriterGone."""
        return self._answer(0.0)

    def wait(self) -> dict[str, Any]:
        """The next answer, however long it takes. Raises WriterGone."""
        answer = self._answer(None)
        assert answer is not None
        return answer

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send an order and wait for its answer. No earlier order may be unanswered. Raises WriterGone."""
        assert not self._unanswered
        self.order(verb, **arguments)
        return self.wait()

    def _answer(self, timeout: float | None) -> dict[str, Any] | None:
        """The next answer, or None after ``timeout`` milliseconds; without a timeout it waits. Raises WriterGone."""
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

    def _gone(self) -> WriterGone:
        if self._process is not None:
            # Its end of the socket is closed, so it is ending; its exit code follows in a moment.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_MOMENT_S)
            self._process.kill()
        code = self._end()
        ending = "the cause is unknown" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            ending = f"killed by signal {-code}"
        return WriterGone(f"the process that writes checkpoints has ended ({ending})")

    def _end(self, *, wait: bool = True) -> int | None:
        """Detach from the process, which ends after its current order. ``wait``: until it has, for its exit code."""
        process, self._process = self._process, None
        if self._socket is not None:
            self._socket.close()
        self._socket, self._received, self._unanswered = None, b"", 0
        return process.wait() if process is not None and wait else None

    def close(self, *, wait: bool = True) -> None:
        """Let the process end once it has executed all orders, and free the memory. ``wait``: until it has ended."""
        self._end(wait=wait)
        self._unpin()
        self._memory = None
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
