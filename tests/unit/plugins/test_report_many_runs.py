"""The pages of sweeps, of many runs and of comparisons: their figures, and what they say where there are none."""

from __future__ import annotations

import json
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
from helpers.queried_runs import SWEEP, write_run
from helpers.swept_runs import BEST, write_swept
from helpers.workspaces import make_workspace
from unit.cli.test_cli_compare import call
from unit.plugins.test_report_pages import HOSTILE, Elements

from slurmtrain.history import read_history
from slurmtrain.model.run.accounting import KINDS
from slurmtrain.model.run.run import Attempt
from slurmtrain.ops.plot import Plotted, means_json, repetitions
from slurmtrain.ops.query.select import Question
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.report import choose_facts, curve_facts, many_facts
from slurmtrain.plugins.report.node_hours import Calendar, node_hours

SIZE = 100


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A sweep of a hundred runs, some of them preempted, failed, running or waiting, and two runs of another name."""
    workspace = make_workspace(tmp_path_factory.mktemp("pages") / "runs")
    write_swept(workspace, SIZE)
    for number in (7001, 7002):
        write_run(workspace, number, "gpt", params={"layers": number}, metrics={"loss": 0.5}, days_ago=40)
    return workspace


def facts_of(workspace: Workspace, *names: str, **question: Any) -> dict[str, Any]:
    return choose_facts(
        workspace, observe(workspace, ask_slurm=False), Question(names=names, for_programs=True, **question)
    )


def printed(workspace: Workspace, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What a command prints as JSON."""
    code, out, err = call(workspace.root.path, capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_the_rows_of_a_sweep_and_its_best_run_are_those_of_status_and_best(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = facts_of(workspace, SWEEP)
    status = {run["id"]: run for run in printed(workspace, capsys, "status", SWEEP)["runs"]}
    best = printed(workspace, capsys, "best", SWEEP, "--over", "seed", "--top", "1000")
    ranked = printed(workspace, capsys, "best", SWEEP, "--top", "1000")
    assert {run["id"] for run in facts["runs"]} == set(status)
    for row in facts["runs"]:
        run = status[row["id"]]
        compared = set(row) - {"hours", "cost"}
        assert {name: row[name] for name in compared} == {name: run[name] for name in compared}
        seconds = printed(workspace, capsys, "show", row["id"])["run"]["seconds"] if row["id"][-1] == "4" else None
        if seconds is not None:
            # Each of them has had one node.
            assert row["hours"] == pytest.approx(
                {kind: each / 3600 for kind, each in seconds.items() if each}, abs=1e-5
            )
    assert facts["objective"] == {"metric": "val_acc", "larger": True, "from": "checkpoint.keep.best"}
    assert [run["id"] for run in facts["runs"]][: len(ranked["runs"])] == [run["id"] for run in ranked["runs"]]
    assert (facts["best"]["run"], facts["best"]["value"]) == (
        ranked["runs"][0]["id"], ranked["runs"][0]["metrics"]["val_acc"],
    )  # fmt: skip
    assert facts["groups"] == best["groups"]
    assert facts["states"] == {
        state: sum(run["state"] == state for run in status.values()) for state in facts["states"]
    }
    assert (facts["params"], facts["over"]) == (["lr", "width", "optimizer", "seed"], ["seed"])


def test_curves_are_those_of_plot_with_means_over_seeds(workspace: Workspace) -> None:
    facts = facts_of(workspace, SWEEP)
    ids = [run["id"] for run in facts["runs"]]
    loaded = workspace.store.load_all(ids)
    plotted = [Plotted(loaded[run_id], read_history(loaded[run_id], workspace.root.run(run_id))) for run_id in ids]
    for each in plotted:
        curve = next((one for one in facts["curves"]["val_acc"]["runs"] if one["run"] == each.run.id), None)
        logged = each.history.curves.get("val_acc")
        assert (curve is None) == (logged is None)
        if curve is not None and logged is not None:
            assert curve["step"] == list(logged.kept.steps)
            assert curve["value"] == pytest.approx(list(logged.kept.values), rel=1e-4)
    expected = means_json(repetitions(plotted, ["params.seed"]), ["val_acc"], ["params.seed"])["groups"]
    several = {tuple(group["runs"]): group["metrics"]["val_acc"] for group in expected if len(group["runs"]) > 1}
    means = {tuple(group["runs"]): group for group in facts["curves"]["val_acc"]["means"]}
    assert means.keys() == several.keys()
    for runs, group in several.items():
        assert means[runs]["step"] == group["step"]
        for name, of_page in (("mean", "mean"), ("min", "low"), ("max", "high")):
            assert means[runs][of_page] == pytest.approx(group[name], rel=1e-4)


def test_long_and_many_curves_are_thinned_and_the_page_says_what_it_leaves_out(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = list(workspace.store.load_all([f"{number:010d}" for number in range(1, 11)]).values())
    monkeypatch.setattr(curve_facts, "_POINTS", 4 * 8 * 10)
    curves, notes = curve_facts.curve_facts(workspace, loaded, ["val_acc", "loss"], ["params.seed"])
    assert list(curves) == ["val_acc"]
    assert all(len(curve["step"]) <= 4 * 8 for curve in curves["val_acc"]["runs"])
    assert notes == ["the page has no curves of the metric 'loss'"]
    monkeypatch.setattr(curve_facts, "_AVERAGED", 10)
    monkeypatch.setattr(curve_facts, "_READ", 200)
    curves, notes = curve_facts.curve_facts(workspace, loaded, ["val_acc"], ["params.seed"])
    assert (len(curves["val_acc"]["runs"]), curves["val_acc"]["means"]) == (5, [])
    assert "no curves of 5 of 10 runs" in notes[0]
    assert "'plot --over' draws them" in notes[1]


def test_a_page_of_runs_that_go_on_is_of_one_moment(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "runs")
    first, second = (
        write_run(workspace, number, params={"seed": number}, sweep=SWEEP, state="running", history=[{"loss": 0.5}] * 3)
        for number in (1, 2)
    )
    observed = observe(workspace, ask_slurm=False)
    first.reached(4, loss=0.1)
    second.reached(4, loss=0.1)
    facts = choose_facts(workspace, observed, Question(names=(SWEEP,), for_programs=True))
    assert [run["metrics"] for run in facts["runs"]] == [{"loss": 0.5}] * 2
    curves = facts["curves"]["loss"]
    assert [curve["step"] for curve in (*curves["runs"], *curves["means"])] == [[1, 2, 3]] * 3
    curves = facts_of(workspace, SWEEP)["curves"]["loss"]
    assert [curve["step"] for curve in (*curves["runs"], *curves["means"])] == [[1, 2, 3, 4]] * 3


def test_the_sums_of_many_runs_are_those_of_single_ones_and_of_the_days(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = facts_of(workspace)
    status = printed(workspace, capsys, "status")["runs"]
    assert (facts["kind"], facts["total"], facts["title"]) == ("many", SIZE + 2, f"All {SIZE + 2} runs")
    assert facts["lost_steps"] == sum(run["lost_steps"] or 0 for run in status) > 0
    for kind in KINDS:
        total = sum(run.get("hours", {}).get(kind, 0.0) for run in facts["runs"])
        assert facts["hours"].get(kind, 0.0) == pytest.approx(total, abs=1e-3)
        assert sum(day["hours"].get(kind, 0.0) for day in facts["days"]) == pytest.approx(total, abs=1e-3)
    assert facts["interruptions"]["preempted"]["count"] == 2 * SIZE // 10
    assert sum(day["interruptions"].get("preempted", 0) for day in facts["days"]) == 2 * SIZE // 10
    [sweep] = facts["sweeps"]
    assert (sweep["id"], sum(sweep["states"].values())) == (SWEEP, SIZE)
    assert (sweep["best"], facts["notes"]) == (facts_of(workspace, SWEEP)["best"], [])
    recent = facts_of(workspace, since="30d", where=["params.lr > 0.01"])
    assert recent["title"] == f"{recent['total']} runs: submitted since 30d, params.lr > 0.01"
    assert {run["params"]["lr"] for run in recent["runs"]} == {0.03, 0.1}


def test_costs_are_those_of_show(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slurmtrain.yaml").write_text(
        "prices: {currency: EUR, partitions: {local: {node_hour: 2}, spot: {node_hour: 1}}, on_demand: spot}"
    )
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.html"
    pages = []
    for name in ((SWEEP,), ()):
        assert call(workspace.root.path, capsys, "report", *name, "-o", str(page))[0] == 0
        [text] = Elements(page.read_text()).text("script", id="facts")
        pages.append(json.loads(text))
    spent = 0.0
    for row in pages[0]["runs"]:
        spent += row.get("cost", {}).get("spent", 0.0)
        if row["id"][-2:] in ("04", "09"):
            cost = printed(workspace, capsys, "show", row["id"])["run"]["cost"]
            assert row["cost"] == {name: cost[name] for name in ("unit", "spent", "lost")}
            assert row["cost"]["unit"] == "EUR"
    sweep, many = (facts["cost"] for facts in pages)
    assert sweep["spent"] == pytest.approx(spent)
    assert many["spent"] == pytest.approx(2 * many["node_hours"])
    total = printed(workspace, capsys, "cost")
    assert {name: many[name] for name in total["total"]} == total["total"]
    assert (many["partitions"], many["unpriced"]) == (total["by"]["partition"], total["unpriced"])
    assert many["interruptions_by_cause"] == {cause: each["count"] for cause, each in pages[1]["interruptions"].items()}


def test_of_very_many_runs_the_table_and_the_calendar_have_the_newest(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_facts, "_ROWS", 5)
    monkeypatch.setattr(many_facts, "_DAYS", 20)
    facts = facts_of(workspace)
    assert (len(facts["runs"]), facts["total"]) == (5, SIZE + 2)
    # The days 40 days ago are only in the sums.
    assert len(facts["days"]) <= 20
    assert facts["notes"][0].startswith(f"the table has the 5 runs that may still change or are the newest; {SIZE - 3}")
    assert "the calendar has" in facts["notes"][1]


def attempt(begin: float, **spent: float) -> Attempt:
    return Attempt(number=1, job_id="7", restart=0, submitted_at=begin, spent={**dict.fromkeys(KINDS, 0.0), **spent})


@pytest.fixture
def midnight() -> float:
    return datetime.combine(date(2026, 11, 22), datetime.min.time()).timestamp()


def test_an_attempt_of_several_days_is_divided_among_them_in_the_order_of_its_kinds(midnight: float) -> None:
    calendar = Calendar()
    hour = 3600.0
    spent = {"queue": 3 * hour, "start": hour, "train": 20 * hour, "stall": 5 * hour, "lost": 4 * hour}
    # It waits until two hours before midnight, trains through the next day, and loses its last hours.
    calendar.add([attempt(midnight - 5 * hour, **spent)])
    days = {day: {kind: round(hours, 9) for kind, hours in each.hours.items()} for day, each in calendar.days.items()}
    assert days == {
        date(2026, 11, 21): {"queue": 3, "start": 1, "train": 0.8, "stall": 0.2},
        date(2026, 11, 22): {"train": 19.2, "stall": 4.8},
        date(2026, 11, 23): {"lost": 4},
    }


def test_attempts_at_times_that_no_calendar_has_are_left_out(midnight: float) -> None:
    calendar = Calendar()
    calendar.add([attempt(1e300, train=5.0), attempt(-1e12, train=5.0), attempt(0.0, train=1e12)])
    assert not calendar.days
    packed = [Attempt(number=1, job_id="7", restart=0, hosts={"0": "a", "1": "b"}, pack=4, spent={"train": 7200.0})]
    assert node_hours(packed) == {"train": 1.0}


def test_a_comparison_has_what_compare_prints(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["0000000003", "0000000014", "0000000043"]
    path = tmp_path / "compared.html"
    code, out, _ = call(workspace.root.path, capsys, "compare", *names, "--html", str(path))
    assert (code, out) == (0, f"{path}\n")
    assert path.stat().st_mode & 0o077 == 0
    [text] = Elements(path.read_text()).text("script", id="facts")
    facts = json.loads(text)
    assert facts["comparison"] == printed(workspace, capsys, "compare", *names)
    performance = printed(workspace, capsys, "compare", *names, "--performance")
    assert {name: facts["performance"][name] for name in performance} == performance
    assert {curve["run"] for curve in facts["curves"]["val_acc"]["runs"]} == set(names)
    assert [sorted(mean["runs"]) for mean in facts["curves"]["val_acc"]["means"]] == [["0000000003", "0000000043"]]
    assert facts["over"] == ["seed"]


def test_a_sweep_without_results_says_so(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "runs")
    for number in (1, 2):
        write_run(workspace, number, params={"lr": number}, sweep=SWEEP, state="pending", spec=BEST)
    facts = facts_of(workspace, SWEEP)
    assert facts["notes"] == [
        "none of the runs has logged a metric yet, so there is no best run, and there are no curves"
    ]
    assert (facts["best"], facts["curves"], facts["groups"]) == (None, {}, [])
    write_run(workspace, 3, params={"lr": 3}, sweep=SWEEP, state="running", metrics={"speed": 1.0})
    assert "apart from failed runs, none has logged 'val_acc'" in facts_of(workspace, SWEEP)["notes"][0]
    write_run(workspace, 4, params={"lr": 4}, sweep=SWEEP, state="running", metrics={"val_acc": 0.5})
    assert facts_of(workspace, SWEEP)["notes"] == ["none of the 4 runs has completed, so the best run is provisional"]
    for number in (11, 12):
        write_run(workspace, number, "other", params={"lr": number}, sweep="othersweep", metrics={"speed": number})
    assert "no metric's name says which values are better" in facts_of(workspace, "othersweep")["notes"][0]


def test_mistakes_are_sentences_and_write_nothing(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = workspace.root.path
    target = tmp_path / "page.html"
    for arguments, message in (
        (("report", "nothing"), "there is no run 'nothing'"),
        (("report", "--where", "state = lost"), f"none of {SIZE + 2} runs matches, so there is nothing to report"),
        (("report", "--where", "params.lrr > 1"), "did you mean 'params.lr'"),
        (("report", "--since", "yesterday"), "is not a time"),
        (("compare", "0000000001", "--html"), "a comparison needs at least two runs"),
    ):
        output = [] if arguments[-1] == "--html" else ["-o"]
        code, _, err = call(root, capsys, *arguments, *output, str(target))
        assert code in (1, 2), arguments
        assert message in err
        assert "Traceback" not in err
        assert not target.exists()
    for arguments in (("report", SWEEP, "-o"), ("compare", "0000000001", "0000000002", "--html")):
        code, _, err = call(root, capsys, *arguments, str(tmp_path / "missing" / "page.html"))
        assert code != 0
        assert f"cannot write {tmp_path}/missing/page.html: " in err
    code, _, err = call(make_workspace(tmp_path / "empty").root.path, capsys, "report")
    assert (code != 0, "so there is nothing to report" in err) == (True, True)
    assert call(root, capsys, "compare", SWEEP, "--html", str(target), "--json")[0] == 2


def test_names_params_metrics_notes_and_errors_are_facts_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = make_workspace(tmp_path / "runs")
    for number, text in enumerate(HOSTILE, 1):
        # A spec would not take such names, but a journal may hold them.
        write_run(
            workspace, number, params={text: text, "lr": number}, metrics={text: 1.0, "loss": number}, sweep=SWEEP,
            spec={"params": {"lr": number}},
        )  # fmt: skip
    marked = write_run(workspace, 900, metrics={"loss": 1.0}, state="running")
    marked.command("note", text=HOSTILE[-2]).crashed(error=HOSTILE[-3])
    page = tmp_path / "page.html"
    for arguments in (("report", SWEEP, "-o"), ("report", "-o"), ("compare", "0000000001", "0000000002", "--html")):
        code, _, err = call(workspace.root.path, capsys, *arguments, str(page))
        assert code == 0, err
        elements = Elements(page.read_text())
        assert {tag for tag, _ in elements.tags} == {
            "html", "head", "meta", "link", "title", "style", "body", "header", "nav", "main", "noscript", "footer",
            "script",
        }  # fmt: skip
        [text] = elements.text("script", id="facts")
        assert {run["id"] for run in json.loads(text)["runs"]} >= {"0000000001", "0000000002"}
        page.unlink()
