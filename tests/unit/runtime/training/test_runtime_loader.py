"""The loader of a session, on ranks that need no processes: they only differ in their numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

from slurmtrain.errors import CheckpointError, DataError
from slurmtrain.runtime.training.loader import Loader, Loaders, OwnBatch, RepeatableDataset
from slurmtrain.runtime.training.parallel import Shares

CPU = torch.device("cpu")
LENGTH = 23


class Indices(Dataset[int]):
    """Samples that are their own numbers."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Indices):
    """Samples with a number from each generator, as augmentations draw them."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)


def noisy(samples: list[Any]) -> Any:
    """A collate function that draws, too."""
    return torch.stack(samples), random.random()


class Moment:
    """The step that a script is in."""

    step: int | None = None


class Script:
    """The loaders of a script on one rank."""

    def __init__(self, rank: int = 0, ranks: int = 1, seed: int | None = 5) -> None:
        # Not the script itself: in a reference cycle, workers of its loaders would end only when it is collected.
        moment = self.moment = Moment()
        self.shares = Shares(rank, ranks, CPU, step=lambda: moment.step)
        self.loaders = Loaders(self.shares, seed)

    def loader(
        self,
        dataset: Any = None,
        batch_size: int = 4,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> Loader:
        dataset = Indices() if dataset is None else dataset
        return self.loaders.make(dataset, batch_size, options, shuffle=shuffle, drop_last=drop_last, seed=seed)

    def steps(self, loader: Any, first: int, total: int) -> Iterator[tuple[int, Any]]:
        return self.loaders.with_steps(iter(range(first, total)), loader)


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def trained(ranks: int, steps: int, state: Any = None, **arguments: Any) -> tuple[list[list[int]], Any]:
    """The samples of each step, of all ranks together and sorted, and the state that all ranks have then."""
    batches: list[list[int]] = [[] for _ in range(steps)]
    states = []
    for rank in range(ranks):
        script = Script(rank, ranks)
        loader = script.loader(**arguments)
        if state is not None:
            script.loaders.load_state_dict(state)
        for step, batch in script.steps(loader, 0, steps):
            batches[step] += [index for index in batch.tolist() if loader.weight]
        states.append(script.loaders.state_dict())
    assert all(each == states[0] for each in states)
    return [sorted(batch) for batch in batches], states[0]


# --- which samples ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_batches_of_steps_are_the_same_on_any_number_of_ranks(ranks: int) -> None:
    alone, _ = trained(1, 15)
    assert [len(batch) for batch in alone] == [4, 4, 4, 4, 4, 3] * 2 + [4] * 3
    assert sorted(flat(alone[:6])) == sorted(flat(alone[6:12])) == list(range(LENGTH))
    assert alone[:3] != alone[6:9]
    assert trained(ranks, 15)[0] == alone


def test_the_order_of_an_epoch_is_that_of_distributed_sampler() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Indices(24), num_replicas=1, rank=0, seed=5)
    sampler.set_epoch(1)
    script = Script()
    loader = script.loader(Indices(24))
    batches = [batch.tolist() for _, batch in script.steps(loader, 0, 12)]
    assert flat(batches[6:]) == list(sampler)


def test_without_shuffle_the_order_is_that_of_the_dataset_and_drop_last_leaves_out_the_rest() -> None:
    batches, _ = trained(2, 3, dataset=Indices(10), batch_size=4, shuffle=False, drop_last=True)
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_goes_on_in_the_middle_of_an_epoch_on_other_ranks_without_those_that_were_only_prefetched(
    workers: int,
) -> None:
    undisturbed, _ = trained(1, 14)
    before, state = trained(2, 4, num_workers=workers)
    then, later = trained(3, 5, state, num_workers=workers)
    after, _ = trained(1, 5, later, num_workers=workers)
    assert before + then + after == undisturbed
    assert state["0"]["consumed"] == 16


def test_with_another_size_of_a_batch_the_rest_of_the_epoch_follows() -> None:
    before, state = trained(2, 2, batch_size=5)
    after, _ = trained(3, 2, state, batch_size=7)
    assert sorted(flat([*before, *after])) == sorted({*flat(before), *flat(after)})
    assert [len(batch) for batch in after] == [7, 6]


def test_a_state_of_another_dataset_is_refused_in_the_middle_of_an_epoch_and_begins_the_next_one_at_its_end() -> None:
    _, state = trained(1, 2)
    with pytest.raises(CheckpointError, match=r"consumed 8 of 23 samples .*, but now it has 24 .* same dataset"):
        trained(1, 1, state, dataset=Indices(24))
    with pytest.raises(CheckpointError, match="now it has 23 with shuffle=False"):
        trained(1, 1, state, shuffle=False)
    _, end = trained(1, 6)
    assert trained(1, 6, end, dataset=Indices(24))[1]["0"] == {**end["0"], "epoch": 1, "consumed": 24, "samples": 24}


def test_a_batch_counts_when_its_step_ends_the_loop_early_too() -> None:
    script = Script()
    loader = script.loader()
    for step, _ in script.steps(loader, 0, 100):
        if step == 2:
            break
    assert script.loaders.state_dict()["0"]["consumed"] == 12
    rest = [batch.tolist() for _, batch in script.steps(loader, 3, 6)]
    assert len(flat(rest)) == LENGTH - 12


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weighted_losses_have_the_gradient_of_the_whole_batch_even_where_a_rank_has_no_sample() -> None:
    samples = torch.randn(9, 3, dtype=torch.float64)
    for size, ranks in ((8, 3), (8, 4), (3, 3)):
        gradients, shares = torch.zeros(6, 3, dtype=torch.float64), [0.0] * 6
        for rank in range(ranks):
            script = Script(rank, ranks)
            loader = script.loader(samples, size)
            for step, batch in script.steps(loader, 0, 6):
                weights = torch.ones(3, dtype=torch.float64, requires_grad=True)
                (loader.weight * (batch @ weights).square().mean()).backward()
                gradients[step] += weights.grad / ranks
                shares[step] += loader.weight / ranks
        alone = Script()
        for step, batch in alone.steps(alone.loader(samples, size), 0, 6):
            weights = torch.ones(3, dtype=torch.float64, requires_grad=True)
            (batch @ weights).square().mean().backward()
            torch.testing.assert_close(gradients[step], weights.grad)
        assert shares == pytest.approx([1.0] * 6)


def test_unequal_shares_hold_from_the_next_batch_on() -> None:
    sizes = []
    for rank in range(2):
        script = Script(rank, 2)
        loader = script.loader(batch_size=8, num_workers=1)
        for step, batch in script.steps(loader, 0, 4):
            sizes.append((rank, step, len(batch), loader.weight))
            if step == 0:
                script.shares.change((6, 2))
    assert sizes == [
        (0, 0, 4, 1.0), (0, 1, 6, 1.5), (0, 2, 5, 10 / 7), (0, 3, 6, 1.5),
        (1, 0, 4, 1.0), (1, 1, 2, 0.5), (1, 2, 2, 4 / 7), (1, 3, 2, 0.5),
    ]  # fmt: skip


# --- random numbers ---------------------------------------------------------------------------------------------------


def augmented(ranks: int, steps: int, state: Any = None, **options: Any) -> tuple[dict[Any, list[float]], Any]:
    """The numbers that each sample of each step got."""
    numbers, scripts = {}, []
    for rank in range(ranks):
        scripts.append(Script(rank, ranks))
        loader = scripts[-1].loader(Augmented(), **options)
        if state is not None:
            scripts[-1].loaders.load_state_dict(state)
        for _, batch in scripts[-1].steps(loader, 0, steps):
            numbers.update({(loader.epoch, int(sample[0])): sample[1:].tolist() for sample in batch})
    return numbers, scripts[0].loaders.state_dict()


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_samples_draw_the_same_numbers_with_any_workers_and_ranks_and_after_a_resume(options: dict[str, Any]) -> None:
    undisturbed, _ = augmented(1, 12)
    before, state = augmented(2, 8, **options)
    after, _ = augmented(1, 4, state, **options)
    assert {**before, **after} == undisturbed
    assert len({number for drawn in undisturbed.values() for number in drawn}) == 3 * 2 * LENGTH


def test_a_subset_draws_by_the_sample_and_a_collate_function_the_same_again() -> None:
    def numbers(ranks: int) -> list[list[float]]:
        rows = []
        for rank in range(ranks):
            script = Script(rank, ranks)
            loader = script.loader(Subset(Augmented(), range(8)), 4)
            rows += [sample.tolist() for _, batch in script.steps(loader, 0, 2) for sample in batch]
        return sorted(rows)

    assert numbers(1) == numbers(2)
    scripts = [Script(), Script()]
    drawn = [[extra for _, (_, extra) in each.steps(each.loader(collate_fn=noisy_indices), 0, 6)] for each in scripts]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 6


def noisy_indices(samples: list[int]) -> Any:
    return samples, random.random()


class Rarely(Augmented):
    """Samples of which few draw, some from one generator alone."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.loads.append(index)
        number = {5: random.gauss, 11: np.random.normal}.get(index, lambda *_: 0.0)(0.0, 1.0)
        return torch.tensor([index, number, torch.initial_seed() % 2**40, torch.rand(()).item()], dtype=torch.float64)


