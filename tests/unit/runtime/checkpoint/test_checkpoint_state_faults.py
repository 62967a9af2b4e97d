"""Scripts whose state cannot be saved, and clocks and metrics that make no sense."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import Attempt, Pair, alone, listed
from helpers.small_model import Value, model, restored_step, save_steps

from slurmtrain.errors import CheckpointError
from slurmtrain.model.spec.checkpoint import KeepSpec
from slurmtrain.runtime.checkpoint import files
from slurmtrain.runtime.job.process_group import RankGroup


def raise_on_one(ranks: RankGroup, root: Path, raising: int) -> tuple[list[str], list[dict[str, Any]]]:
    module, own = model(), Value(0)
    with Attempt(root, ranks, {"model": module, "own": own}) as attempt:
        problems = save_steps(attempt, module, 1)
        if ranks.rank == raising:
            own.value = RuntimeError("the tokenizer is busy")
        problems += save_steps(attempt, module, 2)
        own.value = 0
        problems += save_steps(attempt, module, 3)
        return problems, attempt.events("save_failed") if ranks.rank == 0 else []


@pytest.mark.parametrize("raising", [0, 1])
def test_a_state_dict_that_raises_on_one_rank_fails_the_save_on_both(tmp_path: Path, pair: Pair, raising: int) -> None:
    (problems, [failed]), (same, _) = pair.run(raise_on_one, tmp_path, raising)
    assert problems == same
    assert problems == ["", f"rank {raising}: RuntimeError: the tokenizer is busy", ""]
    assert (failed["step"], failed["reason"]) == (2, problems[1])
    assert listed(tmp_path) == ["step-1", "step-3"]


def test_a_state_dict_that_raises_in_preparation_fails_nothing_yet(tmp_path: Path) -> None:
    own = Value(RuntimeError("not ready"))
    with Attempt(tmp_path, alone(), {"own": own}) as attempt:
        attempt.saver.prepare()
        assert attempt.events("save_failed") == []
        own.value = 1
        assert attempt.save(1) == ""


def unsafe_on_one(ranks: RankGroup, root: Path) -> str:
    own = Value(1 if ranks.rank == 0 else object())
    with Attempt(root, ranks, {"own": own}) as attempt, pytest.raises(CheckpointError) as error:
        attempt.save(1)
    return str(error.value)


def test_a_state_that_is_unsafe_on_one_rank_ends_the_first_save_on_both(tmp_path: Path, pair: Pair) -> None:
    first, second = pair.run(unsafe_on_one, tmp_path)
    assert first == second
    assert first.startswith("rank 1: ")


def test_metrics_that_are_no_numbers_do_not_fail_a_save(tmp_path: Path) -> None:
    figures = {"loss": float("inf"), "nan": float("nan"), "less": -float("inf"), "accuracy": 0.5}
    with Attempt(tmp_path, alone(), {"model": model()}) as attempt:
        assert attempt.save(1, **figures) == ""
    assert files.read_manifest(tmp_path / "checkpoints" / "step-1").metrics == {"accuracy": 0.5}


def test_a_clock_that_goes_backwards_changes_nothing_but_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = model()
    now = time.time()
    with Attempt(tmp_path, alone(), {"model": module}, keep=KeepSpec(last=2)) as attempt:
        assert save_steps(attempt, module, 1, 2) == ["", ""]
    # The clock that counts is the writer's.
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "sitecustomize.py").write_text(
        "import time\nreal = time.time\ntime.time = lambda: real() - 86400\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'back'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with Attempt(tmp_path, alone(), {"model": module}, keep=KeepSpec(last=2), restart=1) as attempt:
        assert save_steps(attempt, module, 3) == [""]
    assert files.read_manifest(tmp_path / "checkpoints" / "step-3").saved_at < now - 80_000
    assert listed(tmp_path) == ["step-2", "step-3"]
    assert restored_step(tmp_path) == 3
