"""Real trainers on two ranks, interrupted in every way, with slurmtrain's adapter and without.

Announced stops lose no step with an adapter, and what comes without notice loses what was done since the last save, at
most. No interrupted run counts as completed, no run is given half a checkpoint, and never are there two trainings.
"""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import run_faults
from helpers.rare import THOROUGH
from helpers.site import Site
from helpers.trainers import SAVE_EVERY, TRAINERS, lost_steps, trainings, weights

STEPS = 30
# Otherwise every trainer meets every fault, with and without an adapter.
FAULTS = ("preempted", "killed", "killed in a save", "cancelled")
FEW = {
    ("transformers", "killed in a save", False),
}
CELLS = [cell for cell in itertools.product(TRAINERS, FAULTS, (True, False)) if THOROUGH or cell in FEW]

pytestmark = pytest.mark.slow


class Undisturbed:
    """The weights of runs that nothing happens to, one for each trainer that a test asks for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._weights: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name not in self._weights:
            (self._path / name).mkdir()
            site = Site(self._path / name)
            run_id = site.submit(TRAINERS[name].spec(site, adapter=True, steps=STEPS, step_ms=0), "--wait")
            assert site.status(run_id)["state"] == "completed"
            self._weights[name] = weights(site, run_id)
        return self._weights[name]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


# --- faults -----------------------------------------------------------------------------------------------------------


def kill_in_save(site: Site, run_id: str) -> None:
    directory = site.runs / run_id / "checkpoints"
    run_faults.kill_in_save(site, run_id, lambda: writes(directory))


def writes(directory: Path) -> bool:
    """Whether a checkpoint is being written there."""
    paths = [path for pattern in ("checkpoint-*", "*.ckpt", "global_step*") for path in directory.glob(pattern)]
    return any(path.name.endswith(".tmp") or not is_written(path) for path in paths)


def is_written(path: Path) -> bool:
    """Whether everything is there that the trainer writes last."""
    if path.is_file():
        return zipfile.is_zipfile(path)
    if path.name.startswith("global_step"):
        # The weights, and a file of the optimizer for each rank.
        return sum(zipfile.is_zipfile(each) for each in path.iterdir()) == 3
    names = {each.name for each in path.iterdir()}
    return "trainer_state.json" in names or {"random_states_0.pkl", "random_states_1.pkl"} <= names


STRIKE: dict[str, Callable[[Site, str], None]] = {
    "preempted": run_faults.preempt,
    "killed": run_faults.kill,
    "killed in a save": kill_in_save,
    "cancelled": run_faults.cancel,
}
ANNOUNCED = ("preempted", "cancelled")


@pytest.mark.parametrize(
    ("name", "fault", "adapter"),
    CELLS,
    ids=[f"{name}-{fault}-{'adapter' if adapter else 'plain'}" for name, fault, adapter in CELLS],
)
def test_a_trainer_that_is_interrupted_continues_from_a_complete_checkpoint(
    site: Site, undisturbed: Undisturbed, name: str, fault: str, adapter: bool
) -> None:
    trainer = TRAINERS[name]
    trainer.skip_if_missing()
    more: dict[str, Any] = {"save_ms": 700} if fault == "killed in a save" else {}
    run_id = site.submit(trainer.spec(site, adapter=adapter, steps=STEPS, **more))
    STRIKE[fault](site, run_id)
    site.call("wait", run_id)
    run = site.show(run_id)
    log = "\n".join(site.printed(run_id))
    assert run["state"] == "completed", log
    causes = [attempt["cause"] for attempt in run["attempts"]]
    assert causes == [{"preempted": "preempted", "cancelled": "cancelled"}.get(fault, "lost"), "completed"], log
    [lost] = lost_steps(site, run_id)
    assert lost == 0 if adapter and fault in ANNOUNCED else lost <= SAVE_EVERY, log
    assert trainings(site, run_id)[-1].last == STEPS
    if adapter:
        assert (run["step"], run["total_steps"]) == (STEPS, STEPS)
        # A kill may come between the end of a step and the record of it.
        assert lost - run["lost_steps"] in ((0,) if fault in ANNOUNCED else (0, 1))
        assert "loss" in run["metrics"]
    assert weights(site, run_id) == undisturbed[name]
