"""Leaving out runs by SQL: never one of which the condition holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.query.conditions import parse
from slurmtrain.model.run.run import Run
from slurmtrain.registry.narrowing import candidates
from slurmtrain.registry.rows import Listed
from slurmtrain.registry.store import Store

NOW = 1_800_000_000.0
VALUES: tuple[Any, ...] = (0.05, 1, -3, 10**20, "0.05", "2h", "text", "", True, None, math.nan, math.inf, [1], {"b": 1})
RUNS = [
    Run(
        id=f"{number:010d}",
        name="0.5" if number % 5 == 0 else f"net-{number % 3}",
        state=("completed", "failed", "running", "unreadable")[number % 4],
        reason="",
        executor="local" if number % 2 else "slurm",
        submitted_at=NOW - number * 100_000 if number % 6 else None,
        step=number * 10 if number % 4 else None,
        params={"lr": value, "a.b": 1} if number % 7 else {},
        metrics={"loss": number / 10, **({"acc": math.nan} if number % 3 else {})},
    )
    for number, value in enumerate(VALUES * 2)
]
FIELDS = ("params.lr", "params.a.b", "metrics.loss", "metrics.acc", "metrics.none", "step", "params.lr.b")
ORDERS = ("<", "<=", ">", ">=")
NUMBERS = ("0.05", "1", "7200", "2h", "-3", "1e300")
comparisons = st.one_of(
    *(
        st.builds("{} {} {}".format, st.sampled_from(names), st.sampled_from(operators), st.sampled_from(values))
        for names, operators, values in (
            (FIELDS, ORDERS, NUMBERS),
            (FIELDS, ("=", "!="), (*NUMBERS, "null", "text")),
            (("submitted_at",), ORDERS, ("3d", "2w", "2027-01-10")),
            (("state",), ("in", "not in"), ("(failed, running)", "(completed)")),
            (("name",), ("=", "!=", "~"), ("net-1", "0.5", "net*")),
        )
    )
)
conditions = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.builds("not ({})".format, inner),
        st.builds("({}) {} ({})".format, inner, st.sampled_from(["and", "or"]), inner),
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(Path(tmp_path_factory.mktemp("registry")) / "registry.db") as store:
        with store.begin() as transaction:
            for run in RUNS:
                transaction.put(run, (), settled=True, scanned=(), revision=0)
        yield store


def record(listed: Listed) -> dict[str, Any]:
    from slurmtrain.model.query.fields import iso

    row = dict(listed.row)
    return {
        **row,
        "params": json.loads(row["params"]),
        "metrics": {name: value if math.isfinite(value) else None for name, value in listed.metrics.items()},
        "submitted_at": iso(row["submitted_at"]),
    }


@given(text=conditions)
def test_no_run_is_left_out_of_which_a_condition_holds(store: Store, text: str) -> None:
    condition = parse(text, NOW)
    matching = {run_id for run_id, listed in store.listed().items() if condition.holds(record(listed))}
    assert matching <= set(store.ask(lambda db: candidates(db, [condition], put_away=False)))


@pytest.mark.parametrize(
    "text",
    ["state = failed", "step > 100 and state in (failed, running)", "metrics.loss <= 0.5", "submitted_at > 5d",
     "state = failed or step < 50"],
)  # fmt: skip
def test_what_sql_can_tell_leaves_out_all_other_runs(store: Store, text: str) -> None:
    condition = parse(text, NOW)
    rows = store.listed().items()
    matching = {run_id for run_id, listed in rows if condition.holds(record(listed))}
    # JSON has no NaN: SQLite cannot look into metrics with one.
    unsure = {run_id for run_id, listed in rows if "NaN" in listed.row["metrics"]} if "metrics" in text else set()
    assert set(store.ask(lambda db: candidates(db, [condition], put_away=False))) - unsure == matching - unsure
