"""Into how many microbatches a rank divides its samples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.data.microbatches import microbatch_sizes, samples_that_fit


def test_samples_that_do_not_fit_are_divided_further() -> None:
    assert microbatch_sizes(12, 1) == (12,)
    assert microbatch_sizes(12, 1, most=5) == (4, 4, 4)
    assert microbatch_sizes(12, 4, most=5) == (3, 3, 3, 3)
    assert sorted(microbatch_sizes(13, 1, most=5)) == [4, 4, 5]


@given(samples=st.integers(1, 500), least=st.integers(1, 20), most=st.none() | st.integers(1, 500))
def test_microbatches_fit_and_are_as_few_and_as_equal_as_possible(samples: int, least: int, most: int | None) -> None:
    sizes = microbatch_sizes(samples, least, most)
    assert sum(sizes) == samples
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= (most or samples)
    assert len(sizes) >= min(least, samples)
    assert len(sizes) in {least, samples} or (len(sizes) - 1) * (most or samples) < samples


def test_as_many_samples_fit_as_their_memory_says() -> None:
    # 4 bytes a sample, beside 200.
    assert samples_that_fit(total=1000, before=200, peak=280, samples=20) == (850 - 200) // 4
    assert samples_that_fit(total=300, before=200, peak=280, samples=20) == 20
    assert samples_that_fit(total=1000, before=200, peak=200, samples=20) is None
