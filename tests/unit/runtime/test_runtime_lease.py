"""The lease of a run: one attempt of one submission has it, and whatever came before is fenced off."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import PlaceError
from slurmtrain.model.layout import RunDir
from slurmtrain.runtime.lease import claim, grant, granted_to, holds


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_a_run_that_was_never_submitted_has_no_lease(run: RunDir) -> None:
    assert granted_to(run) is None
    assert not holds(run.attempt("7", 0))
    assert not claim(run.attempt("7", 0), 1)


def test_a_granted_lease_is_claimed_by_an_attempt_of_that_submission(run: RunDir) -> None:
    grant(run.submission(1))
    assert granted_to(run) == 1
    assert not holds(run.attempt("7", 0))
    assert claim(run.attempt("7", 0), 1)
    assert holds(run.attempt("7", 0))
    assert granted_to(run) == 1


def test_an_attempt_may_claim_its_lease_again(run: RunDir) -> None:
    grant(run.submission(1))
    assert claim(run.attempt("7", 0), 1)
    assert claim(run.attempt("7", 0), 1)


def test_a_job_that_comes_to_life_late_can_neither_train_nor_publish(run: RunDir) -> None:
    grant(run.submission(1))
    assert claim(run.attempt("7", 0), 1)
    grant(run.submission(2))
    assert not holds(run.attempt("7", 0))
    assert not claim(run.attempt("7", 0), 1)
    assert claim(run.attempt("8", 0), 2)
    assert not claim(run.attempt("7", 1), 1)
    assert holds(run.attempt("8", 0))


def test_a_later_start_of_the_same_job_takes_the_lease_and_the_earlier_one_cannot_take_it_back(run: RunDir) -> None:
    grant(run.submission(1))
    assert claim(run.attempt("7", 0), 1)
    assert claim(run.attempt("7", 1), 1)
    assert not holds(run.attempt("7", 0))
    assert not claim(run.attempt("7", 0), 1)
    assert holds(run.attempt("7", 1))


def test_starts_are_told_apart_by_number_and_not_by_spelling(run: RunDir) -> None:
    grant(run.submission(1))
    assert claim(run.attempt("7", 9), 1)
    assert claim(run.attempt("7", 10), 1)
    assert not claim(run.attempt("7", 9), 1)


@pytest.mark.parametrize("job", ["12_3", "local-abc", "a.b"])
def test_any_job_id_can_hold_a_lease(run: RunDir, job: str) -> None:
    grant(run.submission(1))
    assert claim(run.attempt(job, 2), 1)
    assert holds(run.attempt(job, 2))
    assert not claim(run.attempt(job, 1), 1)


def test_a_lease_that_cannot_be_read_is_nobodys_to_guess(run: RunDir) -> None:
    run.lease.write_text("{")
    with pytest.raises(PlaceError, match=r"lease\.json"):
        holds(run.attempt("7", 0))


moves = st.tuples(st.sampled_from(["grant", "claim"]), st.integers(1, 3), st.integers(0, 3))


@given(st.lists(moves, max_size=12))
def test_the_lease_only_ever_goes_forward(
    tmp_path_factory: pytest.TempPathFactory, done: list[tuple[str, int, int]]
) -> None:
    run = RunDir(tmp_path_factory.mktemp("lease"))
    current, holder = 0, -1  # the submission, and the restart of its job that has claimed it
    for move, submission, restart in done:
        attempt = run.attempt(str(submission), restart)
        if move == "grant":
            # Commands give each submission a number of its own, and grant it once.
            if submission > current:
                grant(run.submission(submission))
                current, holder = submission, -1
        else:
            may = submission == current and restart >= holder
            assert claim(attempt, submission) is may
            holder = restart if may else holder
        held = [(s, r) for s in range(1, 4) for r in range(4) if holds(run.attempt(str(s), r))]
        assert held == ([(current, holder)] if holder >= 0 else [])
        assert granted_to(run) == (current or None)
