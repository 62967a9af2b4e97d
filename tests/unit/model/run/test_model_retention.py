"""Which checkpoints stay, and why; whatever the policy, the newest is among them."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.checkpoint import BestSpec, KeepSpec
from slurmtrain.model.run.retention import Saved, disposable, reasons

METRIC = "val_loss"


def saved(*steps: int, **values: float | None) -> list[Saved]:
    """Checkpoints of these steps; ``s10=0.5`` gives that of step 10 a value of the metric."""
    return [Saved(step, {METRIC: values[f"s{step}"]} if f"s{step}" in values else {}) for step in steps]


def best(n: int = 1, mode: str = "min", last: int = 1) -> KeepSpec:
    return KeepSpec(last=last, best=BestSpec(metric=METRIC, mode=mode, n=n))


LAST, MULTIPLE, NEW = "one of the last 3", "every 1000 steps", "newest"
FOUR = saved(1, 2, 3, 4, s1=0.5, s2=0.30999, s3=0.7, s4=0.9)


@pytest.mark.parametrize(
    ("checkpoints", "keep", "kept"),
    [
        ([], KeepSpec(), {}),
        (saved(5, 10, 15, 20), KeepSpec(last=3), {10: LAST, 15: LAST, 20: NEW}),
        # A policy that would keep none keeps the newest.
        (saved(5, 10), KeepSpec(last=0), {10: NEW}),
        # Of every so many steps the multiple stays, and where no save hit it, the next one.
        (saved(500, 1000, 1500, 2000, 2500), KeepSpec(last=1, every_steps=1000),
         {1000: MULTIPLE, 2000: MULTIPLE, 2500: NEW}),
        (saved(100, 990, 1010, 1020, 3500, 3600, 3700), KeepSpec(last=1, every_steps=1000),
         {1010: MULTIPLE, 3500: MULTIPLE, 3700: NEW}),
        (FOUR, best(2), {1: "best 2 of val_loss (0.5)", 2: "best 2 of val_loss (0.31)", 4: NEW}),
        (FOUR, best(), {2: "best val_loss (0.31)", 4: NEW}),
        (saved(1, 2, 3, s1=0.5, s2=0.9, s3=0.7), best(mode="max"), {2: "best val_loss (0.9)", 3: NEW}),
        # One without the metric is no candidate.
        ([Saved(1, {"loss": 0.0}), Saved(2, {METRIC: 0.5}), Saved(3, {})], best(1), {2: "best val_loss (0.5)", 3: NEW}),
        (saved(5, 10, 20, s20=0.25), KeepSpec(last=2, every_steps=10, best=BestSpec(metric=METRIC, mode="min", n=1)),
         {10: "one of the last 2, every 10 steps", 20: "newest, every 10 steps, best val_loss (0.25)"}),
    ],
)  # fmt: skip
def test_which_checkpoints_stay_and_why(checkpoints: list[Saved], keep: KeepSpec, kept: dict[int, str]) -> None:
    assert reasons(checkpoints, keep) == kept
    going = sorted({each.step for each in checkpoints} - set(kept))
    assert disposable(checkpoints[::-1], keep) == going


def test_what_stays_for_a_multiple_stays_though_others_are_deleted_and_more_are_saved() -> None:
    keep = KeepSpec(last=1, every_steps=100)
    steps: list[int] = []
    for step in range(7, 1000, 31):
        steps = sorted(reasons(saved(*steps, step), keep))
    assert steps == sorted(reasons(saved(*range(7, 1000, 31)), keep))


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equal_values_the_later_one_is_the_best(mode: str) -> None:
    assert list(reasons(saved(1, 2, 3, s1=0.5, s2=0.5), best(mode=mode))) == [2, 3]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, 10**400])
def test_what_is_no_number_is_never_the_best(mode: str, value: float | None) -> None:
    assert list(reasons(saved(1, 2, 3, s1=value, s2=0.5), best(2, mode))) == [2, 3]


values = st.none() | st.integers(-5, 5) | st.floats() | st.just(10**400)
saves = st.lists(
    st.builds(Saved, st.integers(0, 300), st.dictionaries(st.sampled_from([METRIC, "loss"]), values, max_size=2)),
    unique_by=lambda one: one.step,
    max_size=25,
)
policies = st.builds(
    KeepSpec,
    last=st.integers(1, 6),
    every_steps=st.none() | st.integers(1, 100),
    best=st.none()
    | st.builds(BestSpec, metric=st.just(METRIC), mode=st.sampled_from(["min", "max"]), n=st.integers(1, 5)),
)


@given(saves, policies)
def test_each_checkpoint_either_stays_or_may_go_and_the_last_ones_stay(
    checkpoints: list[Saved], keep: KeepSpec
) -> None:
    staying, going = reasons(checkpoints, keep), disposable(checkpoints, keep)
    assert sorted([*staying, *going]) == sorted(one.step for one in checkpoints)
    assert going == sorted(going)
    assert all(staying.values())
    newest = sorted(one.step for one in checkpoints)[-keep.last :]
    assert set(newest) <= set(staying)
    assert len(staying) >= min(len(checkpoints), keep.last)


@given(saves, policies)
def test_no_more_stay_than_the_policy_asks_for(checkpoints: list[Saved], keep: KeepSpec) -> None:
    multiples = {one.step // keep.every_steps for one in checkpoints} - {0} if keep.every_steps else set()
    most = keep.last + len(multiples) + (keep.best.n if keep.best else 0)
    assert len(reasons(checkpoints, keep)) <= most


@given(saves, policies, st.integers())
def test_the_order_in_which_checkpoints_are_listed_changes_nothing(
    checkpoints: list[Saved], keep: KeepSpec, seed: int
) -> None:
    shuffled = random.Random(seed).sample(checkpoints, len(checkpoints))
    assert reasons(shuffled, keep) == reasons(checkpoints, keep)
    assert disposable(shuffled, keep) == disposable(checkpoints, keep)


@given(
    st.dictionaries(st.integers(0, 300), st.integers(-5, 5) | st.floats(-1e9, 1e9), max_size=25),
    st.integers(1, 5),
    st.sampled_from(["min", "max"]),
)
def test_nothing_that_may_go_is_better_than_one_of_the_best(losses: dict[int, float], n: int, mode: str) -> None:
    kept = reasons([Saved(step, {METRIC: value}) for step, value in losses.items()], best(n, mode))
    sign = 1 if mode == "min" else -1
    ranks = {step: (sign * value, -step) for step, value in losses.items()}
    chosen = {step for step, why in kept.items() if "best" in why}
    assert len(chosen) == min(n, len(losses))
    assert max((ranks[step] for step in chosen), default=()) <= min(
        (ranks[s] for s in losses if s not in chosen), default=(math.inf,)
    )


@given(saves, policies)
def test_deleting_what_may_go_changes_nothing_of_what_stays(checkpoints: list[Saved], keep: KeepSpec) -> None:
    staying = reasons(checkpoints, keep)
    left = [one for one in checkpoints if one.step in staying]
    assert reasons(left, keep) == staying
