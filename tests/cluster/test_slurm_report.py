"""The page of a run that a real Slurm has preempted, and whose ranks were killed and have hung before."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import Browser, browser
from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import PARAMS, SPOT, STEPS, TWO, events, pid_of, preempt, until_trains
from helpers.site import PATIENCE_S, until

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
DRAWN = "return document.documentElement.dataset.drawn ?? null"
# Seconds by kind, as the page draws them: the widths of rectangles of a colour on the row of the first node.
DRAWN_S = """
const facts = JSON.parse(document.getElementById('facts').textContent)
const seconds = {}
for (const { intervals } of facts.timeline.attempts)
    for (const [kind, begin, end] of intervals) seconds[kind] = (seconds[kind] ?? 0) + end - begin
return seconds
"""
# Of each table with an id: the values of its cells by which it sorts.
TABLES = """
return Object.fromEntries([...document.querySelectorAll('table[id]')].map(table => [table.id,
    [...table.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.dataset.value ?? null))]))
"""


def test_a_preempted_and_rolled_back_run_as_a_page(site: ClusterSite, cluster: Cluster, tmp_path: Path) -> None:
    spec = site.light(
        "digits",
        params=PARAMS,
        resources=TWO,
        slurm=SPOT,
        checkpoint={"every": {"steps": 20}, "keep": 4},
        requeue={"hang_after": 3, "backoff_s": 1},
    )
    run_id = site.submit(spec)
    until_trains(site, run_id, starts=1)
    until(lambda: events(site, run_id, "saved"), "a checkpoint")
    site.until_step(run_id, site.step(run_id) + 10)
    os.kill(pid_of(site, run_id, 1), signal.SIGKILL)
    until_trains(site, run_id, starts=2)
    saved = len(events(site, run_id, "saved"))
    until(lambda: len(events(site, run_id, "saved")) > saved, "another checkpoint")
    os.kill(pid_of(site, run_id, 1), signal.SIGSTOP)
    until_trains(site, run_id, starts=3)
    preempt(cluster, lambda: events(site, run_id, "requeue"))
    site.until_state(run_id, "completed", patience_s=2 * PATIENCE_S + 4 * STEPS * PARAMS["step_ms"] / 1000)
    site.call("report", run_id, "-o", "page.html")
    # A browser does not run as the user who owns it.
    path = tmp_path / "page.html"
    path.write_bytes((site.path / "page.html").read_bytes())
    run = site.show(run_id)
    assert [each["cause"] for each in run["attempts"]] == ["preempted", "completed"]
    assert [each["cause"] for each in run["attempts"][0]["restarts"]] == ["crash", "hang"]
    assert run["lost_steps"] > 0
    assert path.stat().st_size < 1_000_000
    with browser(tmp_path) as page:
        page.open(path.as_uri())
        page.wait_for(DRAWN, bool)
        check_figures(page, run)
        page.click("#checkpoints-table th:nth-child(1) button")
        steps = [float(row[0]) for row in page.run(TABLES)["checkpoints-table"]]
        assert steps == sorted(steps)
        draw_pictures(page)
        assert page.complaints() == []
        assert {each for each in page.requests() if not each.startswith("file:")} == set()


def check_figures(page: Browser, run: dict[str, Any]) -> None:
    """What is drawn and listed is what ``show --json`` says."""
    facts = page.run("return JSON.parse(document.getElementById('facts').textContent)")
    for name, value in facts["run"].items():
        assert name == "attempts" or value == run[name], name
    for attempt, shown in zip(facts["run"]["attempts"], run["attempts"], strict=True):
        assert all(value == shown[name] for name, value in attempt.items())
    listed = {each["step"]: each for each in facts["checkpoints"]["shown"]}
    assert all(listed[each["step"]].items() >= each.items() for each in run["checkpoints"])
    # The browser's own order of names is another one.
    seconds = {kind: spent for kind, spent in run["seconds"].items() if spent}
    assert page.run(DRAWN_S) == pytest.approx(seconds, abs=0.05)
    assert facts["timeline"]["goodput"][-1][1] == pytest.approx(run["goodput"], abs=1e-4)
    tables = page.run(TABLES)
    for row, attempt in zip(tables["attempts"], run["attempts"], strict=True):
        assert [float(cell) for cell in row[-len(seconds) :]] == [attempt["seconds"][kind] for kind in seconds]
    on_disk = {str(each["step"]) for each in run["checkpoints"]}
    assert {row[0] for row in tables["checkpoints-table"] if "deleted" not in row} == on_disk
    assert tables["networks"][0][1] == "yes"
    nodes = [row["label"] for row in facts["timeline"]["rows"]]
    assert nodes == sorted({host for attempt in run["attempts"] for host in attempt["nodes"]})
    assert page.run("return document.querySelectorAll('#curves .replayed path').length") > 0
    shown = page.run("return document.body.innerText")
    assert run["why"] in shown
    assert all(attempt["reason"] in shown for attempt in run["attempts"])
    assert "hang" in shown


def draw_pictures(page: Browser) -> None:
    """Draw the pictures of docs/report.md, light and dark."""
    page.run("scrollTo(0, 0)")
    page.point_at("#timeline .spans rect[fill='var(--lost)']")
    page.wait_for("return document.querySelector('#timeline [aria-label=tip]')?.textContent ?? ''", bool)
    assert "SIGKILL" in page.run("return document.querySelector('#timeline [aria-label=tip]').textContent")
    for theme in ("light", "dark"):
        page.emulate(prefers_color_scheme=theme)
        drawn = page.picture(1180)
        assert len(drawn) < 250_000
        if os.environ.get("UPDATE_GOLDEN"):
            (IMAGES / f"report-run-{theme}.png").write_bytes(drawn)
