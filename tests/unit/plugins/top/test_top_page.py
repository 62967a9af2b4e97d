"""The page and its keys, driven through textual without a terminal."""

from __future__ import annotations

import asyncio
import gc
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.simulated_run import SimulatedRun
from helpers.workspaces import make_workspace
from textual.geometry import Region
from textual.pilot import Pilot

from slurmtrain.plugins.top import app as page
from slurmtrain.plugins.top.app import TopApp
from slurmtrain.plugins.top.reading import Action, Outcome
from slurmtrain.plugins.top.widgets import MOST_LINES, LinesView, LogScreen, Prompt, RunsTable, TextScreen

PATIENCE_S = 30.0
# Runs are looked at when a test says so, or a key; not because time has passed.
RARELY_S = 3600.0
Driver = Callable[[TopApp, Pilot[int]], Awaitable[None]]


def add_run(root: Path, number: int) -> SimulatedRun:
    """A run that trains, after two steps of a second each."""
    directory = make_workspace(root).root.run(f"{number:010}")
    sim = SimulatedRun(directory, spec={"name": f"run-{number}"}, executor="local", job=str(number))
    elsewhere = {"host": "elsewhere", "boot": "b", "pid": 5, "start": 9}
    sim.submitted(process=elsewhere, host="elsewhere").started(host="elsewhere", process=elsewhere)
    sim.rank("session", step=0, world_size=1, device="cpu").rank("total", total_steps=100)
    sim.reached(1, at=1001.0, loss=0.5).reached(2, at=1002.0, loss=0.5)
    logs = directory.attempt(sim.job, 0).logs
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("".join(f"line {line} of run {number}\n" for line in range(30)))
    return sim


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs root with thirty runs, every third of which has ended."""
    path = tmp_path_factory.mktemp("sample") / "runs"
    for number in range(30):
        sim = add_run(path, number)
        if number % 3 == 0:
            sim.ended("completed")
    return path


@pytest.fixture
def root(sample: Path, tmp_path: Path) -> Path:
    """A copy of the sample."""
    return Path(shutil.copytree(sample, tmp_path / "runs"))


def drive(root: Path, driver: Driver, size: tuple[int, int] = (80, 24)) -> None:
    """Run the page until the driver is done, from when it shows the runs."""

    async def main() -> None:
        app = TopApp(make_workspace(root).config, RARELY_S)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: bool(app._snapshot))
            await driver(app, pilot)

    asyncio.run(main())


async def until(pilot: Pilot[Any], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        await pilot.pause(0.01)


def selected(app: TopApp) -> str:
    row = app.table.selected
    return row.id[-2:]


def listed(app: TopApp) -> list[str]:
    return [row.id[-2:] for row in app.table._rows]


def log_of(app: TopApp) -> list[str]:
    return app.screen_stack[0].query_one("#log", LinesView).lines


def test_keys_select_choose_and_sort_runs_and_the_pane_follows(root: Path) -> None:
    async def driver(app: TopApp, pilot: Pilot[int]) -> None:
        assert (selected(app), len(listed(app))) == ("29", 30)
        await until(pilot, lambda: "line 29 of run 29" in log_of(app))
        for keys, place in ((["j", "down"], "26"), (["k"], "28"), (["G"], "00"), (["g"], "29"), (["up"], "29")):
            await pilot.press(*keys)
            assert selected(app) == place, keys
        await pilot.press("j", "j")
        await until(pilot, lambda: log_of(app)[-1:] == ["line 29 of run 26"])
        facts = "\n".join(app.query_one("#facts", LinesView).lines)
        assert "running" in facts
        await pilot.press("k", "a")
        assert (len(listed(app)), selected(app)) == (20, "28")
        await pilot.press("a", "o")
        assert (listed(app)[:3], selected(app)) == (["29", "28", "27"], "28")

    drive(root, driver)


def test_a_filter_works_while_it_is_typed_and_escape_shows_all_again(root: Path) -> None:
    async def driver(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("slash", *"run-2")
        assert len(listed(app)) == 11
        await pilot.press(*"7", "enter", "j")
        assert (listed(app), app.query_one(Prompt).display) == (["27"], False)
        await pilot.press("escape")
        assert len(listed(app)) == 30
        await pilot.press("slash", *"nothing", "escape")
        assert len(listed(app)) == 30
        assert isinstance(app.focused, RunsTable)

    drive(root, driver)


def test_a_filter_may_be_a_condition_and_a_wrong_one_is_explained(root: Path) -> None:
    async def driver(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("slash", *"state=completed", "enter")
        assert len(listed(app)) == 10
        await pilot.press("slash", "end", "x", "enter")
        await until(pilot, lambda: any("completed" in text and "completedx" in text for text in notices(app)))
        assert (len(listed(app)), app.query_one(Prompt).display) == (10, True)
        await pilot.press("escape")
        assert len(listed(app)) == 30

    drive(root, driver)


def test_logs_fill_the_screen_are_searched_and_followed(root: Path) -> None:
    async def driver(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, LogScreen) and len(app.screen.view.lines) == 30)
        view = app.query_one(LinesView) if not isinstance(app.screen, LogScreen) else app.screen.view
        assert view.at_end
        await pilot.press("slash", *"LINE 3 of", "enter")
        assert (view.scroll_offset.y, view.at_end) == (3, False)
        await pilot.press("f")
        with (root / f"{29:010}" / "attempts" / "29.0" / "logs" / "rank-0.log").open("a") as log:
            log.write("the newest\n")
        await until(pilot, lambda: view.lines[-1] == "the newest")
        await until(pilot, lambda: view.at_end)
        await pilot.press("t")
        await until(pilot, lambda: view.lines[-1] == "[1/rank 0] the newest")
        await pilot.press("q")
        assert len(app.screen_stack) == 1
        await until(pilot, lambda: log_of(app)[-1:] == ["the newest"])

    drive(root, driver)


def test_all_about_a_run_and_help_can_be_read(root: Path) -> None:
    async def driver(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("s")
        await until(pilot, lambda: isinstance(app.screen, TextScreen))
        await until(pilot, lambda: any("attempt 1" in line for line in app.screen.query_one(LinesView).lines))
        await pilot.press("escape", "question_mark")
        assert any("cancel the run" in line for line in app.screen.query_one(LinesView).lines)
        await pilot.press("q")
        assert len(app.screen_stack) == 1

    drive(root, driver)


def test_a_page_about_the_selected_run_is_written_and_its_path_is_shown(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def driver(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("w")
        await until(pilot, lambda: any("report-" in text for text in notices(app)))
        assert any(f"{tmp_path}/report-" in text and "was written" in text for text in notices(app))

    drive(root, driver)
    [page] = tmp_path.glob("report-*.html")
    assert page.stat().st_mode & 0o777 == 0o600


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What actions did, instead of doing it: those on run 28 fail."""
    performed_actions: list[tuple[str, str]] = []

    def replace(name: str) -> None:
        def do(_: Any, run_id: str) -> Outcome:
            performed_actions.append((name, run_id[-2:]))
            if run_id.endswith("28"):
                raise OSError(28, "No space left on device")
            return Outcome(f"{name} is done")

        action: Action = getattr(page, name)
        monkeypatch.setattr(page, name, Action(action.doing, action.question, do))

    for name in ("CANCEL", "RESUME", "CHECKPOINT"):
        replace(name)
    return performed_actions


