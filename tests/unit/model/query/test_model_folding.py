"""A sweep as one entry of a list."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.cli.formatting import sweep_parts
from slurmtrain.model.query.folding import Objective, fold_sweep, is_folded, states_of, swept_values
from slurmtrain.model.run.job_state import commonest, error_first

REASON = "rank {} exited with code 1: ValueError: no {}; requeue.enabled is false"


def run(number: int, state: str = "completed", **facts: Any) -> dict[str, Any]:
    return {"id": f"r{number}", "name": "cnn", "state": state, "reason": "", "params": {"lr": number / 100, "bs": 32},
            "metrics": {}, "submitted_at": None, "resources": {}, "sweep": "s", **facts}  # fmt: skip


def described(*runs: dict[str, Any], objective: Objective | None = None) -> str:
    return " ".join(sweep_parts(fold_sweep(runs, objective)))


def test_a_sweep_says_its_states_its_ranges_its_best_run_and_its_commonest_error() -> None:
    runs = [
        run(1, "failed", reason=REASON.format(0, 3), metrics={"loss": 0.0}),
        run(2, "failed", reason=REASON.format(7, 4), params={"lr": 0.3, "bs": 64}),
        run(3, "failed", reason="the time limit"),
        run(4, "running", metrics={"loss": 0.5, "acc": 0.1}),
        run(5, metrics={"loss": 0.25, "acc": float("nan")}),
    ]
    line = fold_sweep(runs)
    assert (line["id"], line["name"]) == ("s", "cnn")
    assert is_folded(line)
    assert sorted(states_of(line)) == sorted(each["state"] for each in runs)
    assert described(*runs) == (
        "3 failed, 1 running, 1 completed; lr 0.01..0.3, bs 32|64; best r5 loss=0.25; "
        "2 times ValueError: no 3; requeue.enabled is false; rank 0 exited with code 1"
    )


@pytest.mark.parametrize(
    ("metrics", "objective", "best"),
    [
        ([{"loss": 1.0, "acc": 0.5}, {"loss": 2.0, "acc": 0.9}], Objective("acc", larger=True), "best r2 acc=0.9"),
        # Without an objective, data that was held out says more than training data.
        ([{"loss": 1.0, "val_acc": 0.5}, {"loss": 2.0, "val_acc": 0.9}], None, "best r2 val_acc=0.9"),
        ([{"loss": float("nan")}, {"loss": 2.0}], None, "best r2 loss=2"),
        ([{"lr": 0.1}, {"lr": 0.2}], None, None),
    ],
)
def test_the_best_run_is_by_what_a_search_is_for_or_else_by_a_metric_whose_name_says_what_is_better(
    metrics: list[dict[str, float]], objective: Objective | None, best: str | None
) -> None:
    line = described(*(run(number, metrics=each) for number, each in enumerate(metrics, 1)), objective=objective)
    assert (best is None) == ("best" not in line)
    assert best is None or best in line


def test_a_sweep_is_as_old_as_its_first_run() -> None:
    line = fold_sweep([run(number, submitted_at=f"2020-01-0{number}T00:00:00Z") for number in (2, 1)])
    assert line["submitted_at"] == "2020-01-01T00:00:00Z"
    assert sweep_parts(line)[1].endswith("h old;")


def test_a_name_with_swept_values_becomes_the_pattern_of_all_names() -> None:
    assert fold_sweep([run(1, name="cnn-0.1-a"), run(2, name="cnn-0.3-a")])["name"] == "cnn-0.*-a"
    assert fold_sweep([run(1, name="a"), run(2, name="b")])["name"] == "a and 1 more"


def test_what_is_swept_besides_parameters_is_shown_if_these_are_all_the_same() -> None:
    runs = [run(number, params={"lr": 1}, resources={"nodes": number}) for number in (1, 2)]
    assert "nodes 1|2" in described(*runs)


def test_values_are_in_order_as_they_were_written_and_many_words_are_counted() -> None:
    settings = [{"lr": lr, "opt": f"o{lr}"} for lr in (1.0, 0.1, 1e-5, 10)]
    assert swept_values(settings)["lr"] == [1e-5, 0.1, 1.0, 10]
    assert "lr 1e-5..10, opt o1.0|o0.1|o1e-05|…+1" in described(*(run(1, params=each) for each in settings))
    many = described(*(run(1, params={f"p{key}": value for key in range(30)}) for value in (1, 2)))
    assert "p5 1|2, 24 more swept" in many


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("rank 0 exited with code 1: KeyError: 'x'", "KeyError: 'x'; rank 0 exited with code 1"),
        ("the command on node 1 exited with code 2: so", "so; the command on node 1 exited with code 2"),
        ("rank 3 was killed by SIGSEGV: its limit", "rank 3 was killed by SIGSEGV: its limit"),
        ("rank 0 exited with code 1", "rank 0 exited with code 1"),
        ("KeyError: 'x'; rank 0 exited with code 1: so", "KeyError: 'x'; rank 0 exited with code 1: so"),
        ("", ""),
    ],
)
def test_a_reason_begins_with_the_error(reason: str, shown: str) -> None:
    assert error_first(reason) == shown


def test_reasons_that_differ_in_numbers_alone_are_alike() -> None:
    assert commonest(["a 1", "b", "a 2.5", "b 7"]) == ("a 1", 2)
    assert commonest([]) == ("", 0)