@pytest.mark.parametrize("divided", [[range(23)], [range(3), range(3, 9), range(9, 23)]])
def test_samples_that_seldom_draw_get_their_own_numbers_and_are_loaded_twice_at_most(divided: list[range]) -> None:
    dataset, each_alone = Rarely(), []
    for index in range(LENGTH):
        always = RepeatableDataset(dataset, 1)
        always._draws = True
        each_alone.append(always.__getitems__(OwnBatch(2, [index]))[0].tolist())
    dataset.loads.clear()
    lazily = RepeatableDataset(dataset, 1)
    samples = [sample.tolist() for part in divided for sample in lazily.__getitems__(OwnBatch(2, [*part]))]
    assert samples == each_alone
    assert len({sample[2] for sample in samples}) == LENGTH, "torch's seed is that of the sample in any case"
    assert (dataset.loads.count(0), dataset.loads.count(5)) == (1, 2)
    assert dataset.loads.count(22) == (2 if len(divided) == 1 else 1)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"collate_fn": noisy}])
def test_loading_draws_none_of_the_numbers_of_the_script(options: dict[str, Any]) -> None:
    def draw() -> list[float]:
        return [random.random(), np.random.random(), torch.rand(()).item()]

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    alone = [draw() for _ in range(8)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    script = Script()
    dataset = TensorDataset(torch.arange(LENGTH)) if not options else Augmented()
    loader, whole = script.loader(dataset, **options), script.loader(dataset, **options)
    assert [draw() for _ in script.steps(loader, 0, 4)] + [
        draw() for _, _ in zip(range(4), whole, strict=False)
    ] == alone


# --- whole epochs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_over_a_loader_has_each_sample_once_and_as_many_batches_on_each_rank(persistent: bool) -> None:
    samples, counts = [], set()
    for rank in range(3):
        script = Script(rank, 3)
        script.moment.step = 7
        loader = script.loader(Indices(25), num_workers=1, persistent_workers=persistent, shuffle=False)
        for _ in range(2):
            batches = [batch.tolist() for batch in loader]
            counts.add(len(batches))
            samples += flat(batches)
        assert script.loaders.state_dict() == {}
    assert sorted(samples) == sorted([*range(25)] * 2)
    assert counts == {6}, "the 25th sample is in the batch before, not in one of which two ranks have nothing"


def test_set_epoch_decides_the_order_of_a_plain_loop() -> None:
    loader = Script().loader()
    first = [batch.tolist() for batch in loader]
    assert [batch.tolist() for batch in loader] == first
    loader.set_epoch(1)
    assert sorted(flat(first)) == sorted(index for batch in loader for index in batch.tolist())
    assert [batch.tolist() for batch in loader] != first


@pytest.mark.parametrize("first", [None, 0])
def test_a_loop_that_goes_on_from_step_to_step_is_refused_at_its_second_batch(first: int | None) -> None:
    script = Script()
    batches = iter(script.loader())
    script.moment.step = first
    next(batches)
    script.moment.step = 1
    with pytest.raises(DataError, match=r"'for step, batch in run\.steps\(total, loader\)'"):
        next(batches)


# --- what is refused --------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"dataset": Stream()}, "Stream has none, .* torchdata's StatefulDataLoader"),
        ({"dataset": iter([1])}, "with __getitem__ and __len__; list_iterator"),
        ({"dataset": []}, "is empty"),
        ({"batch_size": 0}, "a positive whole number, not 0"),
        ({"batch_size": 2.5}, "a positive whole number, not 2.5"),
        ({"batch_size": 1}, "on all processes together, so 1 is too small for 2 processes: raise it"),
        ({"batch_size": 24, "drop_last": True}, "has 23 samples, too few for a batch of 24"),
        ({"sampler": [1]}, "does not take 'sampler'"),
        ({"generator": torch.Generator()}, "does not take 'generator': give it a seed instead"),
    ],
)
def test_what_cannot_be_divided_is_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        Script(0, 2).loader(**arguments)


