"""What makes a rank repeatable: the seed, and torch's switches; in a session, and in a script without one."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.ranks import Pair

from slurmtrain.runtime.checkpoint import rng
from slurmtrain.runtime.checkpoint.rng import make_repeatable, share_random_numbers
from slurmtrain.runtime.environment.node import this_worker
from slurmtrain.runtime.environment.variables import environment_of_helper
from slurmtrain.runtime.job.process_group import RankGroup


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SLURMTRAIN_SEED", "SLURMTRAIN_DETERMINISTIC", "SLURMTRAIN_ATTEMPT_DIR"):
        monkeypatch.delenv(name, raising=False)
    states, mode = rng.capture(torch.device("cpu")), torch.get_deterministic_debug_mode()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    rng.restore(states, torch.device("cpu"))
    torch.set_deterministic_debug_mode(mode)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_seed_gives_all_libraries_and_all_ranks_the_same_numbers() -> None:
    worker = replace(this_worker(), seed=2**32 - 1)
    make_repeatable(worker)
    first = draw()
    make_repeatable(replace(worker, rank=3, local_rank=1))
    assert draw() == first
    make_repeatable(replace(worker, seed=0))
    assert all(one != other for one, other in zip(draw(), first, strict=True))


def test_without_a_seed_nothing_is_seeded_and_nothing_is_switched() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    make_repeatable(this_worker())
    assert random.random() == expected
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_refuses_an_operation_that_has_no_such_algorithm() -> None:
    make_repeatable(replace(this_worker(), deterministic=True))
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_a_rank_without_a_session_is_repeatable_from_its_import_of_torch_on(tmp_path: Path) -> None:
    script = """
import random, torch, numpy
print(random.random(), numpy.random.rand(), torch.rand(()).item(), torch.are_deterministic_algorithms_enabled())
"""
    rank = {
        "SLURMTRAIN_ATTEMPT_DIR": str(tmp_path), "SLURMTRAIN_SUBMISSION": "1", "SLURMTRAIN_SEED": "7",
        "SLURMTRAIN_DETERMINISTIC": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
    }  # fmt: skip
    printed = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment_of_helper(), **rank},
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    rng.seed_all(7)
    assert printed.split() == [*map(repr, (random.random(), float(np.random.rand()), torch.rand(()).item())), "True"]


def draw_after_sharing(ranks: RankGroup) -> list[tuple[float, float, float]]:
    rng.seed_all(ranks.rank)
    share_random_numbers(ranks, 2)
    return ranks.gather(draw())


def test_ranks_that_divide_layers_get_the_same_random_numbers_and_others_do_not() -> None:
    four = Pair(4)
    try:
        first, second, third, fourth = four.run(draw_after_sharing)[0]
    finally:
        four.close()
    assert first == second
    assert third == fourth
    assert set(first).isdisjoint(third)
