"""How the runs stand that another one starts after, and chains of runs as a tree."""

from __future__ import annotations

from slurmtrain.model.run.lineage import Standing, Upstream, standing, tree_order
from slurmtrain.model.run.run import Run

PRETRAIN = Upstream("0000000001", "pretrain")
ANY = Upstream("0000000002", "0000000002", any=True)


def run(upstream: Upstream, state: str, reason: str = "") -> dict[str, Run]:
    return {upstream.run: Run(id=upstream.run, name="x", state=state, reason=reason, executor="slurm")}


def test_a_run_is_ready_once_all_others_have_ended_as_they_must() -> None:
    assert standing([PRETRAIN, ANY], run(PRETRAIN, "completed") | run(ANY, "failed")).is_ready
    assert standing([], {}).is_ready
    waits = standing([PRETRAIN, ANY], run(PRETRAIN, "requeued") | run(ANY, "running"))
    assert waits == Standing([PRETRAIN, ANY])
    assert not waits.is_ready


def test_an_end_that_is_no_completion_is_a_problem_however_the_others_stand() -> None:
    for state, words in (
        ("failed", "run 0000000001 (pretrain) failed: out of memory"),
        ("lost", "run 0000000001 (pretrain) was lost: out of memory"),
        ("cancelled", "run 0000000001 (pretrain) was cancelled"),
    ):
        stands = standing([ANY, PRETRAIN], run(PRETRAIN, state, "out of memory") | run(ANY, "running"))
        assert stands.problem == words
        assert not stands.is_ready


def test_a_deleted_run_will_never_complete() -> None:
    assert standing([PRETRAIN], {}).problem == "the directory of run 0000000001 (pretrain) was deleted"
    assert standing([ANY], {}).is_ready


def test_each_run_stands_once_below_the_last_of_those_that_it_starts_after() -> None:
    above = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"], "e": ["a", "d"], "x": []}
    assert list(tree_order(above, ["d"]).items()) == [("a", 0), ("b", 1), ("c", 1), ("d", 2), ("e", 3), ("x", 0)]


def test_runs_that_wait_for_each_other_according_to_damaged_files_are_listed_all_the_same() -> None:
    assert tree_order({"a": ["b"], "b": ["a"], "c": ["a"]}, ["c"]) == {"c": 0, "a": 0, "b": 0}
