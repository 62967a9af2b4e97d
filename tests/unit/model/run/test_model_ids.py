"""Run ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.run.root import ALPHABET, EPOCH_MS, RUN_ID, base32, run_id

times = st.integers(min_value=EPOCH_MS, max_value=EPOCH_MS + 2**40 - 1)
bits = st.integers(min_value=0, max_value=1023)


def test_the_alphabet_holds_no_letters_that_are_easily_misread() -> None:
    assert len(set(ALPHABET)) == 32
    assert not set(ALPHABET) & set("ilou")
    assert sorted(ALPHABET) == list(ALPHABET)


def test_numbers_are_written_with_leading_zeros() -> None:
    assert base32(0, 3) == "000"
    assert base32(31, 2) == "0z"
    assert base32(32, 2) == "10"


@given(times, bits)
def test_an_id_has_the_form_of_ids(now: int, random: int) -> None:
    assert RUN_ID.fullmatch(run_id(now, random))


@given(st.lists(st.tuples(times, bits), min_size=2, unique_by=lambda pair: pair[0]))
def test_ids_sort_by_time(pairs: list[tuple[int, int]]) -> None:
    ids = {run_id(now, random): now for now, random in pairs}
    assert [ids[one] for one in sorted(ids)] == sorted(now for now, _ in pairs)


@given(times, bits, bits)
def test_ids_of_one_millisecond_differ_by_their_random_bits(now: int, random: int, other: int) -> None:
    assert (run_id(now, random) == run_id(now, other)) == (random == other)


def test_a_clock_before_the_epoch_still_gives_an_id() -> None:
    assert run_id(0, 5) == run_id(EPOCH_MS, 5)
