"""Chains of runs as a tree."""

from __future__ import annotations

from slurmtrain.model.run.chain.tree import tree_order


def test_each_run_stands_once_below_the_last_of_those_that_it_starts_after() -> None:
    above = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"], "e": ["a", "d"], "x": []}
    assert list(tree_order(above, ["d"]).items()) == [("a", 0), ("b", 1), ("c", 1), ("d", 2), ("e", 3), ("x", 0)]


def test_chains_come_in_the_order_in_which_they_are_wanted() -> None:
    above = {"a": [], "b": ["a"], "c": [], "d": ["c"]}
    assert list(tree_order(above, ["d", "b"])) == ["c", "d", "a", "b"]


def test_runs_that_wait_for_each_other_according_to_damaged_files_are_listed_all_the_same() -> None:
    assert tree_order({"a": ["b"], "b": ["a"], "c": ["a"]}, ["c"]) == {"c": 0, "a": 0, "b": 0}