def notices(app: TopApp) -> list[str]:
    return [notification.message for notification in app._notifications]


def test_actions_that_end_or_start_a_run_are_asked_first(root: Path, performed: list[tuple[str, str]]) -> None:
    async def driver(app: TopApp, pilot: Pilot[int]) -> None:
        for key in ("n", "escape", "enter"):
            await pilot.press("c", key)
        assert performed == []
        await pilot.press("c", "y")
        await until(pilot, lambda: "CANCEL is done" in notices(app))
        await pilot.press("r", "y")
        await until(pilot, lambda: "RESUME is done" in notices(app))
        await pilot.press("p")
        await until(pilot, lambda: "CHECKPOINT is done" in notices(app))
        assert performed == [("CANCEL", "29"), ("RESUME", "29"), ("CHECKPOINT", "29")]

    drive(root, driver)


def test_an_action_that_fails_is_shown_and_the_page_goes_on(root: Path, performed: list[tuple[str, str]]) -> None:
    async def driver(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("j", "p")
        await until(pilot, lambda: "no space left on the device" in notices(app))
        await pilot.press("j")
        assert selected(app) == "26"

    drive(root, driver)


def test_a_refusal_is_shown_as_its_sentence_and_a_new_run_does_not_change_what_is_selected(root: Path) -> None:
    async def driver(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("j", "r", "y")
        await until(pilot, lambda: any("is running; wait for it, or end it" in text for text in notices(app)))
        add_run(root, 30)
        app.show_snapshot(app._reader.look())
        await until(pilot, lambda: "30" in listed(app))
        assert selected(app) == "28"

    drive(root, driver)


class Drawn:
    """The regions of the table that were drawn again."""

    def __init__(self, table: RunsTable, monkeypatch: pytest.MonkeyPatch) -> None:
        self.regions: list[Region] = []
        self.whole = 0
        refresh = table.refresh

        def count(*regions: Region, **more: Any) -> Any:
            self.regions += regions
            self.whole += not regions
            return refresh(*regions, **more)

        monkeypatch.setattr(table, "refresh", count)


def test_only_cells_that_changed_are_drawn_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def driver(app: TopApp, pilot: Pilot[int]) -> None:
        drawn = Drawn(app.table, monkeypatch)
        for _ in range(3):
            app.show_snapshot(app._reader.look())
            await pilot.pause()
        assert (drawn.regions, drawn.whole) == ([], 0)
        for number, where in ((28, 1), (1, None)):
            SimulatedRun(make_workspace(root).root.run(f"{number:010}"), job=str(number)).reached(
                3, at=1003.0, loss=0.5
            )
            app.show_snapshot(app._reader.look())
            await pilot.pause()
            # The second one is not in sight.
            assert {region.y - 1 for region in drawn.regions} == ({where} if where else set())
            assert all(region.width < 20 for region in drawn.regions)
            drawn.regions.clear()
        assert drawn.whole == 0
        # Moving draws two lines.
        await pilot.press("j")
        assert ({region.y for region in drawn.regions}, drawn.whole) == ({1, 2}, 0)

    drive(root, driver, (60, 24))


def test_every_size_of_screen_shows_the_table(root: Path) -> None:
    async def driver(app: TopApp, pilot: Pilot[int]) -> None:
        for width, height in ((60, 24), (20, 5), (300, 100)):
            await pilot.resize_terminal(width, height)
            await pilot.press("G", "k", "g")
            table = app.table
            assert table.size.height >= 1
            assert all(table.render_line(y).cell_length == width for y in range(table.size.height))

    drive(root, driver)


def test_a_view_of_lines_keeps_only_the_newest() -> None:
    view = LinesView()
    for _ in range(3):
        view.append(f"line {number}" for number in range(MOST_LINES))
    assert len(view.lines) == MOST_LINES


def test_refreshes_take_no_more_memory(root: Path) -> None:
    async def driver(app: TopApp, pilot: Pilot[int]) -> None:
        async def objects_after(looks: int) -> int:
            for _ in range(looks):
                app.show_snapshot(app._reader.look())
                await pilot.pause()
            gc.collect()
            return len(gc.get_objects())

        before = await objects_after(5)
        assert await objects_after(12) - before < 240

    drive(root, driver)
