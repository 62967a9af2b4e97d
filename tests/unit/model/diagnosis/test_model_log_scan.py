"""Matching the lines of a log, and reading their times and ranks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from helpers.loglines import LINES, hits_of
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.diagnosis.log_scan import is_advice, rank_of, scan_log, time_of


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


def test_a_needle_alone_is_not_enough() -> None:
    text = "we paid the rent DUE TO the landlord\nImportError was caught\nGPU Xid\nCannot allocate memory twice\n"
    assert matching_patterns(text) == set()


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
    assert is_advice(line)
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


def test_an_error_that_ends_with_advice_is_an_error() -> None:
    line = {name: line for name, line, _ in LINES}["cuda-oom"]
    assert not is_advice(line)


def test_only_the_first_and_last_of_repeated_lines_are_kept() -> None:
    text = "".join(f"{number} Broken pipe\n" for number in range(1000))
    lines = [line for _, _, _, line in scan_log(text, limit=3)]
    assert lines == [f"{number} Broken pipe" for number in (0, 1, 2, 997, 998, 999)]


def test_a_line_of_megabytes_is_cut() -> None:
    text = "x" * 3_000_000 + " CUDA out of memory " + "y" * 3_000_000
    [(place, _, _, line)] = scan_log(text)
    assert place == 0
    assert "CUDA out of memory" in line
    assert len(line) < 5000


@given(st.text())
def test_any_text_can_be_scanned(text: str) -> None:
    assert all(hit.text in text for hit in hits_of(text))


@given(st.lists(st.sampled_from([line for _, line, _ in LINES]) | st.text(max_size=20)))
def test_every_matching_line_is_a_line_of_the_text(lines: list[str]) -> None:
    text = "\n".join(lines)
    for place, pattern, _, line in scan_log(text):
        assert text.startswith(line, place)
        assert pattern.regex.search(line)


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


def test_lines_without_a_zone_are_in_the_given_one() -> None:
    zone = timezone(timedelta(hours=-8))
    assert time_of("2026-11-21 12:36:34 x", NEAR, zone) == THEN
    assert time_of("[E1121 12:36:34.0 x", NEAR, zone) == THEN


def test_the_month_of_a_line_of_torch_may_have_one_digit() -> None:
    march = datetime(2026, 3, 21, 2, 7, 8, tzinfo=UTC).timestamp()
    assert time_of("[rank0]:[E321 02:07:08.5 ProcessGroupNCCL.cpp:607] x", march) == march + 0.5


def test_a_line_from_before_new_year_is_of_the_old_year() -> None:
    near = datetime(2027, 1, 1, 0, 0, 5, tzinfo=UTC).timestamp()
    assert time_of("[E1231 23:59:59.0 x", near) == near - 6
    assert time_of("[E101 00:00:04.0 x", near) == near - 1


@given(st.text(), st.floats(0, 4e9))
def test_any_line_has_a_time_or_none(line: str, near: float) -> None:
    at = time_of(line, near)
    assert at is None or isinstance(at, float)


@pytest.mark.parametrize(("line", "rank"), [("[rank3]:[E1121 x", 3), ("[PG 1 Rank 12] x", 12), ("Rank 3 x", None)])
def test_torch_says_which_rank_writes(line: str, rank: int | None) -> None:
    assert rank_of(line) == rank
