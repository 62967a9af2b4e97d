"""The table of runs on terminals of different widths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from slurmtrain.cli.drawing import GAP, Column, fit
from slurmtrain.cli.tables import columns_of, describe_others, screen
from slurmtrain.model.query.fields import iso

NAMES = ("cnn", "resnet50-imagenet-warmup-cosine-long-name", "モデル学習実験")


def run(number: int, **facts: Any) -> dict[str, Any]:
    return {
        "id": f"{number:010d}",
        "name": NAMES[number % len(NAMES)],
        "state": "running",
        "reason": "",
        "step": 40 * number,
        "total_steps": 100_000,
        "params": {"lr": 0.1},
        "metrics": {"loss": 0.25, "accuracy": 0.75},
        "submitted_at": iso(time.time() - 7200),
        "eta_seconds": 3600.0,
        "steps_per_second": 2.5,
        "checkpoint": None,
        **facts,
    }


def lines(runs: list[dict[str, Any]], width: int, others: tuple[str, ...] = ()) -> list[str]:
    console = Console(width=width, height=40)
    with console.capture() as capture:
        console.print(screen(runs, columns_of(runs), (width, 40), others))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_a_run_is_one_line_whose_id_and_state_are_whole(width: int) -> None:
    runs = [
        run(number, reason="node n3 has stopped answering" * 4, params={"学習率": number / 7, "opt": "adam" * 20})
        for number in range(6)
    ]
    printed = lines(runs, width)
    assert len(printed) == 7 + (width < 140)
    for number, line in enumerate(printed[1:7]):
        assert line.startswith(f"{number:010d}  {NAMES[number % len(NAMES)][:5]}")
        assert "  running  " in line
    assert max(map(cell_len, printed)) <= width


def test_on_a_wide_terminal_nothing_is_cut() -> None:
    printed = "\n".join(lines([run(1, reason="waits for a node")], 200))
    assert "…" not in printed
    assert all(fact in printed for fact in (NAMES[1], "2h00m", "loss=0.25 accuracy=0.75", "1h00m", "2.5/s", "waits"))


def test_on_a_narrow_terminal_the_least_important_columns_are_left_out() -> None:
    header, _, footer = lines([run(1)], 60)
    assert header.split() == ["ID", "NAME", "STATE", "STEP", "AGE", "ETA"]
    assert footer.rstrip() == "no room in 60 columns for METRICS, RATE"


def test_runs_beyond_the_height_are_counted_by_state() -> None:
    assert len(lines([run(number) for number in range(50)], 80)) == 1 + 37 + 1
    printed = lines([run(1)], 80, ("completed", "failed", "completed"))
    assert (
        printed[-1].rstrip()
        == "and 3 more: 1 failed, 2 completed"
        == describe_others(["completed", "failed", "completed"])
    )


def test_times_in_a_reason_are_local_for_people() -> None:
    [_, line] = lines([run(1, reason="Priority; estimated start 2023-11-14T22:13:20.000Z")], 200)
    assert "Priority; estimated start 2023-11-14 22:13" in line


ID, NAME, STEP = Column("ID"), Column("NAME", room=8), Column("STEP", rank=1)
REASON = Column("R", rank=2, room=6)
COLUMNS = (ID, NAME, STEP, REASON)
WIDE_FIRST = (ID, Column("WIDE", rank=1), Column("STEP", rank=2))
WRAPPED = (Column("A", room=4), Column("B", room=4), Column("C", room=20, wraps=True))
RANKED = (ID, Column("LATER", rank=2), Column("FIRST", rank=1))


@pytest.mark.parametrize(
    ("columns", "content", "width", "expected"),
    [
        pytest.param(COLUMNS, (10, 20, 5, 30), 65 + 3 * GAP, {0: 10, 1: 20, 2: 5, 3: 30}, id="what fits is whole"),
        pytest.param(COLUMNS, (10, 4, 0, 3), 80, {0: 10, 1: 4, 3: 3}, id="a column without content is left out"),
        pytest.param(COLUMNS, (10, 20, 5, 30), 50, {0: 10, 1: 15, 2: 5, 3: 14}, id="what is cut gets what is left"),
        pytest.param(WIDE_FIRST, (10, 30, 5), 20, {0: 10, 2: 5}, id="one without room makes room for a narrower one"),
        pytest.param(RANKED, (10, 5, 5), 20, {0: 10, 2: 5}, id="a lower rank gets its room first"),
        pytest.param(COLUMNS, (10, 20, 5, 30), 17, {0: 10, 1: 5}, id="what is always shown is cut where it may be"),
        pytest.param(COLUMNS, (10, 20, 5, 30), 15, {0: 10}, id="and left out if nothing of it would be seen"),
        pytest.param(WRAPPED, (10, 5, 90), 60, {0: 10, 1: 5, 2: 60 - 15 - 2 * GAP}, id="what wraps gets the rest"),
        pytest.param(WRAPPED, (10, 5, 9), 60, {0: 10, 1: 5, 2: 9}, id="but no more than it needs"),
        pytest.param(WRAPPED, (30, 5, 90), 40, {0: 11, 1: 5, 2: 20}, id="and what it needs to be readable"),
    ],
)
def test_columns_get_the_room_that_there_is(
    columns: Sequence[Column], content: Sequence[int], width: int, expected: dict[int, int]
) -> None:
    assert fit(columns, content, width) == expected


@given(st.lists(st.integers(0, 60), min_size=4, max_size=4), st.integers(20, 240))
def test_a_table_is_never_wider_than_the_terminal_and_uses_its_width(content: list[int], width: int) -> None:
    content[0] = min(content[0], 10)
    widths = fit(COLUMNS, content, width)
    used = sum(widths.values()) + GAP * (len(widths) - 1)
    assert used <= width
    assert all(wide <= content[index] for index, wide in widths.items())
    if any(widths[index] < content[index] for index in widths):
        assert used == width
