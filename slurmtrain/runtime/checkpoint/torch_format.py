"""What torch.save writes around the bytes of a tensor, so that all that remains to do is to copy the bytes into place.

A torch.distributed.checkpoint file is a sequence of ``torch.save`` outputs. For a dense tensor that is a prefix, the
tensor's bytes in row-major order, and a suffix. Both depend only on its type and shape, except for checksums, which
``torch.load`` does not check (here XXH3-128 of the whole file replaces them).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import IO, Any, cast

import torch


@dataclass(frozen=True, slots=True)
class Frame:
    """``prefix`` + ``size`` bytes of data + ``suffix`` is what ``torch.load`` reads as a tensor."""

    prefix: bytes
    size: int
    suffix: bytes

    @property
    def length(self) -> int:
        """The length of all three together, in bytes."""
        return len(self.prefix) + self.size + len(self.suffix)


def can_be_framed(value: object) -> bool:
    """Whether a value is a plain dense tensor; others (sparse, quantized, subclasses) go through ``torch.save``."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and cast(torch.Tensor, value).layout is torch.strided
        and not cast(torch.Tensor, value).is_quantized
    )


@functools.lru_cache(maxsize=4096)
def frame_of(dtype: torch.dtype, shape: torch.Size) -> Frame:
    """The frame of a dense tensor on the CPU."""
    sink = _Sink()
    # Documented behaviour: instead of writing a tensor's bytes, it seeks forward past them.
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], sink))
    return Frame(bytes(sink.before), sink.skipped, bytes(sink.after))


class _Sink:
    """A file object that keeps what is written before and after a single gap."""

    def __init__(self) -> None:
        self.before = bytearray()
        self.skipped = 0
        self.after = bytearray()
        self._moved = False

    def write(self, data: Any) -> int:
        (self.after if self._moved else self.before).extend(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != 1 or self._moved:
            raise OSError("torch.save no longer writes a tensor as bytes between a prefix and a suffix")
        self._moved = True
        self.skipped = offset
        return len(self.before) + offset

    def flush(self) -> None:
        pass
