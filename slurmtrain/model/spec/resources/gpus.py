"""GPUs of a type: ``gpus_per_node: h100:4``, as sbatch's option of that name has it, is a number and a `gpu_type`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurmtrain.model.spec.kinds import KeyPath, Report, Scalar, Section, whole_number

_COUNT, _TYPE = "gpus_per_node", "gpu_type"
# A type is a word of the site's own, as in gres.conf: "h100", "nvidia_a100_80gb_pcie", "1g.5gb".
_NAME = re.compile(r"(?!\d+$)[A-Za-z0-9][\w.+-]*", re.ASCII)
_TYPED = re.compile(r"(?P<type>[^:,]+):(?P<count>\d{1,6})", re.ASCII)


def _parse_count(value: object) -> int:
    # As text with a type, it is divided before this is called.
    if isinstance(value, str) and value.strip().isdecimal():
        raise ValueError(f"expected a whole number, found text ({value!r}); write {int(value)}")
    count: int = whole_number(0).parse(value)
    return count


def _parse_type(value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"expected a type of GPUs as your site calls it, such as h100, found {value!r}")
    return value


GPU_COUNT = Scalar("whole number of at least 0, or with a type, such as `h100:4`", _parse_count)
GPU_TYPE = Scalar("type of GPU", _parse_type)


def parse_gpus(text: str) -> tuple[str, int]:
    """The type and the number in a text such as ``h100:4``. Raises ValueError with what to write instead."""
    bare = re.sub(r"^(gres[/:])?gpu:", "", text.strip())
    match = _TYPED.fullmatch(bare)
    if match is not None and _NAME.fullmatch(match["type"]) and bare == text.strip():
        return match["type"], int(match["count"])
    if "," in bare:
        raise ValueError(
            f"{text!r} has several types of GPUs, and the ranks of a node are alike: write for example "
            f"{bare.partition(',')[0]}; nodes that differ are 'resources.components'"
        )
    if match is not None and _NAME.fullmatch(match["type"]):
        raise ValueError(f"write {bare}, not {text!r}")
    if _NAME.fullmatch(bare):
        raise ValueError(f"{text!r} has no number of GPUs: write {bare}:1 for one of them")
    raise ValueError(f"expected a whole number, or a type and a number such as h100:4, found {text!r}")


@dataclass(frozen=True, slots=True)
class GpuSection(Section):
    """A section with the keys `gpus_per_node` and `gpu_type`, whose first may hold both."""

    def read(self, value: object, at: KeyPath, report: Report) -> object:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        typed = value.get(_COUNT) if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(typed, str) or typed.strip().isdecimal():
            return Section.read(self, value, at, report)
        try:
            kind, count = parse_gpus(typed)
        except ValueError as error:
            report((*at, _COUNT), str(error))
            return Section.read(self, {**value, _COUNT: 0, _TYPE: None}, at, report)
        if value.get(_TYPE) not in (None, kind):
            report((*at, _TYPE), f"'{_COUNT}' has another type, {kind}: leave this out")
        return Section.read(self, {**value, _COUNT: count, _TYPE: kind}, at, report)
