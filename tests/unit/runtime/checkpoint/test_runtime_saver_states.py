"""Every kind of state comes back bit for bit, on as many ranks or on others, whatever strategy saved it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.object_states import (
    ALONE,
    TOGETHER,
    WIDTH,
    Counter,
    Objects,
    differing,
    make_loader,
    network,
    plain,
    save_as,
    states,
)
from helpers.ranks import Attempt, Pair, alone
from helpers.rare import rare
from torch import nn

from slurmtrain.runtime.job.process_group import RankGroup


def round_trip(ranks: RankGroup, root: Path, make: str) -> list[str]:
    """In what a set of objects differs, after restoring, from the one that was saved."""
    makers = {**ALONE, **TOGETHER}
    first = makers[make](0, ranks)
    with Attempt(root, ranks, first) as attempt:
        expected = states(first)
        assert attempt.save(1) == ""
        assert differing(expected, states(first)) == [], "saving has changed the state"
    second = makers[make](1, ranks)
    assert differing(expected, states(second)) != [], "the test is of no use"
    with Attempt(root, ranks, second, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert (restored.step, restored.lost_steps, restored.rederived) == (1, 0, ())
        return differing(expected, states(second))


@pytest.mark.parametrize("make", ALONE)
def test_a_state_comes_back_bit_for_bit(tmp_path: Path, make: str) -> None:
    assert round_trip(alone(), tmp_path, make) == []


@pytest.mark.parametrize("make", TOGETHER)
def test_a_state_comes_back_bit_for_bit_on_two_ranks(tmp_path: Path, pair: Pair, make: str) -> None:
    assert list(pair.run(round_trip, tmp_path, make)) == [[], []]


# --- other strategies, other numbers of ranks -------------------------------------------------------------------------


def restore_as(ranks: RankGroup, root: Path, make: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    objects = {**ALONE, **TOGETHER}[make](1, ranks)
    with Attempt(root, ranks, objects, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        return states(objects), restored.rederived


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        ("ddp", "fsdp"),
        ("fsdp", "unwrapped"),
        *(pytest.param(*each, marks=rare) for each in (("fsdp", "ddp"), ("plain", "fsdp"))),
    ],
)
def test_what_one_strategy_has_saved_another_restores(tmp_path: Path, pair: Pair, saved: str, restored: str) -> None:
    [before, _] = pair.run(save_as, tmp_path, saved)
    before.pop("scheduler", None)
    for after, rederived in pair.run(restore_as, tmp_path, restored):
        assert differing(before, after) == []
        assert rederived == ()


@pytest.mark.parametrize("saved", ["uneven_fsdp", *(pytest.param(name, marks=rare) for name in ("fsdp", "ddp"))])
def test_what_two_ranks_have_saved_one_restores(tmp_path: Path, pair: Pair, saved: str) -> None:
    [before, _] = pair.run(save_as, tmp_path, saved)
    objects = _without_wrapping(saved)
    with Attempt(tmp_path, alone(), objects, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert restored.rederived == ("rng",)
        assert differing(before, states(objects)) == []


def _without_wrapping(saved: str) -> Objects:
    layers = (nn.Linear(WIDTH, 7), nn.Linear(7, 1), nn.Linear(1, WIDTH)) if saved == "uneven_fsdp" else ()
    model = network(1, *layers)
    if saved == "uneven_fsdp":
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.5)}
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


@pytest.mark.parametrize("restored", ["fsdp", pytest.param("ddp", marks=rare)])
def test_what_one_rank_has_saved_two_restore(tmp_path: Path, pair: Pair, restored: str) -> None:
    objects = plain(0, alone())
    with Attempt(tmp_path, alone(), objects) as attempt:
        assert attempt.save(1) == ""
    before = states(objects)
    del before["scheduler"]
    for after, rederived in pair.run(restore_as, tmp_path, restored):
        assert differing(before, after) == []
        assert rederived == ("rng",)


class Resharding(Counter):
    """An object that knows what becomes of it on another number of ranks."""

    def reshard_state_dict(self, states: list[Any], rank: int, world_size: int) -> None:
        self.state = [states, rank, world_size]


def save_own(ranks: RankGroup, root: Path) -> None:
    own, same = Counter({"seen": ranks.rank, "t": torch.tensor([ranks.rank])}), Counter({"t": torch.arange(3)})
    with Attempt(root, ranks, {"own": own, "same": same, "knowing": Resharding(ranks.rank)}) as attempt:
        assert attempt.save(1) == ""


def test_what_each_rank_has_of_its_own_is_carried_over_where_that_can_be_done(tmp_path: Path, pair: Pair) -> None:
    pair.run(save_own, tmp_path)
    own, same, knowing = Counter("as it was"), Counter(None), Resharding(None)
    with Attempt(tmp_path, alone(), {"own": own, "same": same, "knowing": knowing}, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert restored.rng is None
        assert restored.rederived == ("rng", "own")
        assert attempt.events("restored")[0]["rederived"] == ["rng", "own"]
    assert own.state == "as it was"
    assert torch.equal(same.state["t"], torch.arange(3))
    assert knowing.state == [[0, 1], 0, 1]


# --- random numbers and data ------------------------------------------------------------------------------------------


def draw_again(ranks: RankGroup, root: Path) -> tuple[list[float], list[float]]:
    import random

    import numpy as np

    from slurmtrain.runtime.checkpoint import rng

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1)]

    torch.manual_seed(ranks.rank)
    random.seed(ranks.rank)
    np.random.seed(ranks.rank)
    draw()
    with Attempt(root, ranks, {"model": network(0)}) as attempt:
        torch.manual_seed(100 + ranks.rank)
        assert attempt.save(1) == ""
    expected = draw()
    with Attempt(root, ranks, {"model": network(1)}, restart=1) as attempt:
        restored = attempt.restore()
        assert restored is not None
        assert restored.rng is not None
        rng.restore(restored.rng, ranks.device)
    return expected, draw()


def test_every_rank_draws_the_same_random_numbers_again(tmp_path: Path, pair: Pair) -> None:
    (first, again), (other, other_again) = pair.run(draw_again, tmp_path)
    assert first == again
    assert other == other_again
    assert not set(first) & set(other)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_goes_on_where_it_was(tmp_path: Path, workers: int) -> None:
    loader = make_loader(0, workers)
    iterator = iter(loader)
    before = [next(iterator).tolist() for _ in range(5)]
    with Attempt(tmp_path, alone(), {"loader": loader}) as attempt:
        assert attempt.save(1) == ""
    rest = [batch.tolist() for batch in iterator]
    assert sorted(number for batch in before + rest for number in batch) == list(range(64))
    again = make_loader(1, workers)
    with Attempt(tmp_path, alone(), {"loader": again}, restart=1) as attempt:
        assert attempt.restore() is not None
    assert [batch.tolist() for batch in again] == rest
