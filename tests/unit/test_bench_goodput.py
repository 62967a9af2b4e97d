"""What the comparison of goodput makes of logs and of Slurm's accounting: small logs whose answers are known."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from helpers.script_modules import load_script


@pytest.fixture(scope="module")
def log() -> ModuleType:
    """The part without a cluster."""
    return load_script("benchmarks/_goodput_log.py")


# Steps 1 to 3 in process 7, and, after a checkpoint of step 2, steps 3 and 4 in process 8.
LOG = "10.0 7 1\n10.1 7 2\n10.2 7 3\n20.0 8 3\n20.1 8 4\n"


def test_a_step_that_is_being_written_is_not_read(log: ModuleType) -> None:
    assert log.parse(LOG + "20.2 8") == log.parse(LOG)
    assert log.parse(LOG)[-1] == (20.1, 8, 4)


def test_a_log_reads_back_as_it_was_written(log: ModuleType, tmp_path: Path) -> None:
    first, second = log.StepLog(tmp_path, 0), log.StepLog(tmp_path, 1)
    for step in (1, 2):
        first.finished(step)
        second.finished(step)
    assert [line.step for line in log.read(tmp_path)] == [1, 2]
    assert not (tmp_path / "done").exists()
    first.finish()
    assert (tmp_path / "done").exists()


def test_lost_steps_are_those_done_again(log: ModuleType) -> None:
    lines = log.parse(LOG)
    assert log.lost_steps(lines) == 1
    assert log.missing_steps(lines, 4) == []
    assert log.missing_steps(lines, 6) == [5, 6]


def test_a_job_is_back_with_the_first_step_of_another_process(log: ModuleType) -> None:
    lines = log.parse(LOG)
    # Steps that the process hit still finishes within its grace do not count.
    assert log.first_after(lines, 10.05) == (20.0, 8, 3)
    assert log.first_after(lines, 20.05) is None


def test_a_step_takes_what_lies_between_two_of_one_process(log: ModuleType) -> None:
    assert log.step_seconds(log.parse(LOG)) == pytest.approx(0.1)


def test_the_trace_stands_still_while_nothing_is_trained(log: ModuleType) -> None:
    fault = log.Fault("preempt", 5.0)
    lines = log.parse(LOG)
    assert log.due(fault, [], None) is None
    assert log.due(fault, lines[:3], None) == 15.0
    assert log.due(fault, lines[:3], 10.15) is None
    assert log.due(fault, lines, 10.15) == 25.0


def test_one_seed_gives_one_trace(log: ModuleType) -> None:
    faults = log.trace(log.FULL, 1, 9.0, 14.0)
    assert faults == log.trace(log.FULL, 1, 9.0, 14.0) != log.trace(log.FULL, 2, 9.0, 14.0)
    assert [fault.kind for fault in faults] == list(log.FULL)
    assert all(9.0 <= fault.after_s <= 14.0 for fault in faults)


def test_the_rank_that_is_hit_is_on_the_last_node(log: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text('["node3", 12]')
    (tmp_path / "rank-1.json").write_text('["node1", 11]')
    assert log.victim(tmp_path) == ("node3", 12)


def test_every_start_of_a_job_counts_with_all_its_nodes(log: ModuleType) -> None:
    sacct = (
        "ours-1|PREEMPTED|100|150|2\nours-1|CANCELLED by 0|160|170|2\n"
        "ours-1|PENDING|Unknown|Unknown|2\nothers|COMPLETED|0|9999|4\n"
    )
    starts = log.starts(sacct, "ours")
    assert [start.state for start in starts] == ["PREEMPTED", "CANCELLED"]
    assert log.node_seconds(starts) == 120.0


def test_a_start_that_has_not_ended_cannot_be_counted(log: ModuleType) -> None:
    with pytest.raises(ValueError, match="RUNNING"):
        log.starts("ours|RUNNING|100|Unknown|2\n", "ours")


def test_a_start_that_accounting_has_lost_counts_as_it_was_seen(log: ModuleType) -> None:
    accounted = [log.Start(100, 150, 2, "REQUEUED"), log.Start(300, 350, 2, "COMPLETED")]
    queued = [log.Start(101, 148, 2, "UNACCOUNTED"), log.Start(200, 250, 2, "UNACCOUNTED")]
    assert log.complete(accounted, queued) == [accounted[0], queued[1], accounted[1]]


def test_a_hand_is_needed_once_a_job_has_been_gone_for_so_long(log: ModuleType) -> None:
    hand = log.Hand(gone_after_s=30.0, stuck_after_s=150.0)
    assert hand.needed(100.0, in_queue=False, last_step_t=99.0) is None
    assert hand.needed(120.0, in_queue=True, last_step_t=99.0) is None
    assert hand.needed(125.0, in_queue=False, last_step_t=99.0) is None
    assert hand.needed(155.0, in_queue=False, last_step_t=99.0) == "gone"
    hand.lent(156.0)
    assert hand.needed(157.0, in_queue=False, last_step_t=99.0) is None


def test_a_hand_is_needed_where_a_job_stands_still(log: ModuleType) -> None:
    hand = log.Hand(gone_after_s=30.0, stuck_after_s=150.0)
    hand.lent(100.0)
    assert hand.needed(249.0, in_queue=True, last_step_t=0.0) is None
    assert hand.needed(250.0, in_queue=True, last_step_t=0.0) == "stuck"
    assert hand.needed(250.0, in_queue=True, last_step_t=200.0) is None


def test_ends_are_counted_in_the_order_in_which_they_came(log: ModuleType) -> None:
    assert log.counted(["PREEMPTED", "FAILED", "PREEMPTED"]) == "2 PREEMPTED, 1 FAILED"
