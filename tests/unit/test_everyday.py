"""Which tests on real runs are for every day, and for which ones a change asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.everyday import CAUSES, EVERYDAY, TESTS_OF, asked_for, is_everyday

from slurmtrain.model.run import run

PROJECT = Path(__file__).resolve().parents[2]
OTHER = "cluster/test_slurm_growth.py::test_a_run_goes_on_alone_if_the_node_that_could_join_is_unfit"


def test_each_cause_of_an_end_has_a_test_of_every_day() -> None:
    assert [*CAUSES] == [*run.CAUSES]
    assert all(CAUSES.values())
    assert all(is_everyday(test) for test in EVERYDAY)


def test_of_real_runs_only_the_listed_ones_are_for_every_day_and_all_units_are() -> None:
    assert not is_everyday(OTHER)
    assert not is_everyday("local/test_hangs.py::test_a_rank_that_waits_for_ever_hangs_and_so_does_one[wait]")
    assert is_everyday("cluster/test_slurm_hostlist.py::test_whatever[a-b]")
    assert is_everyday("unit/test_everyday.py::test_whatever")


@pytest.mark.parametrize(
    ("path", "asks"),
    [
        ("slurmtrain/runtime/growth/files.py", True),
        ("slurmtrain/errors.py", True),
        ("tests/cluster/test_slurm_growth.py", True),
        ("slurmtrain/runtime/packs/member.py", False),
        ("slurmtrain/ops/query/compare.py", False),
        ("CHANGELOG.md", False),
    ],
)
def test_a_change_asks_for_the_tests_of_the_nearest_part(path: str, asks: bool) -> None:
    assert asked_for(OTHER, [path]) is asks


def test_parts_and_their_tests_exist() -> None:
    assert [part for part in TESTS_OF if not (PROJECT / part).exists()] == []
    tests = {each for asked in TESTS_OF.values() for each in asked}
    assert [each for each in sorted(tests) if not [*(PROJECT / "tests").glob(f"{each}*")]] == []
