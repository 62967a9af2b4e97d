"""The checkpoints of a run, and how its saves went, from its events."""

from __future__ import annotations

import math

import pytest
from helpers.local_runs import LocalRun
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.checkpoint import BestSpec, KeepSpec, Saved, disposable_steps, reasons_to_keep


def test_a_pruned_checkpoint_is_not_on_disk_and_a_damaged_one_is_not_gone_on_from() -> None:
    sim = LocalRun().created().submitted().started().saved(5).saved(10).saved(15)
    sim.rank("pruned", path="checkpoints/step-5", step=5, why="not kept")
    pruned_at = sim.now
    sim.rank("rejected", step=15, path="checkpoints/step-15", reason="hash differs", aside=None)
    run = sim.fold()
    assert [(one.step, one.complete) for one in run.on_disk] == [(10, True), (15, False)]
    assert [(one.step, one.pruned_at) for one in run.checkpoints] == [(5, pruned_at), (10, None), (15, None)]
    assert run.checkpoint is not None
    assert run.checkpoint.step == 10
    # It is whole if it is verified later.
    newest = sim.command("verified", path="checkpoints/step-15", step=15, reason=None).fold().checkpoint
    assert newest is not None
    assert newest.step == 15
    gone = LocalRun().created().submitted().started().saved(5)
    gone.rank("pruned", path="checkpoints/step-5", step=5, why="not kept").ended("crash", failed_at=150.0)
    run = gone.fold(j1=8)
    assert (run.checkpoint, run.on_disk, run.lost_steps, len(run.checkpoints)) == (None, [], 8, 1)


def test_what_a_save_says_of_itself_is_kept_also_when_it_is_restored() -> None:
    sim = LocalRun().created().submitted().started().submitted(2).started()
    record = {"step": 5, "path": "checkpoints/step-5", "bytes": 10, "seconds": 2.5, "saved_at": 130.0}
    own = {"stall_s": 0.25, "why": "asked", "metrics": {"loss": 0.5, "lr": None}}
    sim.write("attempts/j1.0/rank-0.jsonl", "saved", **record, **own, request="r1")
    kept = {**record, **own, "attempt": 1, "complete": True, "pruned_at": None}
    for verified_at in (None, sim.now + 1):
        [checkpoint] = sim.fold().checkpoints
        assert {name: getattr(checkpoint, name) for name in kept} == kept
        assert (checkpoint.verified, checkpoint.verified_at) == (verified_at is not None, verified_at)
        sim.rank("restored", **record, world_size=1, lost_steps=0)


def test_a_damaged_checkpoint_that_was_set_aside_is_known_by_its_new_path() -> None:
    sim = LocalRun().created().submitted().started().saved(5).saved(10)
    aside = "checkpoints/damaged-step-10"
    sim.rank("rejected", step=10, path="checkpoints/step-10", reason="hash differs", aside=aside)
    rejected_at = sim.now
    run = sim.fold()
    assert [(one.path, one.complete) for one in run.on_disk] == [("checkpoints/step-5", True), (aside, False)]
    assert run.on_disk[1].verified_at == rejected_at
    sim.saved(10)
    assert [(one.path, one.published) for one in sim.fold().on_disk] == [
        ("checkpoints/step-5", True),
        (aside, False),
        ("checkpoints/step-10", True),
    ]
    sim.command("verified", path=aside, step=10, reason=None).command("pruned", path=aside, step=10, why="asked")
    run = sim.fold()
    assert [one.path for one in run.on_disk] == ["checkpoints/step-5", "checkpoints/step-10"]
    assert [(one.complete, one.verified) for one in run.checkpoints if one.path == aside] == [(False, True)]


@pytest.mark.parametrize(("reason", "good"), [(None, True), ("rank-0.pt: its hash differs", False)])
def test_a_person_may_have_a_checkpoint_verified(reason: str | None, good: bool) -> None:
    sim = LocalRun().created().submitted().started().saved(5)
    sim.command("verified", path="checkpoints/step-5", step=5, reason=reason)
    sim.command("verified", path="checkpoints/step-6", step=6, reason="nobody has heard of it")
    run = sim.fold()
    [checkpoint] = run.checkpoints
    assert (checkpoint.complete, checkpoint.verified, checkpoint.verified_at) == (good, good, sim.now - 1)
    assert (run.checkpoint is not None) == good


