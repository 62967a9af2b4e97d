"""``slurmtrain report`` as typed, and its pages in a real browser."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import Browser, browser
from helpers.hostile_names import draw_names
from helpers.queried_runs import write_run
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.site import Site
from helpers.workspaces import make_workspace

from slurmtrain.model.run.layout import RunsRoot

# What would show that a page has taken text for something else.
ATTACK = "</script><img src=x onerror=window.attacked=1><script>window.attacked=1</script>"
SECRET = "hunter2"
NAMES = [name for name in draw_names(12) if name.strip()]
DRAWN = "return document.documentElement.dataset.drawn ?? null"
# The values of the rows of a table by which it sorts, and how many rows are shown.
CELLS = """
return [...document.querySelectorAll('#%s tbody tr')].map(row =>
    [...row.children].map(cell => cell.dataset.value ?? null))
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A runs root with a run that was preempted, rolled back, slow, and named by somebody who means ill."""
    site = Site(tmp_path)
    sim = SimulatedRun(
        RunsRoot(site.runs).run(RUN_ID), spec={"params": {"lr": 0.1}, "checkpoint": {"every": {"steps": 5}}}
    )
    params = {"lr": 0.1, **dict.fromkeys(NAMES, ATTACK), ATTACK: 1}
    sim.created(name=f"n{ATTACK}", params=params, command=f"python {ATTACK}", git={"commit": "c0ffee" * 6})
    sim.submitted().later(20).started(nodes=2)
    sim.node("preflight", seconds=1.0, findings=[{"check": "clock", "status": "warn", "summary": ATTACK}])
    sim.node("workers", processes={"0": {}, "1": {}}).rank("session", step=0, world_size=2)
    sim.rank("total", total_steps=40)
    for step in range(1, 13):
        sim.later(2).reached(step, loss=1 / step, **dict.fromkeys(NAMES, float(step)), **{ATTACK: -1.0})
        if not step % 5:
            sim.saved(step, stall_s=0.5)
    straggler = {"rank": 1, "host": "n1", "step": 12, "own_s": 0.5, "median_s": 0.1, "ratio": 5.0}
    sim.node("straggler", **straggler)
    sim.node("restart", round=1, cause="crash", why=f"rank 1 {ATTACK}", reached=12).later(3)
    sim.write("attempts/7.0/rank-0.1.jsonl", "session", step=0, world_size=2)
    sim.write("attempts/7.0/rank-0.1.jsonl", "restored", step=10, took_s=0.5, path="checkpoints/step-10")
    sim.write("attempts/7.0/rank-0.1.jsonl", "total", total_steps=40)
    for step in range(11, 21):
        sim.later(2).reached(step, loss=1 / step)
    sim.stopped(0, reason=f"stopped {ATTACK}").stopped(1)
    sim.started(restart=1, nodes=2).rank("session", 0, 1, step=10, world_size=2).rank("total", 0, 1, total_steps=40)
    for step in range(11, 41):
        sim.later(1).reached(step, 1, loss=1 / step)
    sim.ended("completed", 0, 1).ended("completed", 1, 1).command("note", text=ATTACK)
    spec = f"name: {ATTACK}\nsetup:\n- export API_TOKEN={SECRET}\n- curl https://ada:{SECRET}@example.org/data\n"
    (site.runs / RUN_ID / "spec.yaml").write_text(spec)
    return site


def drawn(page: Browser, path: Path) -> None:
    page.open(path.as_uri())
    page.wait_for(DRAWN, bool)


def test_a_run_as_a_page_has_the_figures_of_show_and_text_stays_text(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    assert site.call("report", RUN_ID, "-o", str(path)).stdout.splitlines() == [str(path)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size < 1_000_000
    assert SECRET not in path.read_text()
    run = site.show(RUN_ID)
    assert run["note"] == ATTACK
    assert (run["step"], [each["cause"] for each in run["attempts"]]) == (40, ["preempted", "completed"])
    with browser(tmp_path) as page:
        drawn(page, path)
        inline = page.run("return JSON.parse(document.getElementById('facts').textContent)")
        assert inline["run"].keys() == run.keys() - {"checkpoints"}
        for name, value in inline["run"].items():
            if name != "attempts":
                assert value == run[name], name
        for attempt, shown in zip(inline["run"]["attempts"], run["attempts"], strict=True):
            assert all(value == shown[name] for name, value in attempt.items())
        assert page.run("return document.title") == inline["title"]
        # Figures as the reader sees them.
        assert page.run("return document.querySelector('[data-goodput]').dataset.goodput") == str(run["goodput"])
        rows = page.run(CELLS % "attempts")
        assert [row[:2] for row in rows] == [["1", "preempted"], ["2", "completed"]]
        kinds = [kind for kind, seconds in run["seconds"].items() if seconds]
        for row, attempt in zip(rows, run["attempts"], strict=True):
            assert [float(cell) for cell in row[-len(kinds) :]] == [attempt["seconds"][kind] for kind in kinds]
        spent = page.run("return document.querySelector('#cost [data-field=spent]').dataset.value")
        assert float(spent) == run["cost"]["spent"]
        saved = {str(each["step"]) for each in run["checkpoints"]}
        assert {row[0] for row in page.run(CELLS % "checkpoints-table")} == saved == {"5", "10"}
        for selector in ("#timeline .spans", "#curves .kept", "#curves .replayed", "#steps svg rect", "#goodput svg"):
            assert page.run(f"return document.querySelectorAll({json.dumps(selector)}).length"), selector
        # Sorted by a click, and the other way by another one.
        page.click("#attempts th:nth-child(1) button")
        assert [row[0] for row in page.run(CELLS % "attempts")] == ["2", "1"]
        page.click("#attempts th:nth-child(1) button")
        assert [row[0] for row in page.run(CELLS % "attempts")] == ["1", "2"]
        assert page.run("return document.querySelector('#attempts th').getAttribute('aria-sort')") == "ascending"
        # What is pointed at says what it is, in words.
        page.point_at("#timeline .spans rect:last-of-type")
        page.wait_for("return document.querySelector('#timeline [aria-label=tip]')?.textContent ?? ''", bool)
        assert "attempt" in page.run("return document.querySelector('#timeline [aria-label=tip]').textContent")
        page.click("#curves input[type=checkbox]")
        check_themes(page)
        assert page.run("return window.attacked ?? null") is None
        assert page.run("return document.querySelectorAll('img, iframe, object, form').length") == 0
        shown = page.run("return document.body.innerText")
        assert ATTACK in shown
        assert f"rank 1 {ATTACK}" in shown
        assert "API_TOKEN=<redacted>" in page.run("return document.querySelector('#spec').textContent")
        assert page.complaints() == []
        assert [each for each in page.requests() if not each.startswith("file:")] == []


def check_themes(page: Browser) -> None:
    """A page is as light or dark as the reader's system, unless chosen otherwise, and light on paper."""
    background = "return getComputedStyle(document.body).backgroundColor"
    page.emulate(prefers_color_scheme="light")
    light = page.run(background)
    page.emulate(prefers_color_scheme="dark")
    assert page.run(background) != light
    page.click("#theme")
    assert page.run("return document.documentElement.dataset.theme") == "light"
    assert page.run(background) == light
    page.click("#theme")
    page.emulate(media="print")
    assert page.run(background) == light
    assert page.run("return getComputedStyle(document.getElementById('theme')).display") == "none"
    page.emulate()


