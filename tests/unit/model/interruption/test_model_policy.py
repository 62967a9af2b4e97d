"""Whether a run is started again: each rule, and what holds for any history."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.sections import OomSpec, RequeueSpec, write_requeue
from slurmtrain.model.interruption.exit_report import ExitReport
from slurmtrain.model.interruption.policy import (
    DIFFERENT_REPLICAS,
    MAX_DELAY_S,
    BatchMemory,
    Decision,
    Newest,
    PriorEnd,
    committed,
    decide,
    decision,
    failure_signature,
    policy_of,
    prior_ends,
    signature,
)
from slurmtrain.model.run.run import CAUSES, Attempt, Checkpoint

RULES = RequeueSpec()


def ends(*pasts: PriorEnd, **rules: Any) -> Decision:
    """The decision after these ends."""
    return decide(pasts, replace(RULES, **rules))


def trained(cause: str, begin: int, committed: int, **fields: Any) -> PriorEnd:
    """The end of an attempt that finished 5 steps more than it saved."""
    return past(cause, **{"began_at_step": begin, "committed": committed, "reached": committed + 5, **fields})


def past(cause: str, **fields: Any) -> PriorEnd:
    """An end at an arbitrary time."""
    return PriorEnd(cause=cause, **{"at": 1.0, **fields})


def causes(*attempts: Attempt) -> list[str]:
    return [past.cause for past in prior_ends(attempts, [])]


# --- each rule --------------------------------------------------------------------------------------------------


def test_ranks_that_train_models_of_their_own_are_not_started_again_to_hide_it() -> None:
    where = f"1 CheckpointError: 'model.0.weight' {DIFFERENT_REPLICAS} # and #: each trains a model of its own"
    decision = ends(trained("crash", 0, 10, where=where))
    assert (decision.action, "without DDP" in decision.why) == ("stop", True)
    assert ends(trained("crash", 0, 10, where="1 ValueError: nan")).again


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("cause", ["completed", "cancelled"])
def test_completed_and_cancelled_runs_are_never_started_again(cause: str, enabled: bool) -> None:
    decision = ends(trained(cause, 0, 10), enabled=enabled)
    assert not decision.again
    assert cause in decision.why


@pytest.mark.parametrize("cause", sorted({*CAUSES, "unheard-of"} - {"completed", "cancelled", "early", "upstream"}))
def test_nothing_is_started_again_if_the_spec_disables_it(cause: str) -> None:
    assert ends(trained(cause, 0, 10), enabled=False) == Decision("stop", "requeue.enabled is false")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_that_started_before_an_upstream_had_ended_is_always_put_back(enabled: bool) -> None:
    assert decide([], RULES).again
    early = PriorEnd(cause="early", at=0.0)
    assert [ends(*[early] * count, enabled=enabled).again for count in (1, 50)] == [True, True]
    # It uses up no budget either.
    assert ends(*[early] * 50, trained("crash", 0, 10)).again
    # One whose upstream will not complete is not.
    assert not ends(PriorEnd(cause="upstream", at=0.0), enabled=enabled).again


@pytest.mark.parametrize(
    ("memory", "more"), [(1000, 1500), (1001, 1502), (2000, 3000), (2999, 3000), (3000, None), (4000, None)]
)
def test_a_run_out_of_memory_gets_more_up_to_the_limit(memory: int, more: int | None) -> None:
    rules = replace(RULES, oom=OomSpec(mem=1.5, at_most=3000))
    decision = decide([trained("oom", 0, 10)], rules, BatchMemory(memory=memory))
    assert decision.again == (more is not None)
    assert decision.memory == (BatchMemory(memory=more) if more is not None else None)


@pytest.mark.parametrize(
    ("of_gpu", "had", "gets"),
    [
        (True, BatchMemory(memory=1000), BatchMemory(memory=1000, accumulation=2)),
        (True, BatchMemory(accumulation=3), BatchMemory(accumulation=6)),
        (True, BatchMemory(accumulation=5), None),
        (False, BatchMemory(memory=1000), BatchMemory(memory=2000)),
        (False, BatchMemory(memory=3000, accumulation=2), BatchMemory(memory=3000, accumulation=4)),
        (False, BatchMemory(memory=3000, accumulation=8), None),
        (False, BatchMemory(), BatchMemory(accumulation=2)),
    ],
)
def test_a_run_whose_batch_does_not_fit_gets_more_memory_or_divides_it(
    of_gpu: bool, had: BatchMemory, gets: BatchMemory | None
) -> None:
    rules = replace(RULES, oom=OomSpec(at_most=3000, accumulation=2, max_accumulation=8))
    decision = decide([trained("oom", 0, 10, of_gpu=of_gpu)], rules, had)
    assert (decision.again, decision.memory) == (gets is not None, gets)
    if gets is None:
        assert "requeue.oom.max_accumulation is 8" in decision.why


def test_memory_is_not_raised_for_a_gpu_nor_where_nothing_limits_it() -> None:
    rules, had, oom = replace(RULES, oom=OomSpec(at_most=4096)), BatchMemory(memory=1024), trained("oom", 0, 10)
    of_gpu = decide([trained("oom", 0, 10, of_gpu=True)], rules, had)
    assert (of_gpu.again, "GPU memory" in of_gpu.why) == (False, True)
    for refused in (decide([oom], rules, BatchMemory()), decide([oom], rules, None), ends(oom)):
        assert not refused.again
    assert decide([oom], replace(rules, enabled=False), had).why.startswith("requeue.")
    why = decide([oom], rules, BatchMemory(memory=8192)).why
    assert why == "it ran out of memory with 8GB, and requeue.oom.at_most is 4GB"


@given(st.integers(1, 10**7), st.integers(1, 10**7), st.floats(1.01, 999), st.none() | st.integers(2, 999))
def test_memory_and_parts_are_raised_a_limited_number_of_times_and_never_above_the_limits(
    memory: int, at_most: int, factor: float, parts: int | None
) -> None:
    oom = OomSpec(mem=factor, at_most=at_most, accumulation=parts)
    had, starts = BatchMemory(memory=memory), 0
    while (decision := decide([trained("oom", 0, 10)], replace(RULES, oom=oom), had)).again:
        gets = decision.memory
        assert gets is not None
        assert gets.memory is not None
        assert had.memory is not None
        assert had.memory < gets.memory <= at_most or had.accumulation < gets.accumulation <= oom.max_accumulation
        assert len(gets.overrides(had)) == 1
        had, starts = gets, starts + 1
        assert starts <= 2_000


@pytest.mark.parametrize(
    ("executor", "resources", "had"),
    [
        ("slurm", {"mem": "4096M", "accumulation": 2}, BatchMemory(memory=4096, accumulation=2)),
        ("slurm", {"mem": None}, BatchMemory()),
        ("slurm", {}, BatchMemory()),
        ("slurm", {"mem": "much", "accumulation": "x"}, BatchMemory()),
        ("local", {"mem": "4096M", "accumulation": 4}, BatchMemory(accumulation=4)),
    ],
)
def test_only_a_cluster_limits_memory_to_what_was_requested(
    executor: str, resources: dict[str, Any], had: BatchMemory
) -> None:
    assert BatchMemory.of_attempt(executor, resources) == had


def test_a_time_limit_is_followed_by_another_start_only_after_a_new_checkpoint() -> None:
    decision = ends(trained("timeout", 0, 10))
    assert decision.again
    assert "from step 10" in decision.why
    decision = ends(past("timeout", began_at_step=10, committed=10, reached=40))
    assert not decision.again
    assert "resources.time" in decision.why


def test_a_checkpoint_of_an_earlier_round_of_the_same_attempt_counts_at_its_time_limit() -> None:
    rounds = [trained("crash", 0, 10, in_place=True), trained("crash", 10, 10, in_place=True, reached=17)]
    assert ends(*rounds, trained("timeout", 10, 10)).again
    other_attempt = [replace(one, in_place=False) for one in rounds]
    assert not ends(*other_attempt, trained("timeout", 10, 10)).again


def test_a_time_limit_of_a_script_that_does_not_tell_its_steps_is_tried_three_times() -> None:
    silent = past("timeout")
    assert ends(silent).again
    assert ends(silent, silent).again
    assert not ends(silent, silent, silent).again


@pytest.mark.parametrize("cause", ["node_fail", "lost", "preflight", "unheard-of"])
def test_failures_of_nodes_are_tried_again_up_to_their_limit(cause: str) -> None:
    row = [past(cause, at=float(index)) for index in range(11)]
    assert ends(*row[:10]) == Decision("requeue", ends(*row[:10]).why, 0.0)
    assert not ends(*row).again
    assert "max_node_failures is 10" in ends(*row).why


def test_a_new_checkpoint_counts_failures_of_nodes_anew() -> None:
    row = [past("node_fail")] * 10
    assert ends(*row, trained("node_fail", 0, 10)).again
    assert "1 of 10" in ends(*row, trained("node_fail", 0, 10)).why
    assert not ends(*row, past("preempted"), past("node_fail")).again


def test_crashes_wait_twice_as_long_each_time_and_end_at_their_limit() -> None:
    row = [trained("crash", 0, 10)]
    assert ends(*row).delay_s == 30
    row.append(trained("hang", 10, 10))
    assert ends(*row).delay_s == 60
    row.append(trained("crash", 10, 20))
    assert ends(*row).delay_s == 30
    row.append(trained("crash", 20, 30))
    assert not ends(*row).again
    assert ends(*row, max_failures=4).again


def test_a_pause_is_an_hour_at_most() -> None:
    row = [trained("hang", 0, 10), trained("hang", 10, 10, reached=11)]
    assert ends(*row, backoff_s=3000.0).delay_s == MAX_DELAY_S
    assert ends(trained("crash", 0, 10), backoff_s=1e9).delay_s == MAX_DELAY_S


@pytest.mark.parametrize("fields", [{"reached": 0}, {"reached": None}, {"reached": 40, "began_at_step": 40}])
def test_a_crash_before_the_first_step_ends_a_run_at_once(fields: dict[str, Any]) -> None:
    decision = ends(past("crash", where="NameError: name 'x' is not defined", **fields))
    assert not decision.again
    assert "before it finished a step" in decision.why


def test_a_crash_from_outside_or_of_a_script_that_has_trained_before_is_tried_again() -> None:
    assert ends(past("crash", reached=0, foreign=True)).again
    assert ends(trained("preempted", 0, 10), past("crash", began_at_step=10, committed=10, reached=10)).again
    # It has checkpoints, but no session.
    assert ends(past("crash", began_at_step=10, committed=10)).again


def test_the_same_failure_at_the_same_step_twice_ends_a_run() -> None:
    first = trained("crash", 0, 10, where="ValueError: nan", reached=17)
    again = trained("crash", 10, 10, where="ValueError: nan", reached=17)
    assert not ends(first, again).again
    assert "twice at step 17 in the same way (ValueError: nan)" in ends(first, again).why
    assert not ends(first, trained("preempted", 10, 10), again).again
    for other in (replace(again, reached=18), replace(again, where="other"), replace(again, committed=15)):
        assert ends(first, other).again
    assert ends(replace(first, where=""), replace(again, where="")).again
    # A checkpoint in between lets the run continue.
    assert ends(first, trained("preempted", 10, 16), replace(again, began_at_step=16, committed=16)).again


def test_three_ends_in_a_row_without_a_new_checkpoint_end_a_run() -> None:
    row = [trained("crash", 10, 10, reached=11), past("lost", began_at_step=10, committed=10)]
    last = trained("hang", 10, 10, reached=13)
    saved, preempted = trained("preempted", 0, 10), trained("preempted", 10, 10)
    assert ends(saved, *row).again
    assert not ends(saved, *row, last).again
    assert "(crash, lost, hang) without a new checkpoint after step 10" in ends(saved, *row, last).why
    assert not ends(saved, *row, preempted, last).again
    assert ends(saved, *row, replace(last, committed=12)).again
    # A preemption is not one of the three.
    crash = trained("crash", 10, 10, foreign=True)
    assert ends(saved, crash, preempted, replace(crash, reached=11)).again


@pytest.mark.parametrize("begin", [0, 10])
def test_a_checkpoint_is_new_only_once_and_only_to_whoever_did_not_begin_with_it(begin: int) -> None:
    """A script with its own kind of checkpoints does not say what it went on from."""
    stuck = past("timeout", began_at_step=begin, committed=10)
    assert not ends(trained("preempted", 0, 10), stuck, stuck, stuck).again
    assert ends(stuck, stuck, stuck).again == (begin == 0)


def test_three_failures_of_nodes_are_poison_only_where_all_came_at_the_same_step() -> None:
    same = trained("node_fail", 10, 10, reached=13)
    saved = trained("preempted", 0, 10)
    assert not ends(saved, same, same, same).again
    assert "at step 13" in ends(saved, same, same, same).why
    assert ends(saved, same, same, replace(same, reached=12)).again
    at_begin = replace(same, reached=10)
    assert ends(saved, at_begin, at_begin, at_begin).again


# --- signatures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("rank 3 exited with code 1: KeyError: 17", "rank 0 exited with code 1: KeyError: 4"),
        ("Tensor at 0x7f3a10 is bad", "Tensor at 0xdeadbeef is bad"),
        ("no /tmp/torch_12345/a", "no  /tmp/torch_99/a\n"),
        ("blob 3fa9c01b2d missing", "blob 00b1c2d3e4f5 missing"),
        ("loss 1.5e-3 at 10.0.0.1:29500", "loss 2.25 at 10.11.0.12:1"),
    ],
)
def test_failures_that_differ_in_numbers_only_have_the_same_signature(first: str, second: str) -> None:
    assert signature(first) == signature(second)
    assert signature("KeyError: 'added'") != signature("KeyError: 'faded'")


# --- what counts of a run ------------------------------------------------------------------------------------------


def attempt(cause: str | None = "crash", at: float = 100.0, **more: Any) -> Attempt:
    fields: dict[str, Any] = {"number": 1, "job_id": "7", "restart": 0, "cause": cause, "ended_at": at}
    return Attempt(**{**fields, "state": "failed" if cause else "running", **more})


def checkpoint(step: int, saved_at: float, **more: Any) -> Checkpoint:
    return Checkpoint(step, f"checkpoints/step-{step}", 1, saved_at, 1.0, **more)


def restart(cause: str = "crash", at: float = 50.0, **more: Any) -> dict[str, Any]:
    return {"at": at, "round": 1, "past": {"cause": cause, "began_at_step": 1, "committed": 2, **more}}


# --- which ends count -----------------------------------------------------------------------------------------------


def test_every_end_counts_and_an_attempt_under_way_has_none() -> None:
    assert causes(attempt("node_fail"), attempt(None, restart=1)) == ["node_fail"]
    assert causes() == []
    [lost] = prior_ends([attempt(None, state="lost")], [])
    assert (lost.cause, lost.foreign) == ("lost", True)
    # A restart without details is skipped.
    assert causes(attempt("oom", restarts=({"at": 1.0, "round": 1},))) == ["oom"]


def test_ends_before_a_person_started_the_run_again_do_not_count() -> None:
    by_hand, by_sync = attempt("oom", job_id="8", submission=2, asked_by="resume"), attempt("hang", job_id="9")
    synced = replace(by_sync, submission=3, asked_by="sync")
    assert causes(attempt("crash"), by_hand, synced) == ["oom", "hang"]
    # A later start of the same job is not one by a person.
    first = attempt("crash", asked_by="resume")
    assert causes(first, attempt("preempted", restart=1, asked_by="resume")) == ["crash", "preempted"]


def test_restarts_in_place_count_before_the_end_of_their_attempt() -> None:
    [first, second] = prior_ends([attempt("oom", restarts=(restart("hang"),))], [])
    assert (first.cause, first.in_place, first.at, first.began_at_step, first.committed) == ("hang", True, 50.0, 1, 2)
    assert (second.cause, second.in_place) == ("oom", False)
    # They count as long as the attempt is under way too.
    assert causes(attempt(None, restarts=(restart(), restart("node_fail")))) == ["crash", "node_fail"]


def test_an_end_that_has_just_happened_replaces_the_journaled_one_of_its_attempt() -> None:
    """Other nodes may have journaled their ends before node 0 asks the policy."""
    earlier, own = attempt("node_fail"), attempt("crash", restart=1, restarts=(restart("hang"),))
    latest = PriorEnd(cause="preempted", at=101.0)
    ends = prior_ends([earlier, own], [], latest, own.key)
    assert [end.cause for end in ends] == ["node_fail", "hang", "preempted"]
    assert ends[-1] is latest


def test_an_agents_report_is_weighed_as_its_journaled_end_would_be() -> None:
    failures = [{"signal": "SIGKILL", "exit_code": None, "error": None, "last_lines": ["step 41"]}]
    report = ExitReport(cause="crash", reason="rank 0 was killed by SIGKILL", failures=failures)
    latest = PriorEnd.of_report(report, at=100.0, began=Newest(5), left=Newest(20), reached=41)
    [journaled] = prior_ends([attempt("crash", round_step=5, last_step=41, failures=failures)], [checkpoint(20, 50.0)])
    assert latest == journaled


# --- what of them ---------------------------------------------------------------------------------------------------


def test_an_end_tells_where_it_began_how_far_it_came_and_what_it_left() -> None:
    failures = [{"signal": "SIGKILL", "exit_code": None, "error": None, "last_lines": ["step 41", ""]}]
    saved = [checkpoint(10, 50.0), checkpoint(20, 100.5), checkpoint(30, 200.0)]
    [past] = prior_ends([attempt("crash", round_step=5, last_step=41, failures=failures)], saved)
    assert past == PriorEnd(
        cause="crash", at=100.0, began_at_step=5, committed=20, reached=41, where="SIGKILL step #", foreign=True
    )


def test_deleted_checkpoints_count_as_committed_and_damaged_ones_do_not() -> None:
    saved = [checkpoint(10, 1.0, pruned_at=2.0), checkpoint(20, 1.0, complete=False)]
    assert committed(saved, 5.0) == 10
    assert committed([], 5.0) == 0


@pytest.mark.parametrize(
    ("failure", "where"),
    [
        ({"exit_code": 1, "error": "ValueError: 12", "last_lines": ["x"]}, "# ValueError: #"),
        ({"exit_code": 1, "error": None, "last_lines": ["a 7", "  "]}, "# a #"),
        ({"exit_code": 3}, "#"),
        ({"signal": "SIGSEGV", "last_lines": None}, "SIGSEGV"),
    ],
)
def test_a_failure_is_recognized_by_its_error_or_the_last_line_of_its_log(failure: dict[str, Any], where: str) -> None:
    assert failure_signature([failure, {"error": "another"}]) == where
    assert failure_signature([]) == ""


# --- what follows ---------------------------------------------------------------------------------------------------


def test_the_policy_is_that_of_the_last_attempt() -> None:
    strict = attempt("node_fail", policy=write_requeue(RequeueSpec(enabled=False)))
    lenient = attempt("node_fail", policy=write_requeue(RequeueSpec()), restart=1)
    assert decision([strict, lenient], []).again
    assert not decision([lenient, strict], []).again
    assert policy_of(attempt(policy=None)) == RequeueSpec()
    assert policy_of(attempt(policy={"max_failures": 7, "of_another_version": 1})).max_failures == 7


def test_a_time_limit_that_ended_only_what_served_node_0_would_end_it_again() -> None:
    served = past("timeout", began_from="a", left="b", node_0_completed=True)
    assert ends(replace(served, node_0_completed=False)).again
    assert not ends(served).again
    assert "set 'completed_by: node0'" in ends(served).why
