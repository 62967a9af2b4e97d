"""Which samples of an epoch are the batch of a step, which of them each rank gets, and its microbatches."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.batches import DataPosition, Division, divide, loss_weight, microbatch_sizes, own_places

Attempt = tuple[int, tuple[int, ...], int]
"""The size of a batch, the shares of the ranks, and how many steps are finished before the stop."""


def consumed(length: int, attempts: list[Attempt], *, drop_last: bool = False) -> list[tuple[int, int]]:
    """The epoch and place of every sample that attempts consume, one after the other, all ranks of a step together."""
    position, samples = DataPosition(), []
    for batch_size, shares, steps in attempts:
        division = Division(length, batch_size, drop_last)
        for batch in islice(division.batches(position), steps):
            samples += [
                (batch.epoch, place) for rank in range(len(shares)) for place in own_places(batch, shares, rank)
            ]
            position = batch.end
    return samples


def once_in_their_order(length: int, samples: list[tuple[int, int]]) -> bool:
    return samples == [divmod(number, length) for number in range(len(samples))]


attempts_of = st.lists(
    st.tuples(
        st.lists(st.integers(1, 40), min_size=1, max_size=9).map(tuple).map(lambda shares: (sum(shares), shares)),
        st.integers(0, 30),
    ).map(lambda drawn: (*drawn[0], drawn[1])),
    min_size=1,
    max_size=6,
)


@given(st.integers(1, 300), attempts_of)
def test_every_sample_comes_once_when_ranks_shares_and_sizes_change_after_any_step(
    length: int, attempts: list[Attempt]
) -> None:
    assert once_in_their_order(length, consumed(length, attempts))


@given(st.integers(1, 300), attempts_of)
def test_with_drop_last_no_sample_comes_twice_and_all_batches_are_full(length: int, attempts: list[Attempt]) -> None:
    fitting = [attempt for attempt in attempts if attempt[0] <= length]
    samples = consumed(length, fitting, drop_last=True)
    assert len(set(samples)) == len(samples) == sum(size * steps for size, _, steps in fitting)
    assert samples == sorted(samples)


@given(st.integers(0, 300), st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_a_batch_is_divided_by_shares_and_every_rank_gets_a_sample_if_there_are_as_many(
    size: int, shares: list[int]
) -> None:
    sizes = divide(size, shares)
    assert (len(sizes), sum(sizes)) == (len(shares), size)
    assert min(sizes) >= (size >= len(shares))
    if size <= sum(shares):
        assert all(own <= share for own, share in zip(sizes, shares, strict=True))
    assert divide(sum(shares), shares) == tuple(shares)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any), st.data())
def test_weighted_means_of_ranks_have_the_mean_over_samples(sizes: list[int], data: st.DataObject) -> None:
    losses = [data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)) for size in sizes]
    means = [Fraction(sum(own), len(own)) if own else Fraction(7) for own in losses]
    weighted = sum(mean * Fraction(loss_weight(sizes, rank)) for rank, mean in enumerate(means)) / len(sizes)
    every = [loss for own in losses for loss in own]
    assert float(weighted) == pytest.approx(sum(every) / len(every))


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_a_whole_epoch_has_a_sample_for_every_rank_in_each_batch(
    length: int, batch_size: int, ranks: int, drop_last: bool
) -> None:
    length, batch_size = max(length, ranks), max(batch_size, ranks)
    division = Division(length, batch_size, drop_last)
    batches = division.whole_epoch(3, ranks)
    places = [place for batch in batches for place in range(batch.start, batch.stop)]
    assert places == list(range(length - length % batch_size if drop_last else length))
    assert all(batch.epoch == 3 and ranks <= batch.size < batch_size + ranks for batch in batches)


def test_the_end_of_an_epoch_is_known_before_the_next_one_begins() -> None:
    division = Division(10, 4)
    assert not division.is_end(DataPosition(2, 8))
    assert division.is_end(DataPosition(2, 10))
    assert division.next_batch(DataPosition(2, 10)).end == DataPosition(3, 4)
    assert Division(10, 4, drop_last=True).is_end(DataPosition(2, 8))


@given(samples=st.integers(1, 500), least=st.integers(1, 20), most=st.none() | st.integers(1, 500))
def test_microbatches_fit_and_are_as_few_and_as_equal_as_possible(samples: int, least: int, most: int | None) -> None:
    sizes = microbatch_sizes(samples, least, most)
    assert sum(sizes) == samples
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= (most or samples)
    assert len(sizes) >= min(least, samples)
    assert len(sizes) in {least, samples} or (len(sizes) - 1) * (most or samples) < samples