def test_reports_of_what_there_is_not_or_to_nowhere_are_a_sentence(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for number in (1, 2):
        write_run(make_workspace(site.runs), number, f"cnn{number}", metrics={"loss": 0.5})
    problems: list[tuple[tuple[str, ...], str]] = [
        (("nothing",), "there is no run 'nothing'"),
        (("--since", "soon"), "soon"),
        (("--where", "state = failed"), "none of 2 runs matches"),
        (("--where", "stat = failed"), "stat"),
        (("cnn1", "-o", str(tmp_path / "missing" / "page.html")), "No such file or directory"),
        (("cnn1", "-o", str(tmp_path)), "directory"),
    ]
    for arguments, message in problems:
        failed = site.call("report", *arguments, code=None)
        assert failed.returncode == 2, failed.stderr
        assert message.lower() in failed.stderr.lower()
        assert "Traceback" not in failed.stderr
    printed = site.call("report", "cnn1", "-o", "-").stdout
    assert printed.startswith("<!doctype html>")
    assert site.call("report", "cnn1").stdout == "report-0000000001.html\n"
    assert (site.path / "report-0000000001.html").stat().st_size < 1_000_000


def test_a_run_that_writes_is_shown_as_it_is_at_that_moment(tmp_path: Path) -> None:
    site = Site(tmp_path)
    sim = write_run(make_workspace(site.runs), 1, state="running", history=[{"loss": 1 / n} for n in range(1, 4)])

    def read() -> dict[str, Any]:
        page = site.call("report", "@last", "-o", "-").stdout
        _, _, rest = page.partition('<script type="application/json" id="facts">')
        facts: dict[str, Any] = json.loads(rest.partition("</script>")[0])
        assert facts["run"]["step"] == len(facts["curves"]["metrics"][0]["kept"]["step"])
        return facts

    assert read()["run"]["step"] == 3
    sim.reached(4, loss=0.25)
    # A line of which only the beginning is written does not count yet.
    metrics = next((site.runs / sim.directory.id / "attempts").glob("*/metrics.jsonl"))  # type: ignore[union-attr]
    with metrics.open("ab") as file:
        file.write(b'{"t": 1, "step": 5, "metr')
    assert read()["run"]["step"] == 4
