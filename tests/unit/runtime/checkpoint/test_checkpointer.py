"""Checkpoints that are damaged or do not fit: it is noticed, and the checkpoint before is restored."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import Attempt, Pair, alone, listed
from helpers.rare import drawn
from helpers.small_model import Value, model, restore_alone, save_steps, values
from torch import nn

from slurmtrain.errors import CheckpointError
from slurmtrain.model.experiment.checkpoint import Every, KeepSpec
from slurmtrain.model.interruption.interval import InterruptionStats, SaveReason
from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.checkpoint import checkpointer
from slurmtrain.runtime.checkpoint.checkpointer import Schedule
from slurmtrain.runtime.checkpoint.saver import Save
from slurmtrain.runtime.job.process_group import RankGroup
from slurmtrain.system.files import write_json
from slurmtrain.system.journal import Journal

NAMES = (".metadata", "__0_0.distcp", "__1_0.distcp")
MANIFEST = "MANIFEST.json"


Damage = Callable[[Path], None]


def _flip(where: float) -> Damage:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[round(where * (len(data) - 1))] ^= 1 << 5
        path.write_bytes(data)

    return flip


def _resize(by: int) -> Damage:
    return lambda path: os.truncate(path, path.stat().st_size + by)


FLIPS: dict[str, Damage] = {f"a bit flipped at {where}": _flip(where) for where in (0.0, 0.01, 0.3, 0.5, 0.9, 1.0)}
SIZES: dict[str, Damage] = {
    "the last byte missing": _resize(-1),
    "most of it missing": lambda path: os.truncate(path, 10),
    "a byte more": _resize(1),
    "a page more": _resize(4096),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": Path.unlink,
}


# Of 36, each damage once and each file four times.
@pytest.mark.parametrize(("name", "damage"), drawn([*product(NAMES, [*FLIPS, *SIZES])], 12))
def test_a_damaged_file_is_found_and_the_checkpoint_before_is_taken(run: Path, name: str, damage: str) -> None:
    (FLIPS | SIZES)[damage](run / "checkpoints" / "step-2" / name)
    step, [rejected], [restored] = restore_alone(run)
    assert step == 1
    assert (restored["step"], restored["lost_steps"]) == (1, 1)
    assert (rejected["step"], rejected["path"]) == (2, "checkpoints/step-2")
    assert rejected["aside"] == "checkpoints/damaged-step-2"
    assert name in rejected["reason"]
    assert listed(run) == ["damaged-step-2", "step-1"]


@pytest.mark.parametrize(("damage", "name"), drawn([*product(SIZES, NAMES)], 5))
def test_sizes_alone_show_every_damage_but_a_flipped_bit(run: Path, name: str, damage: str) -> None:
    SIZES[damage](run / "checkpoints" / "step-2" / name)
    step, [rejected], _ = restore_alone(run, hashes=False)
    assert step == 1
    assert rejected["aside"] == "checkpoints/damaged-step-2"


def restore_on_both(ranks: RankGroup, root: Path) -> tuple[int, int]:
    module, own = model(-1), Value("mine")
    with Attempt(root, ranks, {"model": module, "own": own}, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert values(module) == {float(restored.step)}
        assert own.value == ranks.rank
        return restored.step, restored.lost_steps


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_that_one_rank_rejects_all_ranks_pass_over(run: Path, pair: Pair, name: str) -> None:
    _flip(0.5)(run / "checkpoints" / "step-2" / name)
    assert pair.run(restore_on_both, run) == [(1, 1)] * 2
    assert listed(run) == ["damaged-step-2", "step-1"]


@pytest.mark.parametrize("damage", drawn([*FLIPS, *SIZES], 6))
def test_a_damaged_manifest_is_found_and_the_checkpoint_before_is_taken(run: Path, damage: str) -> None:
    (FLIPS | SIZES)[damage](run / "checkpoints" / "step-2" / MANIFEST)
    module = model(-1)
    with Attempt(run, alone(), {"model": module, "own": Value(None)}, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        # A byte of white space may have changed, and the manifest still mean the same.
        assert (restored.step, values(module)) in ((1, {1.0}), (2, {2.0}))
        if damage not in ("a bit flipped at 1.0", "the last byte missing"):
            assert restored.step == 1
            assert len(attempt.events("rejected")) == (damage != "removed")


@pytest.mark.parametrize("field", ["step", "world_size", "params", "metrics", "objects", "schema"])
def test_a_manifest_that_says_something_else_is_found(run: Path, field: str) -> None:
    """It is JSON still, and says something else."""
    path = run / "checkpoints" / "step-2" / MANIFEST
    data = json.loads(path.read_text())
    changed = {"step": 3, "world_size": 3, "params": {"lr": 1}, "metrics": {"loss": 1.0}, "objects": {}, "schema": 3}
    text = json.dumps({**data, field: changed[field]}, indent=1)
    assert text != path.read_text()
    path.write_text(text)
    step, [rejected], _ = restore_alone(run)
    assert step == 1
    assert MANIFEST in rejected["reason"]
    assert (rejected["aside"], listed(run)) == ("checkpoints/damaged-step-2", ["damaged-step-2", "step-1"])


def test_where_every_checkpoint_is_damaged_training_does_not_silently_start_again(run: Path) -> None:
    for step in (1, 2):
        _flip(0.5)(run / "checkpoints" / f"step-{step}" / "__0_0.distcp")
    for restart in (1, 2):
        with Attempt(run, alone(), {"model": model(), "own": Value(None)}, restart=restart) as attempt:
            with pytest.raises(CheckpointError, match="no checkpoint can be restored") as error:
                attempt.restore()
            assert "--from-start" in str(error.value)
        assert attempt.events("rejected") == []
    assert listed(run) == ["step-1", "step-2"]


@pytest.mark.parametrize("keep", [1, 2])
def test_saves_after_a_checkpoint_was_passed_over_are_not_pruned_in_its_favour(run: Path, keep: int) -> None:
    path = run / "checkpoints" / "step-2" / MANIFEST
    (run / "checkpoints" / "step-2").rename(run / "checkpoints" / "step-1000")
    path = run / "checkpoints" / "step-1000" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 3}))
    module = model(-1)
    with Attempt(run, alone(), {"model": module, "own": Value(None)}, restart=1, keep=KeepSpec(last=keep)) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert restored.step == 1
        assert save_steps(attempt, module, 5, 6, 7) == [""] * 3
    assert look_again(run) == 7


def look_again(run: Path) -> int:
    module = model(-1)
    with Attempt(run, alone(), {"model": module, "own": Value(None)}, restart=2) as attempt:
        restored = attempt.restore()
        assert restored is not None
        return restored.step


def problem_of_restoring(root: Path, **objects: Any) -> str:
    """Why a script with these objects cannot restore."""
    with Attempt(root, alone(), objects, restart=1) as attempt:
        with pytest.raises(CheckpointError) as error:
            attempt.restore()
        assert attempt.events("rejected") == []
    assert "step-2" in listed(root)
    return str(error.value)


def test_parameters_that_another_model_has_are_listed(run: Path) -> None:
    other = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40), nn.Linear(40, 2, bias=False))
    problem = problem_of_restoring(run, model=other, own=Value(None))
    assert "does not match the objects that the script registered" in problem
    assert "it has no 'model.2.weight'" in problem
    assert "'model.1.weight' has shape 2x40 in the checkpoint, but 40 in the script" in problem
    assert "'model.1.bias' has shape 2 in the checkpoint, but 40 in the script" in problem


def test_an_object_that_the_checkpoint_has_not_is_named(run: Path) -> None:
    assert "it has no 'average'" in problem_of_restoring(run, model=model(), own=Value(None), average=Value(None))


def test_an_object_that_refuses_its_state_ends_restoring_with_its_reason(run: Path) -> None:
    class Refusing(Value):
        def load_state_dict(self, state: Any) -> None:
            raise RuntimeError("no such vocabulary")

        def reshard_state_dict(self, *_: Any) -> None:
            raise RuntimeError("no such vocabulary")

    assert "RuntimeError: no such vocabulary" in problem_of_restoring(run, model=model(), own=Refusing(None))


# --- when rank 0 wants a checkpoint -----------------------------------------------------------------------------------


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(checkpointer, "time", clock)
    return clock


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def make(run_dir: RunDir, every: Every, journal: Journal | None = None) -> Schedule:
    made = Schedule(run_dir, every, InterruptionStats(), 2, journal)
    made.begin()
    return made


def journaled(run_dir: RunDir) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir.path / "rank-0.jsonl").read_text().splitlines()]


def test_an_interval_of_steps_asks_no_clock(run_dir: RunDir, clock: Clock) -> None:
    plan = make(run_dir, Every(steps=10))
    clock.now += 1e6
    assert [step for step in range(31) if plan.due(step) is SaveReason.STEPS] == [10, 20, 30]
    assert [plan.next_step(step) for step in (0, 9, 10, 11)] == [10, 10, 20, 20]
    assert make(run_dir, Every(minutes=10)).next_step(0) is None


def test_auto_follows_what_saves_cost_and_says_so(run_dir: RunDir, clock: Clock) -> None:
    with Journal(run_dir.path / "rank-0.jsonl") as journal:
        plan = make(run_dir, Every(), journal)
        clock.now += 29
        assert plan.due(1) is SaveReason.NONE
        clock.now += 1
        assert plan.due(1) is SaveReason.INTERVAL
        plan.began()
        plan.ended(Save(step=5, stall_s=1.0, seconds=4.0))
        clock.now += 60
        assert plan.due(1) is SaveReason.NONE
        plan.ended(Save(step=6, stall_s=1.0, seconds=4.0))
    first, second = journaled(run_dir)
    assert (first["kind"], first["stall_s"]) == ("interval", None)
    assert (second["stall_s"], second["save_s"]) == (1.0, 4.0)
    assert float(str(second["seconds"])) > 60


def test_a_wish_is_seen_within_a_second_and_fulfilled_once(run_dir: RunDir, clock: Clock) -> None:
    plan = make(run_dir, Every(steps=10))
    write_json(run_dir.request, {"request": "abc", "t": 1.0})
    assert plan.due(1) is SaveReason.NONE
    clock.now += 1
    assert plan.due(1) is SaveReason.REQUESTED
    assert plan.due(1) is SaveReason.REQUESTED
    assert plan.take_request() == "abc"
    clock.now += 5
    assert (plan.due(1), plan.take_request()) == (SaveReason.NONE, None)
    write_json(run_dir.request, {"request": "def", "t": 2.0})
    clock.now += 1
    assert (plan.due(1), plan.take_request()) == (SaveReason.REQUESTED, "def")


def test_a_wish_from_before_the_attempt_is_not_its(run_dir: RunDir, clock: Clock) -> None:
    write_json(run_dir.request, {"request": "abc", "t": 1.0})
    plan = make(run_dir, Every(steps=10))
    clock.now += 10
    assert plan.due(1) is SaveReason.NONE


def test_a_wish_that_cannot_be_read_is_none(run_dir: RunDir, clock: Clock) -> None:
    plan = make(run_dir, Every(steps=10))
    run_dir.request.write_text("{")
    clock.now += 1
    assert plan.due(1) is SaveReason.NONE
    run_dir.request.unlink()
    clock.now += 1
    assert plan.due(1) is SaveReason.NONE
