"""The section `profile` of a spec: what records how the time of steps is spent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from slurmtrain.model.experiment import kinds

TORCH, NSYS = "torch", "nsys"
_EXAMPLE = "write for example [100, 110]"


def _parse_steps(value: Any) -> tuple[int, int]:
    """Two numbers of finished steps, the smaller one first. Raises ValueError."""
    is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(type(each) is int for each in value)
    if not is_pair:
        raise ValueError(f"expected two numbers of steps, found {value!r}; {_EXAMPLE}")
    first, last = value
    if not 0 <= first < last:
        raise ValueError(f"expected two numbers of steps, the smaller one first, found {value!r}; {_EXAMPLE}")
    return first, last


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSpec:
    """A profile of a few steps by torch, or of the whole command by Nsight Systems: `profile: nsys`."""

    SHORTHAND: ClassVar = "tool"
    tool: Annotated[str, kinds.choice(TORCH, NSYS)] = TORCH
    """`torch`: rank 0 and the slowest rank each write a trace of `steps` for Chrome or Perfetto; needs
    `slurmtrain.session()`. `nsys`: the command of each rank runs under `nsys profile`, which must be installed."""
    steps: (
        Annotated[
            tuple[int, int],
            kinds.Scalar("two numbers of steps, such as `[100, 110]`", _parse_steps, list),
        ]
        | None
    ) = None
    """`torch`: the numbers of finished steps when the trace begins and ends."""

    @staticmethod
    def require(written: Mapping[str, Any]) -> None:
        """Raise ValueError unless it is ``written`` which steps torch's profiler traces."""
        if written.get("tool", TORCH) == TORCH and written.get("steps") is None:
            raise ValueError("set 'steps' to the steps that are traced, such as [100, 110]")

    def conflicts(self) -> Iterator[kinds.Conflict]:
        """Keys that contradict each other, and why."""
        if self.tool == NSYS and self.steps is not None:
            yield "steps", "nsys records whole ranks: leave 'steps' out, or 'tool: nsys'"