def test_fewer_samples_than_ranks_are_refused_in_a_loop_over_a_whole_epoch() -> None:
    with pytest.raises(DataError, match="has 2 samples, fewer than the 3 processes"):
        iter(Script(2, 3).loader(Indices(2)))


def test_loaders_of_others_and_those_that_are_not_in_checkpoints_are_refused() -> None:
    script = Script()
    with pytest.raises(DataError, match=r"made by run.loader\(\), not DataLoader"):
        script.steps(DataLoader(Indices()), 0, 1)
    first = script.loader()
    assert script.loaders.register() == {"run.loaders": script.loaders}
    with pytest.raises(DataError, match=r"made after run.checkpoint\(\)"):
        script.steps(script.loader(), 0, 1)
    assert next(script.steps(first, 0, 1))[0] == 0
    assert Script().loaders.register() == {}


def test_each_loader_gets_its_own_position_back() -> None:
    script = Script()
    script.loader(shuffle=False)
    training = script.loader()
    list(script.steps(training, 0, 3))
    state = script.loaders.state_dict()
    assert list(state) == ["1"]
    later = Script()
    with pytest.raises(CheckpointError, match="position of loader 2, and the script has made 0"):
        later.loaders.load_state_dict(state)
    evaluation, training = later.loader(shuffle=False), later.loader()
    later.loaders.load_state_dict(state)
    assert later.loaders.state_dict() == state
    assert [loader.state_dict()["consumed"] for loader in (evaluation, training)] == [0, 12]
