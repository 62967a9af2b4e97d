"""Which hit is the root cause, and which rank the others waited for."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from helpers.loglines import BY_NAME, LINES, PROGRESS, WATCHDOG, hit, hits_of

from slurmtrain.model.diagnosis.patterns import CASCADE, CONFIRMATION, PATTERNS, ROOT, XIDS, explain_xid
from slurmtrain.model.diagnosis.root_cause import diagnose_hits, find_laggard, rank_of, reports, scan_log, time_of

# --- the root ---------------------------------------------------------------------------------------------------------


REFUSED, LATER = hit("nccl-connect", at=10.0), hit("cuda-oom", at=12.0, origin="b")
TASK_FAILED = hits_of("error: *** STEP 7.0 CANCELLED DUE TO TASK FAILURE ***\n")


@pytest.mark.parametrize(
    ("hits", "root", "others"),
    [
        # The earliest root wins.
        ([hit("disk-full", at=20.0), hit("cuda-oom", at=10.0, origin="b"), hit("peer-closed", at=5.0)], "cuda-oom",
         "peer-closed disk-full"),
        # What only follows, a note, and that a task failed, is none.
        ([hit("peer-closed", at=1.0), hit("nccl-watchdog", at=2.0, groups=("1", "X"))], None,
         "peer-closed nccl-watchdog"),
        ([hit("slow-reverse-dns", at=1.0), hit("obsolete", at=2.0)], None, None),
        (TASK_FAILED, None, None),
        # A broken connection is one only if it failed first, as far as that is known.
        ([REFUSED, hit("cuda-oom", at=12.0, exact=False, origin="b")], "cuda-oom", None),
        ([REFUSED, LATER], "nccl-connect", None),
        ([REFUSED], "nccl-connect", ""),
        # Lines without times are in their order, and come after one with a time.
        ([hit("cuda-oom", line=9), hit("disk-full", line=3)], "disk-full", None),
        ([hit("cuda-oom"), hit("disk-full", at=9.0, origin="b")], "disk-full", None),
    ],
)  # fmt: skip
def test_the_earliest_root_wins(hits: list[Any], root: str | None, others: str | None) -> None:
    diagnosis = diagnose_hits(hits)
    assert (diagnosis.root and diagnosis.root.first.name) == root
    if others is not None:
        assert [other.first.name for other in diagnosis.others] == others.split()


def test_slurms_last_word_takes_the_place_of_a_missing_root() -> None:
    text = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T20:36:34 DUE TO TIME LIMIT ***\n"
    diagnosis = diagnose_hits([*hits_of(text), hit("peer-closed")])
    assert diagnosis.root is not None
    assert diagnosis.root.first.role == CONFIRMATION
    assert "resources.time" in diagnosis.root.first.fix
    with_root = diagnose_hits([*hits_of(text), hit("cuda-oom", origin="b")])
    assert with_root.root is not None
    assert with_root.root.first.name == "cuda-oom"


def test_the_same_error_on_many_ranks_is_one_match() -> None:
    diagnosis = diagnose_hits([hit("cuda-oom", at=10.0 - rank, rank=rank) for rank in range(4)])
    assert diagnosis.root is not None
    assert (diagnosis.root.first.rank, diagnosis.root.count, diagnosis.root.ranks) == (3, 4, [0, 1, 2, 3])
    assert diagnosis.others == []


# --- who is behind ----------------------------------------------------------------------------------------------------


def progress(*completed: int, group: int = 0) -> str:
    return "".join(PROGRESS.format(rank, 9, done, group) + "\n" for rank, done in enumerate(completed))


@pytest.mark.parametrize(
    ("text", "ranks", "behind", "why"),
    [
        (progress(811, 811, 809, 811), 4, [2], "rank 2 had completed collective 809, others 811"),
        (progress(811, 811, 811), 4, [3], "rank 3 wrote nothing while 3 others waited"),
        # Where progress is not logged, sequence numbers decide.
        ("\n".join(WATCHDOG.format(rank, seq) for rank, seq in ((0, 12), (1, 11), (2, 12))), 3, [1], ""),
        # Collectives are compared within their group.
        (progress(5, 5, group=0) + progress(90, 90, group=1), 2, None, ""),
    ],
)
def test_the_rank_with_the_fewest_collectives_is_behind(
    text: str, ranks: int, behind: list[int] | None, why: str
) -> None:
    suspect = find_laggard(hits_of(text), range(ranks))
    assert (suspect and suspect.ranks) == behind
    assert suspect is None or why in suspect.why


@pytest.mark.parametrize("ranks", [range(3), range(100), ()])
def test_no_rank_is_named_without_a_difference(ranks: Any) -> None:
    assert find_laggard(hits_of(progress(7, 7, 7)), ranks) is None
    assert find_laggard([], ranks) is None


# --- matching the lines of a log, and reading their times and ranks -----------------------------------------------


def matching_patterns(text: str) -> set[str]:
    return {pattern.name for _, pattern, _, _ in scan_log(text)}


# --- matching ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "line", "cause"), LINES)
def test_each_pattern_matches_its_lines_among_others(name: str, line: str, cause: str) -> None:
    text = f"step 1 loss 0.3\n{line}\nstep 2 loss 0.2\n"
    hits = {hit.name: hit for hit in hits_of(text)}
    assert name in hits
    assert cause in hits[name].cause
    assert hits[name].text == line
    assert hits[name].line == len("step 1 loss 0.3\n")
    assert "{" not in hits[name].cause + hits[name].fix


@pytest.mark.parametrize(
    "line",
    [
        "Hint: if you see CUDA out of memory, use smaller batches",
        "Consider a smaller batch if you get CUDA out of memory",
        "If you see No space left on device, clean the cache",
        "[rank0]: Please raise the limit when ibv_reg_mr_iova2 failed",
        "2026-11-21 20:36:34,123 WARNING Try NCCL_SOCKET_IFNAME after No route to host",
        "Setting NCCL_IB_DISABLE=1 may help with: ibv_modify_qp failed with error Connection timed out",
    ],
)
def test_lines_of_advice_are_skipped(line: str) -> None:
    assert not reports(line)
    assert matching_patterns(f"{line}\n") == set()


@pytest.mark.parametrize(
    "line",
    [
        '[rank3]:     raise torch.OutOfMemoryError("CUDA out of memory")',
        "    except torch.OutOfMemoryError:",
        '    if "No space left on device" in str(error):',
        "# CUDA out of memory",
    ],
)
def test_source_lines_of_a_traceback_are_skipped(line: str) -> None:
    assert matching_patterns(f"Traceback\n{line}\n") == set()


def test_only_the_first_and_last_of_repeated_lines_are_kept() -> None:
    text = "".join(f"{number} Broken pipe\n" for number in range(1000))
    lines = [line for _, _, _, line in scan_log(text)]
    assert lines == [f"{number} Broken pipe" for number in (*range(20), *range(980, 1000))]


def test_a_line_of_megabytes_is_cut() -> None:
    text = "x" * 3_000_000 + " CUDA out of memory " + "y" * 3_000_000
    [(place, _, _, line)] = scan_log(text)
    assert place == 0
    assert "CUDA out of memory" in line
    assert len(line) < 5000


# --- times and ranks --------------------------------------------------------------------------------------------------

NEAR = datetime(2026, 11, 21, 20, 40, tzinfo=UTC).timestamp()
THEN = datetime(2026, 11, 21, 20, 36, 34, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("line", "at"),
    [
        ("2026-11-21T20:36:34Z x", THEN),
        ("2026-11-21T20:36:34.250+00:00 x", THEN + 0.25),
        ("2026-11-21T22:36:34+02:00 x", THEN),
        ("submitit ERROR (2026-11-21 20:36:34,500) - x", THEN + 0.5),
        ("[2026-11-21 20:36:34] n1:7:9 [0] NCCL WARN x", THEN),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T20:36:34 DUE TO TIME LIMIT ***", THEN),
        ("[rank3]:[E1121 20:36:34.125000000 ProcessGroupNCCL.cpp:616] x", THEN + 0.125),
        ("W1121 20:36:34.500000 3371 torch/distributed/elastic/agent.py:9] x", THEN + 0.5),
        ("[ 9301.448] NVRM: Xid (PCI:0000:c1:00): 79", None),
        ("2026-13-41T20:36:34 x", None),
        ("W9999 20:36:34.500000 x", None),
        ("loss 0.5", None),
    ],
)
def test_the_time_of_a_line_is_read_from_it(line: str, at: float | None) -> None:
    assert time_of(line, NEAR) == (None if at is None else pytest.approx(at, abs=1e-6))


def test_a_line_from_before_new_year_is_of_the_old_year() -> None:
    near = datetime(2027, 1, 1, 0, 0, 5, tzinfo=UTC).timestamp()
    assert time_of("[E1231 23:59:59.0 x", near) == near - 6
    assert time_of("[E101 00:00:04.0 x", near) == near - 1


@pytest.mark.parametrize(("line", "rank"), [("[rank3]:[E1121 x", 3), ("[PG 1 Rank 12] x", 12), ("Rank 3 x", None)])
def test_torch_says_which_rank_writes(line: str, rank: int | None) -> None:
    assert rank_of(line) == rank


# --- the table of known log lines ---------------------------------------------------------------------------------


def test_every_pattern_has_a_line_here() -> None:
    assert {name for name, _, _ in LINES} == set(BY_NAME)
    assert len(BY_NAME) == len(PATTERNS)


@pytest.mark.parametrize("number", sorted(XIDS))
def test_an_xid_says_whose_fault_it_is(number: int) -> None:
    role, cause, fix = explain_xid(number, "0000:c1:00")
    assert cause.startswith(f"Xid {number} of GPU 0000:c1:00: ")
    gpu = {48, 63, 64, 74, 79, 92, 95, 119, 120}
    assert ("exclude the node" in fix) is (number in gpu)
    assert role == (CASCADE if number == 45 else ROOT)
