"""The tables of a study, and the sentences below them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurmtrain.ops.query.performance import Performance
from slurmtrain.ops.shared.run_measures import Measures
from slurmtrain.plugins.scale.scale_tables import StudyRun, StudyTables, advise, make_tables
from slurmtrain.plugins.scale.scaling_law import describe_law
from slurmtrain.plugins.scale.study_points import BY_SPEED, MIXED, BatchKey
from slurmtrain.plugins.scale.study_text import TableText

BATCH = BatchKey("params.batch_size")


def ran(workers: int, step_s: float | None, *, state: str = "completed", gpus: bool = True, **facts: Any) -> StudyRun:
    """A run with so many processes, whose steps took so long."""
    figures = {name: facts.pop(name) for name in ("samples_per_second", "memory_bytes", "rate_error") if name in facts}
    strategy = facts.setdefault("strategy", "ddp")
    performance = Performance(
        id=f"{strategy}-{facts.get('hardware', '')}{workers}",
        name="cnn",
        state=state,
        measures=Measures(
            nodes=workers,
            processes=workers,
            gpus=workers if gpus else 0,
            steps_per_second=1 / step_s if step_s else None,
            **figures,
        ),
    )
    return StudyRun(performance=performance, **facts)


def rows(tables: StudyTables) -> list[tuple[int, float | None, float | None]]:
    return [(row.run.size.gpus, row.speedup, row.efficiency) for row in tables.sizes]


def test_strong_scaling_compares_steps_and_weak_scaling_samples() -> None:
    strong = make_tables([ran(4, 0.4, batch=64), ran(1, 1.0, batch=64), ran(2, 0.6, batch=64)], BATCH)
    assert rows(strong) == [
        (1, 1.0, 1.0),
        (2, pytest.approx(5 / 3), pytest.approx(5 / 6)),
        (4, pytest.approx(2.5), pytest.approx(0.625)),
    ]
    weak = make_tables([ran(1, 1.0, batch=64), ran(4, 1.25, batch=256)], BATCH)
    assert rows(weak)[1] == (4, pytest.approx(3.2), pytest.approx(0.8))
    # The batch of each process, by its key.
    of_each = make_tables([ran(n, t, batch=64, batch_of_each=True) for n, t in ((1, 1.0), (4, 1.25))], BATCH)
    assert rows(of_each) == rows(weak)
    assert [series.fit.weak for made in (strong, weak, of_each) for series in made.series if series.fit] == [
        False, True, True,
    ]  # fmt: skip


def test_a_key_that_counts_something_else_is_noticed() -> None:
    tables = make_tables([ran(2, 1.0, batch=64, samples_per_second=128.0), ran(4, 1.0, batch=64)], BATCH)
    assert tables.batch_problem(BATCH) == (
        "run ddp-2 counted 128 samples a step, but params.batch_size, the samples of all processes is 64: correct its "
        "meaning with --batch-of process, or name another with --batch-key"
    )
    # An epoch that ends in part of a batch is no contradiction.
    assert make_tables([ran(2, 1.0, batch=64, samples_per_second=60.0)], BATCH).batch_problem(BATCH) == ""


def test_series_differ_in_more_than_their_size_and_seeds() -> None:
    runs = [
        ran(workers, 1.0, strategy=strategy, params={"width": width, "batch_size": workers, "seed": workers})
        for strategy in ("ddp", "fsdp")
        for width in (1, 2)
        for workers in (1, 2)
    ]
    runs = [replace(each, performance=replace(each.performance, id=str(number))) for number, each in enumerate(runs)]
    tables = make_tables(runs, BATCH)
    assert [series.name for series in tables.series] == [
        "ddp, width=1",
        "ddp, width=2",
        "fsdp, width=1",
        "fsdp, width=2",
    ]
    assert [row.run.strategy for row in tables.strategies[:4]] == ["ddp", "ddp", "fsdp", "fsdp"]
    assert tables.hardware == []


def test_hardware_is_compared_with_the_smallest_by_money_where_prices_are_known() -> None:
    sizes = (
        (1, 1.0, "equal", 10.0),
        (4, 1 / 2.98, "equal", 40.0),
        (4, 1 / 2.53, MIXED, 30.0),
        (4, 1 / 2.74, BY_SPEED, 30.0),
    )
    runs = [ran(n, t, hardware=kind, hour_price=price) for n, t, kind, price in sizes]
    tables = make_tables(runs, None, "EUR")
    assert [row.throughput for row in tables.hardware] == pytest.approx([1.0, 2.98, 2.53, 2.74])
    assert [row.cost_efficiency for row in tables.hardware] == pytest.approx([1.0, 0.745, 2.53 / 3, 2.74 / 3])
    title, columns, records = list(TableText(tables).parts())[-1]
    shown = {column.title: column.cell(records[-1]) for column in columns}
    assert (title, shown["HARDWARE"], shown["THROUGHPUT"], shown["COST EFFICIENCY"]) == (
        "Hardware", "by speed", "2.74", "0.91",
    )  # fmt: skip
    # Without prices, an hour of any GPU costs the same.
    unpriced = make_tables([ran(n, t, hardware=kind) for n, t, kind, _ in sizes], None)
    assert [row.cost_efficiency for row in unpriced.hardware] == pytest.approx([1.0, 0.745, 2.53 / 4, 2.74 / 4])


def test_the_advice_names_the_efficiency_of_the_largest_and_the_most_that_are_worth_their_cost() -> None:
    # 0.0125 + 0.9875 / n seconds.
    measured = [ran(n, 0.0125 + 0.9875 / n, batch=64, rate_error=0.02) for n in (1, 2, 4, 8)]
    [series] = make_tables(measured, BATCH).series
    assert advise(series).startswith("8 GPUs: 0.92 efficient; ")
    assert "more than 32 cost more than they save" in advise(series) or "up to 32" in advise(series)
    begun = make_tables([ran(1, 1.0), ran(2, None, state="running", ended=False)], None)
    assert advise(begun.series[0]).endswith("a single size says nothing about others: a study needs two at least")
    pair = make_tables([ran(1, 1.0, gpus=False), ran(2, 0.9, gpus=False)], None).series[0]
    assert advise(pair) == "2 processes: 0.56 efficient; more than 1 cost more than they save"
    assert describe_law(pair.fit, pair.unit) == [
        "a step takes 0.8 s + 0.2 s / n (Amdahl's law)",
        "fitted at 2 processes: efficiency 0.56",
        "two sizes cannot separate communication from serial time: add a third",
        "the uncertainty is unknown: there are too few steps to tell how much they scatter",
    ]
    assert advise(make_tables([ran(1, None), ran(2, None)], None).series[0]) == (
        "no run has ended and reported its speed yet"
    )


def test_a_run_without_figures_has_a_line_and_no_part_in_the_law() -> None:
    failed = ran(1, None, state="failed", reason="out of memory")
    tables = make_tables([failed, ran(2, 1.0, batch=64), ran(4, 0.5, batch=64)], BATCH)
    assert rows(tables)[0][1:] == (None, None)
    assert not tables.is_complete
    [series] = tables.series
    assert series.fit is not None
    assert series.fit.first == 2
    # Compared with the smallest that has a speed.
    assert rows(tables)[1][1:] == (1.0, 1.0)
    _, columns, records = next(TableText(tables).parts())
    assert [next(column for column in columns if column.title == "STATE").cell(record) for record in records] == [
        "failed", "completed", "completed",
    ]  # fmt: skip


def test_markdown_has_no_columns_without_figures_and_is_escaped() -> None:
    runs = [ran(n, 1 / n, strategy="d|d*p_<b>", batch=64, memory_bytes=2**30) for n in (1, 2)]
    runs += [ran(n, 1 / n, strategy="fsdp", batch=64) for n in (1, 2)]
    lines = list(TableText(make_tables(runs, BATCH)).markdown())
    assert lines[:5] == [
        "### Scaling",
        "",
        "| ID | STRATEGY | NODES | PROCS | GPUS | BATCH | STEPS/S | MEMORY | SPEED-UP | EFFICIENCY |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        r"| d\|d\*p\_\<b\>-1 | d\|d\*p\_\<b\> | 1 | 1 | 1 | 64 | 1 | 1.0 GiB | 1.00 | 1.00 |",
    ]
    assert "### Strategies" in lines
    assert "### Hardware" not in lines
