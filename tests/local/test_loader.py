"""Runs that load their data through ``run.loader``: each sample once an epoch, whatever happens to them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.site import SCRIPTS, Site, until

SCRIPT = SCRIPTS / "samples.py"
STEPS, SAMPLES, BATCHES_OF_AN_EPOCH = 30, 50, 5
Samples = dict[int, list[list[Any]]]


def noted(folder: Path, attempt: int) -> Iterator[Samples]:
    """What each rank of an attempt has noted: the samples of each step, with their epoch and the number they drew."""
    for path in folder.glob(f"samples-{attempt}-*.jsonl"):
        yield dict(map(json.loads, path.read_text().split("\n")[:-1]))


def samples_of(folder: Path, attempt: int) -> Samples:
    """The samples of the steps that all ranks of an attempt have trained on."""
    ranks = list(noted(folder, attempt))
    steps = set.intersection(*(set(own) for own in ranks))
    return {step: sorted(sample for own in ranks for sample in own[step]) for step in sorted(steps)}


def step_of(folder: Path, attempt: int) -> int:
    return max((max(own, default=0) for own in noted(folder, attempt)), default=0)


def weights(folder: Path) -> list[float]:
    return [float(value) for value in json.loads((folder / "weights.json").read_text())]


@pytest.mark.slow
def test_killed_and_stopped_in_the_middle_of_epochs_on_other_numbers_of_ranks_each_step_has_its_samples(
    site: Site, tmp_path: Path
) -> None:
    alone, folder = tmp_path / "alone", tmp_path / "notes"
    alone.mkdir(), folder.mkdir()
    environment = {**site.environment(), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(SCRIPT), str(alone)], env=environment, check=True, timeout=120)
    undisturbed = samples_of(alone, 1)
    epochs = [sample[:2] for step in undisturbed.values() for sample in step]
    assert sorted(epochs) == [
        [epoch, index] for epoch in range(STEPS // BATCHES_OF_AN_EPOCH) for index in range(SAMPLES)
    ]

    run_id = site.submit(
        site.spec(
            command=f"python {SCRIPT} {folder}",
            params={"steps": STEPS, "step_ms": 50, "workers": 2},
            resources={"procs_per_node": 2},
            checkpoint={"every": {"steps": 3}},
        )
    )
    until(lambda: step_of(folder, 1) >= 7, "step 7")
    site.signal_all(run_id, signal.SIGKILL)
    site.call("resume", run_id, "resources.procs_per_node=3")
    until(lambda: step_of(folder, 2) >= 14, "step 14")
    site.signal_all(run_id, signal.SIGTERM)
    until(lambda: not site.processes(run_id), "the end of all processes, workers among them")
    [run] = site.json("resume", run_id, "--wait", "resources.procs_per_node=1", "params.step_ms=0")["runs"]
    assert (run["state"], run["step"]) == ("completed", STEPS)

    attempts = [samples_of(folder, attempt) for attempt in (1, 2, 3)]
    for samples in attempts:
        assert samples == {step: undisturbed[step] for step in samples}
    assert set().union(*attempts) == set(range(STEPS))
    assert min(attempts[2]) == max(attempts[1]) + 1, "a stop loses no step"
    assert weights(folder) == pytest.approx(weights(alone), rel=1e-9)
