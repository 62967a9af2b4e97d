"""Figures of a step: how long steps take, what of them is communication, and what GPUs could compute. Pure."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurmtrain.model.experiment.strategy import BF16, FP16, FP32

# So many durations are kept, or half of it: 32 kB, from which quantiles have three digits.
_MOST = 4096


class Durations:
    """How long something took, again and again: all of it, until that is much; then every second one, every fourth."""

    def __init__(self) -> None:
        self.total_s = 0.0
        """All of them together, in seconds."""
        self.count = 0
        """How many there were."""
        self._kept = array("d")
        self._stride = 1

    def add(self, seconds: float) -> None:
        """Note one more."""
        self.total_s += seconds
        self.count += 1
        if self.count % self._stride == 0:
            self._kept.append(seconds)
            if len(self._kept) >= _MOST:
                # Those that stay are of the numbers that the doubled stride keeps.
                self._kept = self._kept[1::2]
                self._stride *= 2

    @property
    def mean(self) -> float | None:
        """The mean; None: there was none."""
        return self.total_s / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """What this ``share`` of them, from 0 to 1, did not exceed; None: there was none."""
        return quantile(self._kept, share)


def quantile(values: Iterable[float], share: float) -> float | None:
    """The least of some ``values`` that this ``share`` of them, from 0 to 1, does not exceed; None: there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


# --- communication ----------------------------------------------------------------------------------------------------
# When something began and ended, on one clock.
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class RecordedActivity:
    """What a process and its GPU did in some steps.

    ``gpu_collectives``: kernels that exchange data with other ranks. ``cpu_collectives``: the same through gloo, from
    the moment it began. ``work``: everything else, kernels or, without a GPU, operators. ``steps``: the steps.
    """

    gpu_collectives: Sequence[Interval]
    cpu_collectives: Sequence[Interval]
    work: Sequence[Interval]
    steps: Sequence[Interval]


def communication_share(activity: RecordedActivity) -> float | None:
    """The part of steps, from 0 to 1, while a rank communicated and did nothing else; None: that is not known.

    It includes the wait for ranks that come later. What work hides costs no time.
    """
    total = sum(end - begin for begin, end in activity.steps)
    collectives = [*activity.gpu_collectives, *activity.cpu_collectives]
    if total <= 0 or not collectives:
        return None
    work = merge_intervals(activity.work)
    # A GPU runs behind the process that feeds it. What gloo does between steps is the vote of the ranks, not theirs.
    exposed = subtract(merge_intervals(activity.gpu_collectives), work)
    exposed += within(subtract(merge_intervals(activity.cpu_collectives), work), merge_intervals(activity.steps))
    return min(1.0, sum(end - begin for begin, end in merge_intervals(exposed)) / total)


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in ``intervals`` that are in order and do not overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def subtract(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What is in ``intervals`` and not in ``others``; both as :func:`merge_intervals` returns them."""
    rest: list[Interval] = []
    first = 0
    for begin, end in intervals:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        for place in range(first, len(others)):
            if others[place][0] >= end:
                break
            if others[place][0] > begin:
                rest.append((begin, others[place][0]))
            begin = max(begin, others[place][1])
        if begin < end:
            rest.append((begin, end))
    return rest


def within(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What is in ``intervals`` and in ``others``; both as :func:`merge_intervals` returns them."""
    return subtract(intervals, subtract(intervals, others))


# --- what GPUs could compute ------------------------------------------------------------------------------------------

TF32 = "tf32"
PRECISIONS = (BF16, FP16, TF32, FP32)
# TFLOP/s of matrix products of dense matrices, by names that the driver gives GPUs: bf16, fp16 (each with sums in fp32
# where that differs), tf32, fp32; None: the GPU has no such units. From NVIDIA's data sheets (B200, GB200, H200, H100,
# GH200, H20, A100, A40, A30, A10, L40S, L40, L4, V100, T4, P100; halved where these count sparse matrices), its
# whitepapers on the architectures GA102, AD102 and GB202 (RTX), and AMD's data sheets (Instinct; a device of an MI250X
# is half a card). The first name that matches counts; parts of GPUs (MIG) have none.
_PEAKS: Sequence[tuple[str, tuple[float | None, float | None, float | None, float | None]]] = (
    (r"GB200\b", (2500, 2500, 1250, 80)),
    (r"B200\b", (2250, 2250, 1125, 75)),
    (r"H200 NVL\b", (835.5, 835.5, 417.5, 60)),
    (r"H200\b", (989.4, 989.4, 494.7, 66.9)),
    (r"H[18]00 PCIe\b", (756, 756, 378, 51.2)),
    (r"H100 NVL\b", (835.5, 835.5, 417.5, 60)),
    (r"(?:GH200|H[18]00)\b", (989.4, 989.4, 494.7, 66.9)),
    (r"H20\b", (148, 148, 74, 44)),
    (r"A[18]00\b", (312, 312, 156, 19.5)),
    (r"A40\b", (149.7, 149.7, 74.8, 37.4)),
    (r"A30\b", (165, 165, 82, 10.3)),
    (r"A10\b", (125, 125, 62.5, 31.2)),
    (r"L40S\b", (362.05, 362.05, 183, 91.6)),
    (r"L40\b", (181.05, 181.05, 90.5, 90.5)),
    (r"L4\b", (121, 121, 60, 30.3)),
    (r"RTX 6000 Ada\b", (364.2, 364.2, 182.1, 91.1)),
    (r"RTX A6000\b", (154.8, 154.8, 77.4, 38.7)),
    (r"RTX 5090$", (209.5, 209.5, 104.8, 104.8)),
    (r"RTX 4090$", (165.2, 165.2, 82.6, 82.6)),
    (r"RTX 3090$", (71, 71, 35.6, 35.6)),
    (r"V100S\b", (None, 130, None, 16.4)),
    (r"V100-PCIE\b", (None, 112, None, 14)),
    (r"V100\b", (None, 125, None, 15.7)),
    (r"T4\b", (None, 65, None, 8.1)),
    (r"P100-PCIE\b", (None, 18.7, None, 9.3)),
    (r"P100\b", (None, 21.2, None, 10.6)),
    (r"MI3(?:00|25)X\b", (1307.4, 1307.4, 653.7, 163.4)),
    (r"MI250X\b", (191.5, 191.5, None, 47.9)),
)


def peak_flops(gpu: str, precision: str) -> float | None:
    """How many floating point operations a GPU can do in a second at most, in products of dense matrices.

    Args:
        gpu: Its name, as the driver and torch have it, such as ``NVIDIA H100 80GB HBM3``.
        precision: One of :data:`PRECISIONS`.

    Returns:
        The number; None for a GPU that is not known, for a part of one, and in a precision that it has no units for.
    """
    if re.search(r"\bMIG\b", gpu):
        return None
    peaks = next((peaks for name, peaks in _PEAKS if re.search(rf"\b(?:{name})", gpu)), (None,) * len(PRECISIONS))
    peak = peaks[PRECISIONS.index(precision)]
    return None if peak is None else peak * 1e12
