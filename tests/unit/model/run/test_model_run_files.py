"""Where everything of a run lies."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.run import layout
from slurmtrain.model.run.layout import (
    EPOCH_MS,
    RunsRoot,
    checkpoint_step,
    is_run_id,
    run_id,
    staging_name,
    trash_name,
    unusable_in_root,
)

ID = run_id(EPOCH_MS + 12345, 7)
ROOT = RunsRoot(Path("/runs"))


def test_the_names_of_a_run_directory_are_the_documented_ones() -> None:
    run = ROOT.run(ID)
    attempt = run.attempt("4711", 2)
    names = {
        run.spec: "spec.yaml",
        run.plan: "plan.json",
        run.journals: "journal",
        run.checkpoints: "checkpoints",
        attempt.path: "attempts/4711.2",
        attempt.node_journal(3): "attempts/4711.2/node-3.jsonl",
        attempt.rank_journal(1): "attempts/4711.2/rank-1.jsonl",
        attempt.metrics: "attempts/4711.2/metrics.jsonl",
        attempt.rank_log(0): "attempts/4711.2/logs/rank-0.log",
        run.submission(2).plan: "submissions/2/plan.json",
        run.submission(2).submitit: "submissions/2/submitit",
    }
    assert {str(path.relative_to(run.path)): name for path, name in names.items()} == {n: n for n in names.values()}
    assert run.id == ID
    assert attempt.run == run


def test_a_run_is_told_from_everything_else_in_the_root() -> None:
    assert is_run_id(ID)
    for name in ("registry.db", ".new-" + ID, ID + "x", ID[:-1], ID.upper() + "I", "", "../" + ID):
        assert not is_run_id(name), name


@pytest.mark.parametrize(("job", "restart"), [("4711", 0), ("4711_3", 12), ("local.a.b", 1)])
def test_an_attempts_name_splits_into_what_it_was_made_of(job: str, restart: int) -> None:
    assert layout.split_attempt(layout.attempt_key(job, restart)) == (job, restart)


@pytest.mark.parametrize(
    ("source", "attempt", "node"),
    [
        ("attempts/7.0/node-12.jsonl", "7.0", "12"),
        ("attempts/7.0/rank-1.jsonl", "7.0", ""),
        ("journal/node-1.jsonl", "", ""),
        ("attempts/node-1.jsonl", "", ""),
    ],
)
def test_a_journals_path_tells_its_attempt_and_its_node(source: str, attempt: str, node: str) -> None:
    assert (layout.attempt_of(source), layout.node_of(source)) == (attempt, node)


times = st.integers(min_value=EPOCH_MS, max_value=EPOCH_MS + 2**40 - 1)
bits = st.integers(min_value=0, max_value=1023)


@given(st.lists(st.tuples(times, bits), min_size=2, unique_by=lambda pair: pair[0]))
def test_ids_sort_by_time(pairs: list[tuple[int, int]]) -> None:
    ids = {run_id(now, random): now for now, random in pairs}
    assert [ids[one] for one in sorted(ids)] == sorted(now for now, _ in pairs)


def test_checkpoints_that_are_being_built_or_deleted_are_not_taken_for_published_ones() -> None:
    assert checkpoint_step(staging_name("4711.0", 5)) is None
    assert checkpoint_step(trash_name("step-5")) is None
    for name in ("step-", "step--1", "step-5.tmp", "step-five", "mystep-5"):
        assert checkpoint_step(name) is None, name


@pytest.mark.parametrize(
    ("path", "slurm", "local"),
    [
        ("/runs", "", ""),
        ('/it\'s "odd" $HOME `x` ünï;&[1]*?#:,=', "", ""),
        ("/a%jb", "'%'", "'%j'"),
        ("/a%Ab", "'%'", "'%A'"),
        ("/100%", "'%'", ""),
        ("/a%%b", "'%'", ""),
        ("/a\\b", r"'\\'", ""),
        ("/a\nb", r"'\n'", ""),
        ("/a\x1bb", r"'\x1b'", ""),
    ],
)
def test_a_character_with_a_meaning_in_the_paths_of_logs_is_named(path: str, slurm: str, local: str) -> None:
    for executor, refused in (("slurm", slurm), ("local", local)):
        problem = unusable_in_root(Path(path), executor)
        assert (problem is not None) == bool(refused)
        assert problem is None or f"its path contains {refused}" in problem
