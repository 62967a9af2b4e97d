"""Which hit is the root cause, and which rank the others waited for."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.loglines import PROGRESS, WATCHDOG, hit, hits_of
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.diagnosis.patterns import CONFIRMATION
from slurmtrain.model.diagnosis.root_cause import diagnose_hits, find_laggard

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


def test_roots_of_several_logs_without_times_are_in_no_known_order() -> None:
    assert not diagnose_hits([hit("cuda-oom", origin="a"), hit("disk-full", origin="b")]).ordered
    assert not diagnose_hits([hit("cuda-oom"), hit("disk-full", at=9.0, origin="b")]).ordered
    assert diagnose_hits([hit("cuda-oom", origin="a", line=1), hit("disk-full", origin="a", line=0)]).ordered
    assert diagnose_hits([hit("cuda-oom", origin="a"), hit("peer-closed", origin="b")]).ordered
    assert diagnose_hits([hit("disk-full", at=20.0), hit("cuda-oom", at=10.0, origin="b")]).ordered


def test_the_same_error_on_many_ranks_is_one_match() -> None:
    diagnosis = diagnose_hits([hit("cuda-oom", at=10.0 - rank, rank=rank) for rank in range(4)])
    assert diagnosis.root is not None
    assert (diagnosis.root.first.rank, diagnosis.root.count, diagnosis.root.ranks) == (3, 4, [0, 1, 2, 3])
    assert diagnosis.others == []


def test_errors_of_different_gpus_are_separate_matches() -> None:
    text = "NVRM: Xid (PCI:0000:c1:00): 79, gone\nNVRM: Xid (PCI:0000:c1:00): 43, gone\n"
    assert len(diagnose_hits(hits_of(text)).others) == 1


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


@given(st.text())
def test_any_text_can_be_diagnosed(text: str) -> None:
    assert diagnose_hits(hits_of(text)).root is None or hits_of(text)
