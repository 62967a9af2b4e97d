"""The key `strategy.mixed_precision`: one precision for all processes, or one by the hardware of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurmtrain.model.spec.kinds import Entries, KeyPath, Report, choice, suggestion

BF16, FP16, FP32 = "bf16", "fp16", "fp32"
# The precision of each process by its hardware.
AUTO = "auto"
# Hardware without an entry of its own has this one.
DEFAULT = "default"
MixedPrecision = str | Mapping[str, str] | None


def precision_on(mixed: MixedPrecision, hardware: str, *, has_bf16: bool) -> str:
    """The precision that a process computes in: bf16, fp16 or fp32.

    Args:
        mixed: The key of the spec. By `auto` it is bf16 if the hardware has it, else fp16; in a mapping the longest
            part of the hardware's name counts.
        hardware: The name of the process's GPU, or CPU.
        has_bf16: Whether it computes in bf16 without emulating it.
    """
    if mixed == AUTO:
        return BF16 if has_bf16 else FP16
    if mixed is None or isinstance(mixed, str):
        return mixed or FP32
    names = [name for name in mixed if name != DEFAULT and name.lower() in hardware.lower()]
    return mixed[max(names, key=len, default=DEFAULT)]


def is_by_hardware(mixed: MixedPrecision) -> bool:
    """Whether processes may have different precisions."""
    return mixed == AUTO or isinstance(mixed, Mapping)


def may_be(mixed: MixedPrecision, precision: str) -> bool:
    """Whether a process may compute in a ``precision``."""
    return mixed in (precision, AUTO) if isinstance(mixed, str | None) else precision in mixed.values()


def _check_hardware(name: str) -> None:
    if not name.strip():
        raise ValueError("expected a part of the name of a GPU, 'CPU', or 'default', found a blank text")


_FOR_ALL = choice(BF16, FP16, AUTO)
_BY_HARDWARE = Entries(choice(BF16, FP16, FP32), "mapping", _check_hardware)


@dataclass(frozen=True, slots=True)
class MixedPrecisionKind:
    """The value of the key, as any kind reads and writes it."""

    @property
    def text(self) -> str:
        """As :attr:`Kind.text`."""
        return "one of `bf16`, `fp16`, `auto`, or mapping, or null"

    def read(self, value: object, at: KeyPath, report: Report) -> MixedPrecision:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if not isinstance(value, Mapping):
            return None if value is None else str(_FOR_ALL.read(value, at, report))
        precisions = _BY_HARDWARE.read(value, at, report)
        if DEFAULT not in precisions:
            hint = next(filter(None, (suggestion(name, [DEFAULT]) for name in precisions)), "")
            report(at, f"expected an entry 'default', for hardware that no other one is for{hint}")
        return precisions

    def write(self, value: MixedPrecision) -> object:
        """As :meth:`Kind.write`."""
        return dict(value) if isinstance(value, Mapping) else value
