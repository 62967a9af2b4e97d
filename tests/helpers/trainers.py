"""Runs of trainers that people already have, with and without an adapter."""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from helpers.site import Site

SAVE_EVERY = 6


@dataclass(frozen=True)
class Trainer:
    """A trainer that runs are made with.

    ``script``: the test's; ``glob``: its checkpoints; ``resumes_from``: the first version that can load the state of
    an optimizer on more than one CPU rank, where others cannot.
    """

    library: str
    script: str
    glob: str
    resumes_from: str = ""

    def skip_if_missing(self) -> None:
        """Skip the test if the library is not installed, or cannot continue a training on several CPUs."""
        if importlib.util.find_spec(self.library) is None:
            pytest.skip(f"{self.library} is not installed: scripts/bootstrap trainers")
        installed = version(self.library)
        if self.resumes_from and Version(installed) < Version(self.resumes_from):
            pytest.skip(f"{self.library} {installed} cannot resume on several CPUs, {self.resumes_from} can")

    def spec(self, site: Site, *, adapter: bool, steps: int = 30, **more: Any) -> Path:
        """A spec of this trainer, on two ranks; ``more``: params of the script, and keys of the spec."""
        # A crash is none of the faults: it ends the run at once.
        keys: dict[str, Any] = {"requeue": {"max_failures": 0}}
        keys |= {name: more.pop(name) for name in ("resources", "slurm", "requeue", "tracking") if name in more}
        params = {"adapter": adapter, "steps": steps, "save_every": SAVE_EVERY, "step_ms": 100, **more}
        return site.spec(
            self.library,
            script=f"trainers/{self.script}",
            params=params,
            checkpoint={"glob": f"{{checkpoint_dir}}/{self.glob}"},
            **keys,
        )


TRAINERS = {
    "transformers": Trainer("transformers", "hf.py", "checkpoint-*", resumes_from="5.18"),
    "lightning": Trainer("lightning", "pl.py", "*.ckpt"),
    "accelerate": Trainer("accelerate", "accelerated.py", "checkpoint-*"),
    # Not in the extra: it is built when it is installed. With the functions for loops, as it has no adapter.
    "deepspeed": Trainer("deepspeed", "zero.py", "global_step*"),
}


@dataclass(frozen=True)
class Training:
    """The steps that one process of rank 0 has trained: the first, the last, and when."""

    first: int
    last: int
    began: float
    ended: float


def trainings(site: Site, run_id: str) -> list[Training]:
    """What each start of a run has trained, in order; starts that finished no step are left out."""
    path = site.runs / run_id / "trained.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    records = [json.loads(line) for line in lines]
    groups = [list(group) for _, group in itertools.groupby(records, key=lambda record: record["pid"])]
    assert len({group[0]["pid"] for group in groups}) == len(groups), "two trainings at the same time"
    return [Training(group[0]["step"], group[-1]["step"], group[0]["t"], group[-1]["t"]) for group in groups]


def trained_steps(site: Site, run_id: str) -> int:
    """How many steps the newest start has trained; 0 if none has."""
    starts = trainings(site, run_id)
    return starts[-1].last - starts[-1].first + 1 if starts else 0


def lost_steps(site: Site, run_id: str) -> list[int]:
    """How many steps were trained again after each interruption; no step may be left out."""
    starts = trainings(site, run_id)
    lost = [before.last - (after.first - 1) for before, after in itertools.pairwise(starts)]
    assert min(lost, default=0) >= 0, f"steps were left out: {starts}"
    return lost


def weights(site: Site, run_id: str) -> str:
    """The hash of the weights that the run ended with."""
    [digest] = {line.split()[1] for line in site.printed(run_id) if line.startswith("weights ")}
    return digest
