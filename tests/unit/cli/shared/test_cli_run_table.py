"""The table of runs on terminals of different widths."""

from __future__ import annotations

import time
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from slurmtrain.cli.shared.run_table import count_states, rows_on, screen
from slurmtrain.model.query.quantities import iso

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
        console.print(screen(runs, width, others))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_a_run_is_one_line_whose_id_and_state_are_whole(width: int) -> None:
    runs = [
        run(number, reason="node n3 has stopped answering" * 4, params={"学習率": number / 7, "opt": "adam" * 20})
        for number in range(6)
    ]
    printed = lines(runs, width)
    assert len(printed) == 7
    for number, line in enumerate(printed[1:]):
        assert line.startswith(f"{number:010d}  {NAMES[number % len(NAMES)][:5]}")
        assert "  running  " in line
    assert max(map(cell_len, printed)) <= width


def test_on_a_wide_terminal_nothing_is_cut() -> None:
    printed = "\n".join(lines([run(1, reason="waits for a node")], 200))
    assert "…" not in printed
    assert all(fact in printed for fact in (NAMES[1], "2h00m", "loss=0.25 accuracy=0.75", "1h00m", "2.5/s", "waits"))


def test_on_a_narrow_terminal_the_least_important_columns_are_left_out() -> None:
    headers = lines([run(1)], 60)[0].split()
    assert headers == ["ID", "NAME", "STATE", "STEP", "AGE"]


def test_runs_beyond_the_height_are_counted_by_state() -> None:
    assert rows_on(40) == 37
    assert rows_on(2) == 1
    printed = lines([run(1)], 80, ("completed", "failed", "completed"))
    assert (
        printed[-1].rstrip()
        == "and 3 more: 2 completed, 1 failed"
        == count_states(["completed", "failed", "completed"])
    )


def test_times_in_a_reason_are_local_for_people() -> None:
    [_, line] = lines([run(1, reason="Priority; estimated start 2023-11-14T22:13:20.000Z")], 200)
    assert "Priority; estimated start 2023-11-14 22:13" in line
