"""The sections `checkpoint` and `start_from`, and steps in the names of checkpoints."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.checkpoint import (
    BestSpec,
    KeepSpec,
    Saved,
    StartFromSpec,
    check_step,
    disposable_steps,
    reasons_to_keep,
    step_by_pattern,
    step_in_name,
)
from slurmtrain.model.experiment.kinds import Section
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.spec import read_spec, write_spec


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("step=(", r"'step=\(' is not a regular expression: missing \)"),
        (r"step-\d+", r"has 0 groups; it must have one group for the digits of the step.* a key .* as 'iter_num'"),
        (r"(\d+)-(\d+)", "has 2 groups"),
    ],
)
def test_a_pattern_that_cannot_name_a_step_is_refused_with_what_is_wrong(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_step(pattern)


def test_the_group_of_a_pattern_is_the_step() -> None:
    assert step_by_pattern(r"part-(\d+)", "/out/part-007-of-9") == 7
    assert step_by_pattern(r"part-(\w+)", "/out/part-x") is None
    assert step_by_pattern(r"part-(\d+)", "/out/last.pt") is None
    assert step_by_pattern(r"epoch=(\d+)-step=(?P<step>\d+)", "/out/epoch=3-step=70.pt") == 70


def test_a_plan_from_before_there_were_formats_means_what_it_meant() -> None:
    spec = read_spec({"command": "x", "name": "n", "checkpoint": {"glob": "*.pt"}}, lambda at, message: None)
    plain = write_spec(spec)
    del plain["checkpoint"]["format"], plain["checkpoint"]["step"]
    data = {"schema": 1, "spec": plain, "workdir": "/w", "python": "p", "template": {}}
    assert Plan.from_json(data).spec == spec


KIND = Section(StartFromSpec, nullable=True)


def read(value: object) -> tuple[StartFromSpec | None, list[str]]:
    mistakes: list[str] = []
    spec = KIND.read(value, ("start_from",), lambda at, message: mistakes.append(f"{'.'.join(at)}: {message}"))
    return spec, mistakes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("pretrain", StartFromSpec(run="pretrain")),
        ("6am3shgnnj:40", StartFromSpec(run="6am3shgnnj", step=40)),
        ("pretrain:best", StartFromSpec(run="pretrain", step="best")),
        ({"run": "a", "step": 7, "load": "weights"}, StartFromSpec(run="a", step=7, load="weights")),
    ],
)  # fmt: skip
def test_a_run_and_a_step_are_written_in_one_word_or_as_a_section(value: Any, expected: StartFromSpec | None) -> None:
    spec, mistakes = read(value)
    assert (spec, mistakes) == (expected, [])
    assert read(KIND.write(spec)) == (expected, [])


@pytest.mark.parametrize(
    ("value", "mistake"),
    [
        ("a:b:c", "start_from: 'a:b:c' is not RUN, RUN:STEP or RUN:best"),
        ("a:0", "a step is a positive whole number, or `best`"),
        ({"run": "a", "step": True}, "a step is a positive whole number, or `best`"),
        ({"step": 3}, "start_from.run: this key is required"),
        ({"run": "a", "load": "optimizer"}, "start_from.load: "),
    ],
)  # fmt: skip
def test_anything_else_is_refused_where_it_stands(value: Any, mistake: str) -> None:
    assert any(mistake in each for each in read(value)[1]), read(value)[1]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=1-step=30-val_loss=4.66.ckpt", 30),
        ("step=30-val_loss=4e-05", 30),
        ("run7-epoch=2-step=300.pt", 300),
        ("iter_0000100", 100),
        ("checkpoint-500", 500),
        ("model_0.35_200.pt", 200),
        ("0005000.pt", 5000),
        ("epoch3_100.pt", 100),
        ("ckpt-40.h5", 40),
        ("last.ckpt", None),
        ("epoch=3.ckpt", None),
        ("resnet50.pt", None),
    ],
)  # fmt: skip
def test_a_word_says_which_number_is_the_step(name: str, step: int | None) -> None:
    assert step_in_name(name) == step


# --- which checkpoints stay -------------------------------------------------------------------------------------------

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
    assert reasons_to_keep(checkpoints, keep) == kept
    going = sorted({each.step for each in checkpoints} - set(kept))
    assert disposable_steps(checkpoints[::-1], keep) == going


def test_what_stays_for_a_multiple_stays_though_others_are_deleted_and_more_are_saved() -> None:
    keep = KeepSpec(last=1, every_steps=100)
    steps: list[int] = []
    for step in range(7, 1000, 31):
        steps = sorted(reasons_to_keep(saved(*steps, step), keep))
    assert steps == sorted(reasons_to_keep(saved(*range(7, 1000, 31)), keep))


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, 10**400])
def test_what_is_no_number_is_never_the_best(mode: str, value: float | None) -> None:
    assert list(reasons_to_keep(saved(1, 2, 3, s1=value, s2=0.5), best(2, mode))) == [2, 3]


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
    staying, going = reasons_to_keep(checkpoints, keep), disposable_steps(checkpoints, keep)
    assert sorted([*staying, *going]) == sorted(one.step for one in checkpoints)
    assert going == sorted(going)
    assert all(staying.values())
    newest = sorted(one.step for one in checkpoints)[-keep.last :]
    assert set(newest) <= set(staying)
    assert len(staying) >= min(len(checkpoints), keep.last)


@given(
    st.dictionaries(st.integers(0, 300), st.integers(-5, 5) | st.floats(-1e9, 1e9), max_size=25),
    st.integers(1, 5),
    st.sampled_from(["min", "max"]),
)
def test_nothing_that_may_go_is_better_than_one_of_the_best(losses: dict[int, float], n: int, mode: str) -> None:
    kept = reasons_to_keep([Saved(step, {METRIC: value}) for step, value in losses.items()], best(n, mode))
    sign = 1 if mode == "min" else -1
    ranks = {step: (sign * value, -step) for step, value in losses.items()}
    chosen = {step for step, why in kept.items() if "best" in why}
    assert len(chosen) == min(n, len(losses))
    assert max((ranks[step] for step in chosen), default=()) <= min(
        (ranks[s] for s in losses if s not in chosen), default=(math.inf,)
    )
