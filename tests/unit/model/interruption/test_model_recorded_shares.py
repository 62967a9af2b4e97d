"""Which shares the steps have that are repeated after a kill."""

from __future__ import annotations

from typing import Any

from slurmtrain.model.interruption.recorded_shares import recorded_shares
from slurmtrain.model.run.run import Attempt


def attempt(number: int, last_step: int | None, shares: dict[int, tuple[int, ...]], **keys: Any) -> Attempt:
    records = [{"at": 1e9 + step, "step": step, "shares": list(each)} for step, each in shares.items()]
    return Attempt(number=number, job_id="7", restart=number - 1, last_step=last_step, shares=records, **keys)


def choices(attempts: list[Attempt], step: int, ranks: int = 2) -> tuple[dict[int, tuple[int, ...]], int]:
    recorded = recorded_shares(attempts, step, ranks)
    return {at: tuple(chosen.shares) for at, chosen in recorded.choices.items()}, recorded.until


KILLED = attempt(1, 60, {10: (4, 4), 20: (6, 2), 50: (5, 3)})


def test_steps_after_the_checkpoint_are_repeated_up_to_the_last_one() -> None:
    assert choices([KILLED], 20) == ({50: (5, 3)}, 60)
    assert choices([KILLED], 0) == ({10: (4, 4), 20: (6, 2), 50: (5, 3)}, 60)
    assert choices([KILLED], 60) == ({}, 60)
    assert choices([], 0) == ({}, 0)


def test_an_attempt_that_was_killed_before_it_had_repeated_all_leaves_the_rest() -> None:
    second = attempt(2, 40, {20: (6, 2)})
    assert choices([KILLED, second], 10) == ({20: (6, 2), 50: (5, 3)}, 60)
    further = attempt(3, 90, {20: (6, 2), 50: (5, 3), 70: (7, 1)})
    assert choices([KILLED, second, further], 60) == ({70: (7, 1)}, 90)


def test_shares_of_other_numbers_of_ranks_and_of_what_was_given_up_do_not_count() -> None:
    three = attempt(2, 100, {30: (2, 3, 3)})
    assert choices([KILLED, three], 10) == ({}, 0)
    assert choices([KILLED, three], 10, ranks=3) == ({30: (2, 3, 3)}, 100)
    anew = attempt(2, 30, {15: (3, 5)}, from_start=True)
    assert choices([KILLED, anew], 0) == ({15: (3, 5)}, 30)


def test_what_no_version_could_have_chosen_is_left_out() -> None:
    odd = attempt(1, 30, {15: (8, 0), 16: (), 17: (3, 5)})
    assert choices([odd], 0) == ({17: (3, 5)}, 30)
