"""Runs whose attempts, interruptions and seconds are known, and what is exported of them."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.simulated_run import ELSEWHERE, SimulatedRun
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.prometheus import exposition_text
from slurmtrain.plugins.prometheus.counters import Counters
from slurmtrain.plugins.prometheus.families import collect

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def write_metered_run(workspace: Workspace, number: int = 1, *, ends: bool = True) -> SimulatedRun:
    """A run on two nodes with four GPUs each: it trained for 10 s, lost the last 5 s of them, and goes on."""
    sim = SimulatedRun(workspace.root.run(f"{number:010d}"), executor="local", job=f"local-{number}")
    sim.created(name="cnn", resources={"nodes": 2, "gpus_per_node": 4})
    sim.submitted(process=ELSEWHERE, partition="spot").later(9).started(nodes=2)
    sim.rank("session", step=0, world_size=8, device="cpu").rank("total", total_steps=20)
    sim.later(4).reached(5, at=sim.now, loss=1.0).saved(5).later(4).reached(10, at=sim.now, loss=0.5)
    sim.ended("preempted", requeued=True).ended("preempted", 1, requeued=True)
    sim.started(restart=1, nodes=2).rank("session", 0, 1, step=5, world_size=8, device="cpu")
    sim.rank("total", 0, 1, total_steps=20).reached(7, 1, loss=0.6)
    return sim.ended("completed", 0, 1).ended("completed", 1, 1) if ends else sim


def export(workspace: Workspace, counters: Counters | None = None, *, per_run: bool = True) -> str:
    """What a new command exports, or a process that has exported before with these ``counters``."""
    again = Workspace(workspace.config, warn=pytest.fail)
    try:
        return exposition_text(collect(again, counters or Counters(), per_run=per_run), {"user": "ada"})
    finally:
        again.close()


def parse(text: str) -> Samples:
    """The samples in Prometheus' text format, without the label ``user``, by its own parser."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("user") == "ada"
            key = sample.name, frozenset(sample.labels.items())
            assert key not in samples, f"{key} twice"
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, /, **labels: Any) -> float:
    """The sum of the samples of one name that have these labels."""
    chosen = [number for (each, own), number in samples.items() if each == name and own >= labels.items()]
    assert chosen, f"no sample {name} {labels}"
    return sum(chosen)
