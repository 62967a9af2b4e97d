"""What the rows of the page say, which are shown, and in which order."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from slurmtrain.cli.drawing import cut
from slurmtrain.cli.formatting import bar
from slurmtrain.errors import QueryError
from slurmtrain.plugins.top.reading import wrapped
from slurmtrain.plugins.top.top_rows import (
    COLUMNS,
    NAME,
    ORDERS,
    PARAMS,
    Params,
    Row,
    RunsView,
    aged,
    arrange,
    choose,
    column_widths,
    fact_lines,
    facts,
    fold_rows,
    label,
    make_row,
    summary,
)
from slurmtrain.plugins.top.widgets import LOG_KEYS, PAGE_KEYS, help_lines, key_words

TITLES = [column.title for column in COLUMNS]


def run(number: int = 0, **fields: Any) -> dict[str, Any]:
    submitted = datetime.fromtimestamp(time.time() - 3600.0, UTC).isoformat()
    return {"id": f"{number:010}", "name": "cnn", "state": "running", "step": 3, "total_steps": 10,
            "submitted_at": submitted, "eta_seconds": 70.0, "steps_per_second": 0.1, "metrics": {"loss": 0.5},
            "reason": "", "params": {}, "tags": [], "archived": False, **fields}  # fmt: skip


def cells(row: Row) -> dict[str, str]:
    return dict(zip(TITLES, row.cells, strict=True))


def test_a_row_says_how_far_a_run_is() -> None:
    row = cells(make_row(run()))
    assert [row[name] for name in ("STEP", "PROGRESS", "AGE", "ETA", "RATE", "METRICS")] == [
        "3/10", "██▍·····", "1h00m", "1m10s", "0.1/s", "loss=0.5"
    ]  # fmt: skip


@given(st.integers(0, 2000), st.integers(1, 1000))
def test_a_bar_always_has_the_same_width_unless_it_is_unknown_how_much_there_is_to_do(step: int, total: int) -> None:
    assert cell_len(bar(step, total)) == 8
    assert bar(None, total) == bar(step, None) == bar(0, 0) == ""


def test_a_row_is_the_same_object_until_its_age_shows_differently() -> None:
    row = make_row(run())
    assert aged(row) is row
    older = Row({**row.run, "submitted_at": "2020-01-01T00:00:00Z"}, row.cells, row.widths)
    assert aged(older).cells != row.cells


def test_what_a_terminal_executes_is_escaped_in_cells() -> None:
    row = make_row(run(name="\x1b]0;title\x07", reason="a\nb\x9b2J"))
    assert all(cell.isprintable() for cell in row.cells)


def test_live_runs_come_first_then_the_newest_unless_the_person_chooses_another_order() -> None:
    rows = [make_row(run(n, state=state)) for n, state in enumerate(("running", "failed", "pending", "completed"))]
    assert [row.id[-1] for row in choose(rows, RunsView())] == ["2", "0", "3", "1"]
    assert [row.id[-1] for row in choose(rows, RunsView(live_only=True))] == ["2", "0"]
    assert [row.id[-1] for row in choose(rows, RunsView(order="newest"))] == ["3", "2", "1", "0"]
    rows = [make_row(run(0, step=9, name="b", eta_seconds=None)), make_row(run(1, step=None, name="a", eta_seconds=9))]
    expected = {"name": ["1", "0"], "progress": ["0", "1"], "ETA": ["1", "0"]}
    assert {order: [row.id[-1] for row in choose(rows, RunsView(order=order))] for order in expected} == expected
    view = RunsView()
    for _ in ORDERS:
        view = view.next_order()
    assert view == RunsView()


def test_each_word_of_a_filter_must_be_in_a_row() -> None:
    rows = [make_row(run(0, name="CNN-big", reason="no space")), make_row(run(1, name="mlp", state="failed"))]
    assert [row.id[-1] for row in choose(rows, RunsView("cnn SPACE"))] == ["0"]
    assert [row.id[-1] for row in choose(rows, RunsView("failed"))] == ["1"]
    assert choose(rows, RunsView("cnn mlp")) == []


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_columns_fit_on_the_screen_and_names_and_states_are_always_there(width: int) -> None:
    rows = [make_row(run(n, name="a-long-name-of-an-experiment", reason="for a long reason " * 5)) for n in range(3)]
    widths = column_widths(rows, width)
    assert sum(widths.values()) + 2 * (len(widths) - 1) <= width
    assert {"ID", "NAME", "STATE", "STEP"} <= {TITLES[index] for index in widths}
    assert column_widths([], width)


@given(st.text(), st.integers(1, 30))
def test_a_cell_has_exactly_its_width_also_with_wide_characters(text: str, width: int) -> None:
    assert cell_len(cut(text.replace("\n", ""), width)) == width
    assert cell_len(cut("実験" * 20, width)) == width


def test_runs_are_counted_by_state_those_that_may_change_first() -> None:
    rows = [make_row(run(n, state=state)) for n, state in enumerate(("failed", "running", "completed", "running"))]
    assert summary(rows) == "2 running  1 completed  1 failed"
    assert summary([]) == "no runs"


def test_rows_with_parameters_that_differ_are_the_same_objects_while_nothing_changes() -> None:
    rows = [make_row(run(n, params={"lr": n, "epochs": 5})) for n in range(3)]
    params = Params()
    before = params.add_to(rows)
    assert [cells(row)["PARAMS"] for row in before] == ["lr=0", "lr=1", "lr=2"]
    changed = make_row(run(1, params={"lr": 1, "epochs": 5}, step=4))
    after = params.add_to([rows[0], changed, rows[2]])
    assert [new is old for new, old in zip(after, before, strict=True)] == [True, False, True]
    assert cells(after[1])["STEP"] == "4/10"
    assert cells(params.add_to(rows[:1])[0])["PARAMS"] == "-"


def test_runs_of_a_sweep_are_one_row_until_that_is_opened() -> None:
    states = ("running", "failed", "pending", "completed", "running")
    rows = [
        make_row(run(n, state=state, params={"lr": n / 10}, resources={}, sweep="s" if n < 4 else None))
        for n, state in enumerate(states)
    ]
    folded = fold_rows(rows, {}, {})
    again = fold_rows(rows, folded, {})
    assert again["s"][1] is folded["s"][1]
    sweeps = {"s": folded["s"][1]}
    chosen = choose(rows, RunsView())
    assert [row.id for row in arrange(chosen, sweeps, set())] == ["0000000004", "s"]
    assert [row.id[-1] for row in arrange(chosen, sweeps, {"s"})] == ["4", "s", "2", "0", "3", "1"]
    row = cells(sweeps["s"])
    assert (row["STATE"], row["PARAMS"], row["STEP"]) == ("1F 1R 1PD 1CD", "lr 0..0.3", "1/4")
    assert not sweeps["s"].ended
    assert dict(facts(sweeps["s"].run, []))["runs"].startswith("4: 1 failed, 1 running, 1 pending, 1 completed;")
    assert not RunsView("cnn").folds
    assert fold_rows([replace(each, put_away=True) for each in rows], {}, {}) == {}


def test_what_differs_stays_visible_in_a_cell_that_is_too_narrow() -> None:
    shown = Params().add_to([make_row(run(n, params={"lr": n / 10, "bs": 64, "opt": "adam" * n})) for n in range(4)])
    assert [each.text(PARAMS, 10, {}) for each in shown[1:3]] == ["lr=0.1 …+1", "lr=0.2 …+1"]
    assert shown[1].text(NAME, 6, {"cnn": "c…n"}) == "c…n   "


def test_a_filter_may_be_a_condition() -> None:
    rows = [make_row(run(n, params={"lr": lr})) for n, lr in enumerate((0.1, 0.3, 0.5))]
    view = RunsView().filtered("params.lr > 0.2 and state = running", rows)
    assert [row.id[-1] for row in choose(rows, view)] == ["2", "1"]
    assert view.filtered("cnn", rows).condition is None


@pytest.mark.parametrize("text", ["params.lr <", "params.momentum < 1", "state = runing", "= 3"])
def test_a_condition_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(QueryError):
        RunsView().filtered(text, [make_row(run(params={"lr": 0.1}))])


def test_archived_runs_are_shown_only_to_those_who_ask_for_them() -> None:
    states = ("completed", "running")
    rows = [make_row(run(n, state=state, archived=True), put_away=n == 0) for n, state in enumerate(states)]
    assert [row.id[-1] for row in choose(rows, RunsView())] == ["1"]
    assert [row.id[-1] for row in choose(rows, RunsView().filtered("archived = true", rows))] == ["1", "0"]


RUN = {
    "id": "0123456789", "name": "cnn", "state": "running", "reason": "cannot save", "step": 3, "total_steps": 10,
    "steps_per_second": 0.1, "eta_seconds": 70.0, "metrics": {"loss": 0.5}, "lost_steps": 4, "goodput": 0.9,
    "checkpoint": {"step": 2, "saved_at": "2020-01-01T12:00:00Z", "bytes": 2048}, "job_id": "7", "executor": "slurm",
    "dir": "/runs/0123456789", "params": {}, "tags": [], "note": "", "sweep": None,
}  # fmt: skip


def attempt(number: int, **fields: Any) -> dict[str, Any]:
    return {"number": number, "state": "failed", "cause": "crash", "reason": "rank 0 failed", "first_step": 0,
            "last_step": 3, "lost_steps": 1, "seconds": {"train": 60.0}, "nodes": ["n1", "n2", "n3"], "checks": {},
            **fields}  # fmt: skip


def test_facts_come_by_worth_and_attempts_newest_first() -> None:
    pairs = facts(RUN, [attempt(1), attempt(2, cause=None, state="running", last_step=None, lost_steps=0, reason="")])
    assert [name for name, _ in pairs] == [
        "state", "step", "metrics", "checkpoint", "attempt", "attempt", "nodes", "job", "directory"
    ]  # fmt: skip
    texts = [text for _, text in pairs]
    assert texts[:2] == ["running: cannot save", "3/10, 0.1/s, 1m10s to go, lost 4 steps, goodput 90 %"]
    assert texts[3] == "step 2, 2020-01-01 12:00, 2.0 KiB"
    assert texts[4].startswith("2 running")
    assert texts[5].startswith("1 crash; steps 0 to 3; lost 1; ")
    assert texts[6] == "n[1-3]"


def test_what_people_have_set_and_written_is_there_and_of_a_run_without_attempts_what_is_known() -> None:
    pairs = dict(facts({**RUN, "params": {"lr": 0.1}, "tags": ["good", "v2"], "note": "try again", "sweep": "s"}, []))
    assert [pairs[name] for name in ("params", "tags", "note", "sweep")] == ["lr=0.1", "good v2", "try again", "s"]
    bare = {**RUN, "state": "created", "reason": "", "step": None, "steps_per_second": None, "eta_seconds": None,
            "metrics": {}, "lost_steps": None, "goodput": None, "checkpoint": None, "job_id": None}  # fmt: skip
    assert facts(bare, []) == [
        ("state", "created"), ("why", "it has no job: it was not handed to the scheduler yet"),
        ("directory", "/runs/0123456789"),
    ]  # fmt: skip


def test_gpus_are_those_that_the_preflight_saw() -> None:
    gpu_check = {"check": "gpu", "status": "pass", "summary": "8 GPUs, H100"}
    same = facts(RUN, [attempt(1, checks={"n1": [gpu_check], "n2": [gpu_check, {"check": "disk", "summary": "fine"}]})])
    assert dict(same)["gpus"] == "8 GPUs, H100"
    other = facts(RUN, [attempt(1, checks={"n1": [gpu_check], "n2": [{**gpu_check, "summary": "7 of 8 GPUs"}]})])
    assert dict(other)["gpus"] == "n1: 8 GPUs, H100; n2: 7 of 8 GPUs"
    assert "gpus" not in dict(facts(RUN, [attempt(1)]))


def test_facts_are_printable() -> None:
    evil = facts({**RUN, "reason": "\x1b[2J\n", "dir": "/\x07"}, [attempt(1, reason="\x9b", nodes=["\x1bc"])])
    assert all(text.isprintable() for _, text in evil)


def test_long_facts_go_on_below_their_beginning() -> None:
    broken = fact_lines([("state", "failed: " + "word " * 20), ("job", "7")], 40)
    assert [name for name, _ in broken] == ["state", "", "", "", "job"]
    assert all(cell_len(label(name) + text) <= 40 for name, text in broken)


@pytest.mark.parametrize("width", [20, 60, 80, 200])
@pytest.mark.parametrize("keys", [PAGE_KEYS, LOG_KEYS])
def test_the_keys_that_are_named_fit_on_a_line(keys: Any, width: int) -> None:
    fitting = key_words(keys, width)
    assert fitting[0] == keys[0][:2]
    assert sum(len(key) + len(word) + 3 for key, word in fitting) - 2 <= width
    assert len(fitting) == len(keys) or width < 200


def test_help_names_every_key_and_fits_on_a_narrow_screen() -> None:
    texts = help_lines(60)
    assert all(any(text.startswith(key) for text in texts) for key, _, _ in PAGE_KEYS)
    assert max(map(len, texts)) <= 60


def test_only_long_lines_of_a_report_are_broken() -> None:
    table = "STEP  " + "x" * 30
    assert list(wrapped([table, "state       failed: " + "word " * 10], 45)) == [
        table, "state       failed: word word word word word", "            word word word word word"
    ]  # fmt: skip
