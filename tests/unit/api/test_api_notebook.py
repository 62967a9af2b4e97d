"""Runs in a notebook: tables that say what a table on a terminal says, in which nobody's text is HTML."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from helpers.queried_runs import SWEEP, write_run
from helpers.simulated_run import SimulatedRun

import slurmtrain
from slurmtrain.api.notebook import RunList, html_table
from slurmtrain.ops.shared.workspace import Workspace

_TAGS = {"p", "table", "thead", "tbody", "tr", "th", "td"}
HOSTILE = "<script>alert('x')</script>&\"<b>"


class Table(HTMLParser):
    """What a browser shows of it: the text of all cells, by row, and the paragraphs around them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.paragraphs: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _TAGS
        assert {name for name, _ in attrs} <= {"style"}
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")
        elif tag == "p":
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1] == "p":
            self.paragraphs[-1] += data
        else:
            self.rows[-1][-1] += data


def test_a_sweep_is_a_table_of_what_differs_below_a_line_that_sums_it_up(registry: slurmtrain.Registry) -> None:
    runs = registry.runs()
    assert isinstance(runs, RunList)
    shown = Table(runs._repr_html_())
    assert shown.paragraphs == [
        "sweep 00000000sw: 1 running, 5 completed; lr 0.01|0.1|1, seed 0|1; best 0000000004 acc=0.91"
    ]
    header, *rows = shown.rows
    assert header[:5] == ["name", "id", "state", "lr", "seed"]
    assert len(rows) == 6
    assert rows[0][:3] == [runs[0].name, runs[0].id, runs[0].state]
    assert Table(RunList(runs[:1])._repr_html_()).paragraphs == ["1 run: 1 completed"]
    assert RunList()._repr_html_() == "<p>no runs</p>"


def test_the_best_run_is_by_the_metric_whose_checkpoints_the_spec_keeps(workspace: Workspace) -> None:
    keep = {"checkpoint": {"keep": {"best": {"metric": "margin", "mode": "max"}}}}
    for number in (1, 2):
        metrics = {"loss": number, "margin": number}
        write_run(workspace, number, params={"lr": number}, metrics=metrics, sweep=SWEEP, spec=keep)
    assert Table(slurmtrain.Registry().runs()._repr_html_()).paragraphs[0].endswith("; best 0000000002 margin=2")


def test_a_run_is_a_table_of_facts_and_a_comparison_one_of_runs_the_best_first(registry: slurmtrain.Registry) -> None:
    run = registry.runs()[0]
    facts = dict(Table(run._repr_html_()).rows)  # type: ignore[arg-type]
    assert facts["state"] == "completed"
    assert "lr=" in facts["params"]
    compared = registry.compare("cnn", metrics="acc")
    assert repr(compared) == "<comparison of 6 runs>"
    shown = Table(compared._repr_html_())
    assert shown.rows[0] == ["name", "id", "state", "params.lr", "acc"]
    assert " ± " in shown.rows[1][-1]
    assert compared.to_dict()["metrics"] == ["acc"]


def test_no_text_of_a_user_or_a_job_is_html(workspace: Workspace) -> None:
    for run_id in ("0000000001", "0000000002"):
        spec = {"name": "x", "params": {"a": f"{HOSTILE}{run_id}", HOSTILE: 1}}
        run = SimulatedRun(workspace.root.run(run_id), spec=spec, executor="local", job=run_id)
        run.created(params=spec["params"]).submitted().started().reached(1, **{HOSTILE: 1.0})
        run.command("note", text=HOSTILE).ended("crash", reason=HOSTILE)
    runs = slurmtrain.Registry().runs()
    header, *rows = Table(runs._repr_html_()).rows
    assert f"{HOSTILE}0000000001" in rows[0]
    assert HOSTILE in header
    assert any(HOSTILE in cell for cell in rows[0])
    assert dict(Table(runs[0]._repr_html_()).rows)["note"] == HOSTILE  # type: ignore[arg-type]
    Table(slurmtrain.Registry().compare()._repr_html_())


@pytest.mark.parametrize(("count", "last"), [(30, ""), (31, "and 1 more"), (500, "and 470 more")])
def test_a_long_table_says_how_many_rows_it_leaves_out(count: int, last: str) -> None:
    shown = Table(html_table("", ["n", "text"], [[str(number), "x" * 1000] for number in range(count)]))
    assert len(shown.rows) == 31
    assert len(shown.rows[1][1]) == 200
    assert shown.paragraphs == ["", last][: 1 + bool(last)]
