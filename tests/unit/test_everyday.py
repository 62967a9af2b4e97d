"""Which tests on real runs are for every day, and for which ones a change asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.everyday import CAUSES, DEAR_UNITS, EVERYDAY, TESTS_OF, UNITS, asked_for, is_everyday

from slurmtrain.model.run import run

PROJECT = Path(__file__).resolve().parents[2]
DEAR = "unit/plugins/strategies/test_tensor.py::test_divided_weights_stay_tied_and_frozen[fsdp-sequence]"
OTHER = "cluster/test_slurm_growth.py::test_a_run_goes_on_alone_if_the_node_that_could_join_is_unfit"


def test_each_cause_of_an_end_has_a_test_of_every_day() -> None:
    assert [*CAUSES] == [*run.CAUSES]
    assert all(CAUSES.values())
    assert all(is_everyday(test) for test in EVERYDAY)


def test_of_real_runs_only_the_listed_ones_are_for_every_day_and_most_units_are() -> None:
    assert not is_everyday(OTHER)
    assert not is_everyday("local/test_hangs.py::test_a_rank_that_waits_for_ever_hangs_and_so_does_one[wait]")
    assert is_everyday("cluster/test_slurm_hostlist.py::test_whatever[a-b]")
    assert is_everyday("unit/test_everyday.py::test_whatever")
    assert is_everyday("unit/runtime/training/test_strategies.py::test_whatever")
    assert not is_everyday(DEAR)


@pytest.mark.parametrize(
    ("path", "asks"),
    [
        ("slurmtrain/plugins/growth.py", True),
        ("slurmtrain/errors.py", True),
        ("tests/cluster/test_slurm_growth.py", True),
        ("slurmtrain/runtime/upstreams.py", False),
        ("slurmtrain/ops/query/compare.py", False),
        ("CHANGELOG.md", False),
    ],
)
def test_a_change_asks_for_the_tests_of_the_nearest_part(path: str, asks: bool) -> None:
    assert asked_for(OTHER, [path]) is asks


@pytest.mark.parametrize(
    ("path", "asks"),
    [
        ("slurmtrain/plugins/strategies/tensor.py", True),
        ("slurmtrain/runtime/checkpoint/saver.py", True),
        ("tests/unit/plugins/strategies/test_tensor.py", True),
        ("tests/unit/plugins/strategies/test_pipeline.py", False),
        ("slurmtrain/plugins/growth/files.py", False),
    ],
)
def test_a_change_asks_for_the_dear_unit_tests_of_its_part(path: str, asks: bool) -> None:
    assert asked_for(DEAR, [path]) is asks


def test_dear_unit_tests_have_others_in_their_rooms_and_are_asked_for_by_parts_that_exist() -> None:
    parts = {part for parts in DEAR_UNITS.values() for part in parts}
    assert [part for part in sorted(parts) if not (PROJECT / part).exists()] == []
    for unit in DEAR_UNITS:
        place = PROJECT / "tests" / unit
        assert place.exists()
        others = [path.relative_to(PROJECT / "tests").as_posix() for path in place.parent.rglob("test_*.py")]
        assert any(is_everyday(test) for test in others) or any(each.startswith(unit) for each in UNITS)


def test_parts_and_their_tests_exist() -> None:
    assert [part for part in TESTS_OF if not (PROJECT / part).exists()] == []
    tests = {each for asked in TESTS_OF.values() for each in asked}
    assert [each for each in sorted(tests) if not [*(PROJECT / "tests").glob(f"{each}*")]] == []