def test_a_run_that_begins_again_comes_to_the_same_paths_and_both_lives_are_known() -> None:
    sim = LocalRun().created().submitted().started().saved(5)
    sim.command("pruned", path="checkpoints/step-5", step=5, why="put aside")
    sim.submitted(2).started().saved(5)
    run = sim.fold()
    assert [(one.path, one.attempt, one.on_disk) for one in run.checkpoints] == [
        ("checkpoints/step-5", 1, False),
        ("checkpoints/step-5", 2, True),
    ]
    assert run.checkpoint is run.checkpoints[1]


def test_a_checkpoint_that_somebody_thought_deleted_is_back_when_it_is_seen() -> None:
    sim = LocalRun().created().submitted().started()
    record = {"step": 5, "path": "checkpoints/step-5", "bytes": 10, "seconds": 2.5, "saved_at": 130.0}
    sim.rank("saved", **record, why="steps").rank("pruned", path="checkpoints/step-5", step=5, why="not kept")
    sim.command("observed", job_id="j1", restart=0, state="gone", last_seen=1.0, reason="", checkpoints=[record])
    [checkpoint] = sim.fold().checkpoints
    assert (checkpoint.on_disk, checkpoint.why) == (True, "steps")


def test_a_checkpoint_that_nobody_told_of_may_name_its_attempt() -> None:
    sim = LocalRun().created().submitted().started().submitted(2).started()
    record = {"step": 7, "path": "checkpoints/step-7", "bytes": 3, "saved_at": 140.0, "attempt": "j1.0", "why": "stop"}
    sim.command("observed", job_id="j2", restart=0, state="gone", last_seen=1.0, reason="gone", checkpoints=[record])
    [checkpoint] = sim.fold().checkpoints
    assert (checkpoint.why, checkpoint.attempt) == ("stop", 1)


def test_a_checkpoint_that_was_deleted_without_a_word_is_gone_with_the_observation() -> None:
    sim = LocalRun().created().submitted().started().saved(5).saved(10)
    on_disk = {"step": 10, "path": "checkpoints/step-10", "bytes": 10, "seconds": 0.5, "saved_at": 1.0}
    own = {"path": "/w/ckpt-3.pt", "step": 3, "bytes": 1, "saved_at": 1.0}
    sim.node("found", **own)
    sim.command("observed", job_id="j1", restart=0, state="gone", last_seen=1.0, reason="", checkpoints=[on_disk])
    run = sim.fold()
    assert [c.path for c in run.on_disk] == ["/w/ckpt-3.pt", "checkpoints/step-10"]
    assert [(c.path, c.pruned_at) for c in run.checkpoints if not c.on_disk] == [("checkpoints/step-5", sim.now)]


def test_a_file_of_a_users_script_is_of_the_attempt_that_ran_when_it_was_written() -> None:
    sim = LocalRun().created().submitted().started()
    written_at = sim.now + 1
    sim.ended("crash", failed_at=sim.now).submitted(2).started()
    sim.node("found", path="/out/ckpt-3.pt", step=3, bytes=9, saved_at=written_at)
    sim.node("found", path="/out/before.pt", step=1, bytes=9, saved_at=1.0)
    assert [(one.step, one.attempt) for one in sim.fold().checkpoints] == [(1, None), (3, 1)]


# --- saving -------------------------------------------------------------------------------------------------------


def test_a_save_that_failed_is_told_until_one_succeeds() -> None:
    sim = LocalRun().created().submitted().started().saved(400)
    assert sim.fold().save_problem == ""
    sim.rank("save_failed", step=500, reason="no space left on the device", why="interval")
    run = sim.fold()
    assert run.save_problem == "the checkpoint of step 500 failed: no space left on the device"
    assert [attempt.save_problem for attempt in run.attempts] == [run.save_problem]
    assert sim.saved(510).fold().save_problem == ""


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
