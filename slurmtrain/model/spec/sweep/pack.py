"""Packs: several runs of a sweep that share one job on one node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.spec.kinds import KeyPath, Report, suggestion, whole_number
from slurmtrain.model.spec.resources.section import ResourcesSpec
from slurmtrain.model.spec.sbatch import named_options

_KEYS = ("runs", "share_gpu")


@dataclass(frozen=True, slots=True)
class Pack:
    """How runs share a job. ``runs``: how many; ``share_gpu``: whether all of them use the GPUs of one."""

    runs: int
    share_gpu: bool = False

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {"runs": self.runs, "share_gpu": self.share_gpu}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Pack:
        """Read what :meth:`to_dict` returned."""
        return cls(max(1, int(plain["runs"])), bool(plain.get("share_gpu")))

    @property
    def gpu_sets(self) -> int:
        """How many times the GPUs of one run the job has."""
        return 1 if self.share_gpu else self.runs


def read_pack(value: Any, report: Report) -> Pack | None:
    """The value of ``sweep.pack``: a number of runs, or a mapping; None if there is none, or after a mistake.

    Args:
        value: the value.
        report: receives what is wrong, with its place below ``sweep``.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        runs = _read_runs(value, ("pack",), report)
        return None if runs is None else Pack(runs)
    for key in value:
        if key not in _KEYS:
            report(("pack", str(key)), f"there is no key {key!r} here{suggestion(str(key), _KEYS)}")
    runs = _read_runs(value.get("runs"), ("pack", "runs") if "runs" in value else ("pack",), report)
    share_gpu = value.get("share_gpu", False)
    if not isinstance(share_gpu, bool):
        report(("pack", "share_gpu"), f"expected true or false, found {share_gpu!r}")
        return None
    return None if runs is None else Pack(runs, share_gpu)


def _read_runs(value: Any, at: KeyPath, report: Report) -> int | None:
    try:
        runs: int = whole_number(2).parse(value)
    except ValueError as error:
        report(at, f"{error}: how many runs share a job")
        return None
    return runs


def packing_problem(resources: ResourcesSpec, pack: Pack, slurm: Mapping[str, Any]) -> str:
    """Why a run cannot be packed, as a sentence without a full stop; empty if it can.

    Args:
        resources: what the run requests.
        pack: how it would share a job.
        slurm: the spec's section of that name.
    """
    if resources.allocated.max > 1:
        return (
            "runs of several nodes cannot share a job: set resources.nodes to 1 (and no spare nodes), or remove "
            "sweep.pack"
        )
    if resources.bind:
        return "sweep.pack: runs that share a job are bound to no CPUs: remove resources.bind, or sweep.pack"
    if pack.share_gpu and not resources.gpus_per_node:
        return "sweep.pack.share_gpu: these runs have no GPUs: set resources.gpus_per_node, or remove share_gpu"
    if "gres" in named_options(slurm) and not pack.share_gpu:
        return "slurm.gres cannot be given to each run of a pack: use resources.gpus_per_node"
    return ""


def jobs_of(runs: int, pack: Pack) -> int:
    """How many jobs so many runs that request the same are."""
    return math.ceil(runs / pack.runs)
