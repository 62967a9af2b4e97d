"""The live page with a run that really trains: it is followed, saves, is cancelled and goes on, by keys alone."""

from __future__ import annotations

import re

from helpers.site import Site
from helpers.terminal import on_terminal


def trains(text: str) -> bool:
    """Whether a run called light makes steps in its newest attempt."""
    return re.search(r"light +running +[1-9]\d*/100000 .* [\d.]+/s", text) is not None


def test_a_run_is_followed_saves_is_cancelled_and_resumed_by_keys(site: Site) -> None:
    # No other saves take the place of those of this test, however long it takes.
    run_id = site.submit(site.light(params={"steps": 100_000, "step_ms": 10}, checkpoint={"every": {"minutes": 60}}))
    with on_terminal("top", "--interval", "0.5", columns=120, lines=30, env=site.environment()) as terminal:
        terminal.wait_for(trains)
        terminal.press("p")
        terminal.wait_for(f"run {run_id}: step ")
        terminal.press("c")
        terminal.wait_for("Cancel light")
        terminal.press("y")
        terminal.wait_for(lambda text: re.search(r"light +cancelled", text) is not None)
        terminal.wait_for(f"run {run_id} is cancelled")
        terminal.press("r", "y")
        terminal.wait_for("was started again")
        terminal.wait_for(trains)
        terminal.press("q")
        assert terminal.wait_for_end() == 0
    shown = site.show(run_id)
    assert [attempt["number"] for attempt in shown["attempts"]] == [1, 2]
    assert shown["attempts"][0]["cause"] == "cancelled"
    assert shown["attempts"][1]["first_step"] > 0
    assert any(checkpoint["why"] == "asked" for checkpoint in shown["checkpoints"])
