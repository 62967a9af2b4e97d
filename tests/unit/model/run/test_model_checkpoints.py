"""The checkpoints of a run, and how its saves went, from its events."""

from __future__ import annotations

import pytest
from helpers.local_runs import LocalRun


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
