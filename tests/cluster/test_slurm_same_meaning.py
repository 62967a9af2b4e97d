"""What each key of the spec means on Slurm: the same as with the local executor (tests/local/test_same_meaning.py)."""

from __future__ import annotations

from helpers.cluster import ClusterSite
from helpers.same_meaning import check_failing_line, check_ranks


def test_ranks_see_what_the_spec_says(site: ClusterSite) -> None:
    check_ranks(site, "slurm")


def test_a_line_of_setup_that_fails_ends_the_attempt_and_is_said(site: ClusterSite) -> None:
    check_failing_line(site, "slurm")
