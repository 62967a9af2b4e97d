"""The pages of sweeps, of many runs and of comparisons in a real browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.browser import Browser, browser
from helpers.queried_runs import SWEEP, write_run
from helpers.rare import rare
from helpers.site import Site
from helpers.swept_runs import write_swept
from helpers.workspaces import make_workspace

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
HOSTILE = '<img src=x onerror="window.hacked=1"></script><script>window.hacked=2</script>'
ROWS = """
return [...document.querySelectorAll('#runs-table tbody tr')].map(row => row.dataset.run ?? row.cells[0].innerText)
"""
COLUMN = """
const names = [...document.querySelectorAll('#runs-table thead th')].map(head => head.innerText.replace(/ [↑↓]$/, ''));
const place = names.indexOf('%s');
return [...document.querySelectorAll('#runs-table tbody tr')].map(row => row.cells[place].dataset.value ?? null)
"""
BUSY = "#calendar [aria-description] rect"
DAYS = f'return document.querySelectorAll("{BUSY}").length'
LINES = "return document.querySelectorAll('#%s .chart [data-runs]').length"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A sweep of 200 runs, and two further runs, whose metrics and errors would be code if they were no text."""
    site = Site(tmp_path_factory.mktemp("site"))
    workspace = make_workspace(site.runs)
    write_swept(workspace, 200)
    for number in (7001, 7002):
        run = write_run(
            workspace, number, "gpt", params={"text": HOSTILE, "layers": number, "state": "x"}, state="running",
            metrics={"loss": 0.5, HOSTILE: number}, days_ago=number - 6999,
        )  # fmt: skip
        run.command("note", text=HOSTILE).crashed(error=HOSTILE)
    return site


def show(site: Site, page: Browser, *arguments: str, at_least: int = 1) -> None:
    """Write a page, and open it; it must have charts, and neither complaints nor requests."""
    path = site.path / "page.html"
    option = "--html" if arguments[0] == "compare" else "-o"
    assert site.call(*arguments, option, str(path)).stdout.strip() == str(path)
    assert path.stat().st_size < 3_000_000
    page.complaints()
    page.requests()
    page.open(path.as_uri())
    page.wait_for("return document.querySelectorAll('.chart svg').length", lambda count: count >= at_least)


def check(site: Site, page: Browser) -> None:
    """Nothing went wrong, and nothing was asked for, as long as the page was open."""
    assert page.complaints() == []
    assert {address.partition(":")[0] for address in page.requests()} == {"file"}
    assert page.run("return window.hacked ?? null") is None


def test_a_sweep_can_be_sorted_filtered_and_marked(site: Site, page: Browser) -> None:
    show(site, page, "report", SWEEP, at_least=2)
    best = page.run(ROWS)
    assert len(best) == 200
    assert page.run("return document.getElementById('head').innerText").startswith("cnn: sweep of 200 runs")
    page.click("#runs-table thead th:nth-child(4) button")
    assert page.run("return document.querySelector('#runs-table th[aria-sort]').innerText").startswith("lr")
    rates = [float(value) for value in page.run(COLUMN % "lr")]
    assert rates == sorted(rates, reverse=True)
    page.click("#runs-table thead th:nth-child(4) button")
    assert [float(value) for value in page.run(COLUMN % "lr")] == sorted(rates)
    # Of each run that has a value there is a line; means take the place of the runs that they are of.
    assert page.run(LINES % "params") == 200
    means = page.run("return JSON.parse(document.getElementById('facts').textContent).curves.val_acc.means.length")
    assert page.run(LINES % "curves") == 2 * means
    # A line that is clicked on stays marked, in the table too.
    page.point_at("#params svg", x=130, clicks=True)
    marked = "return [...document.querySelectorAll('#runs-table tr.picked')].map(row => row.dataset.run)"
    page.wait_for(marked, lambda rows: len(rows) == 1)
    [run] = page.run(marked)
    assert page.run("return document.querySelectorAll('#params [data-runs].picked').length") >= 1
    assert run in page.run("return document.querySelector('#params .note[aria-live]').textContent")
    page.run(f"document.querySelector('#runs-table tr[data-run=\"{run}\"] input').click()")
    assert page.run(marked) == []
    page.run("[...document.querySelectorAll('#overview label')].find(label => label.innerText === 'completed').click()")
    page.wait_for(LINES % "params", lambda count: 0 < count < 20)
    assert set(page.run(COLUMN % "state")) == {"running", "requeued", "created"}
    check(site, page)


@pytest.mark.parametrize(("name", "arguments"), [("sweep", ("report", SWEEP)), ("many", ("report", "--since", "26w"))])
def test_pictures_of_pages(site: Site, page: Browser, name: str, arguments: tuple[str, ...]) -> None:
    show(site, page, *arguments, at_least=2)
    picture = page.picture()
    assert 10_000 < len(picture) < 300_000
    if os.environ.get("UPDATE_GOLDEN"):
        (IMAGES / f"report-{name}.png").write_bytes(picture)
    check(site, page)


def test_a_day_of_the_calendar_shows_its_runs(site: Site, page: Browser) -> None:
    show(site, page, "report", at_least=3)
    facts = page.run("return JSON.parse(document.getElementById('facts').textContent)")
    assert len(page.run(ROWS)) == 200
    assert "show all 202 rows" in page.run("return document.getElementById('runs').innerText")
    cells = page.run(DAYS)
    assert cells == sum(bool(set(day["hours"]) - {"queue"}) for day in facts["days"])
    page.run("document.querySelector('#calendar select').value = 'lost'")
    page.run("document.querySelector('#calendar select').dispatchEvent(new Event('change'))")
    lost = sum("lost" in day["hours"] for day in facts["days"])
    page.wait_for(
        DAYS,
        lambda count: count == lost,
    )
    page.point_at(BUSY, clicks=True)
    page.wait_for(ROWS, lambda rows: 0 < len(rows) < 200)
    day = page.run("return document.querySelector('#calendar .note[aria-live]').textContent")
    assert page.run("return document.querySelector('#runs .note').innerText").startswith(f"runs of {day[:10]}")
    check(site, page)


def test_runs_are_compared_on_a_page_in_light_and_dark(site: Site, page: Browser) -> None:
    show(site, page, "compare", "0000000003", "0000000014", "0000000043", "0000007001")
    text = page.run("return document.body.innerText")
    assert HOSTILE in text
    heads = page.run("return [...document.querySelectorAll('#runs-table thead th')].map(head => head.innerText)")
    assert {"params.state", "state"} <= set(heads)
    assert len(heads) == len(set(heads))
    assert page.run("return document.querySelectorAll('#comparison-table thead th').length") == 5
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(colour)
    page.run("document.documentElement.dataset.theme = 'dark'")
    assert page.run(colour) != light
    check(site, page)


@rare
def test_a_page_of_a_thousand_runs_is_small_and_can_be_used(tmp_path: Path, page: Browser) -> None:
    site = Site(tmp_path)
    write_swept(make_workspace(site.runs), 1000)
    for arguments in (("report", SWEEP), ("report",)):
        show(site, page, *arguments, at_least=2)
        assert page.run("return document.querySelector('#runs-table tbody').rows.length") == 200
        page.run(
            "[...document.querySelectorAll('#runs button')].find(each => each.innerText.includes('1,000')).click()"
        )
        assert len(page.run(ROWS)) == 1000
        check(site, page)
