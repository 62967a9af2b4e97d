"""Curves of metrics: on a terminal, in pipes, and as pictures."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyte
import pytest
from helpers.preloaded import Called, Preloaded
from helpers.simulated_run import RUN_ID, SimulatedRun

from slurmtrain.model.run.layout import RunsRoot

GOLDEN = Path(__file__).parent.parent.parent / "golden" / "plot"
OTHER_ID = "0123456790"
WAITING_ID = "0123456791"
SILENT_ID = "0123456792"
UNREAD_ID = "0123456793"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two attempts, the second of which went back; another one; one that waits, and one that logs nothing."""
    path = tmp_path_factory.mktemp("plots")
    make_run(path, RUN_ID, {"lr": 0.1}, [range(1, 61), range(41, 101)])
    make_run(path, OTHER_ID, {"lr": 0.3}, [range(1, 101)])
    waiting = SimulatedRun(RunsRoot(path / "runs").run(WAITING_ID), spec={"name": "later"}, now=1_500.0)
    waiting.created().submitted()
    make_run(path, SILENT_ID, {}, [range(0)], name="silent")
    make_run(path, UNREAD_ID, {}, [range(0)], name="unread", tracking={"metrics": {"file": "metrics.csv"}})
    return path


def make_run(
    path: Path, run_id: str, params: dict[str, float], attempts: list[range], name: str = "cnn", **keys: Any
) -> None:
    spec = {"name": name, "params": params, **keys}
    run = SimulatedRun(RunsRoot(path / "runs").run(run_id), spec=spec, executor="local")
    run.created(name=name, params=params).submitted()
    for restart, steps in enumerate(attempts):
        run.job = f"j{restart + 1}"
        if restart:
            run.submitted(restart + 1)
        run.started()
        run.rank("session", step=steps.start - 1 if steps else 0, world_size=1, device="cpu")
        run.rank("total", total_steps=100)
        lines = "".join(line(step, 2_000.0 + 1_000 * restart + step, params.get("lr", 1), restart) for step in steps)
        metrics = run.directory.attempt(run.job, 0).metrics
        metrics.parent.mkdir(parents=True, exist_ok=True)
        metrics.write_text(lines)
        run.node("end", cause="completed" if restart == len(attempts) - 1 else "crash", reason="r", failed_at=run.now)


def line(step: int, time: float, lr: float, restart: int) -> str:
    loss = math.nan if 70 <= step < 75 else math.exp(-step * lr / 2) + restart / 10
    metrics = {"loss": loss, "acc/val_1": step / 100}
    return json.dumps({"t": time, "step": step, "metrics": metrics}) + "\n"


def plot(commands: Preloaded, site: Path, *arguments: str, **options: str) -> Called:
    inherited = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    env = {**inherited, "HOME": str(site), "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24",
           "SLURMTRAIN_RUNS": str(site / "runs"), "MPLCONFIGDIR": str(site)}  # fmt: skip
    return commands.call("plot", *arguments, cwd=site, env=env, **options)  # type: ignore[arg-type]


def test_a_single_run_is_drawn_as_plain_text_with_its_attempts_marked(commands: Preloaded, site: Path) -> None:
    called = plot(commands, site, RUN_ID, "loss")
    assert (called.code, called.stderr) == (0, "")
    assert called.stdout == (GOLDEN / "one.txt").read_text(encoding="utf-8")


def test_several_runs_are_drawn_over_each_other_and_told_apart_by_what_differs(commands: Preloaded, site: Path) -> None:
    called = plot(commands, site, "cnn", RUN_ID, "loss", "--log")
    assert called.stdout == (GOLDEN / "two.txt").read_text(encoding="utf-8")
    assert called.stdout.rstrip().split("\n")[-2:] == ["* lr=0.3", "o lr=0.1"]


def test_on_a_terminal_it_is_in_colour_and_fits_the_screen(commands: Preloaded, site: Path) -> None:
    called = plot(commands, site, "cnn", RUN_ID, "loss", stdout="terminal")
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed(called.stdout)
    rows = [row.rstrip() for row in screen.display]
    assert rows[0].strip() == "loss"
    assert rows[-3:] == ["█ lr=0.3", "█ lr=0.1", ""]
    assert screen.buffer[21][0].fg != screen.buffer[22][0].fg
    assert any("\u2800" <= screen.buffer[y][x].data <= "\u28ff" for y in range(24) for x in range(80))


def test_where_only_ascii_can_be_printed_it_is_drawn_with_it(commands: Preloaded, site: Path) -> None:
    text = plot(commands, site, RUN_ID, "loss", encoding="ascii").stdout
    assert text.isascii()
    assert "\\" not in text
    assert ": attempt 2 began at step 40" in text


def test_without_a_metric_it_lists_them(commands: Preloaded, site: Path) -> None:
    assert plot(commands, site, RUN_ID).stdout == "METRIC     LAST\nloss       0.1067\nacc/val_1  1\n"
    runs = json.loads(plot(commands, site, RUN_ID, "--json").stdout)["runs"]
    assert runs[0]["metrics"] == {"loss": pytest.approx(0.1 + math.exp(-5)), "acc/val_1": 1.0}
    # Of two runs too, where the second word may have been meant for a metric.
    assert plot(commands, site, RUN_ID, OTHER_ID).stdout.count("acc/val_1") == 2


def test_points_as_json_have_each_step_once_and_those_superseded_apart(commands: Preloaded, site: Path) -> None:
    called = plot(commands, site, RUN_ID, "loss", "--json", "--all")
    [run] = json.loads(called.stdout)["runs"]
    loss = run["metrics"]["loss"]
    assert loss["step"] == list(range(1, 101))
    assert loss["attempt"] == [1] * 40 + [2] * 60
    assert loss["value"][69:74] == [None] * 5
    assert loss["superseded"]["step"] == list(range(41, 61))
    assert [each["first_step"] for each in run["attempts"]] == [0, 40]


def test_points_as_csv(commands: Preloaded, site: Path) -> None:
    rows = list(csv.DictReader(plot(commands, site, RUN_ID, "loss", "--csv", "--all").stdout.splitlines()))
    assert len(rows) == 120
    assert rows[70]["value"] == "nan"
    assert {row["superseded"] for row in rows[100:]} == {"1"}


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ((RUN_ID, "los"), 2, "there is no metric 'los'; did you mean 'loss'?; there are loss, acc/val_1"),
        (("later", "loss"), 1, f"run {WAITING_ID} has logged no metric yet: it is pending"),
        (("silent", "loss"), 1, f"run {SILENT_ID} has logged no metric: docs/scripts.md says how to log some"),
        (("unread", "loss"), 1, f"run {UNREAD_ID} has logged no metric: nothing was found for the file metrics.csv"),
        (("nothing", "loss"), 2, "there is no run 'nothing'"),
        ((RUN_ID, "loss", "--png", "curve.jpg"), 2, "curve.jpg does not end in .png"),
        (
            (RUN_ID, "loss", "--png", "no/such/curve.png"),
            2,
            "cannot write no/such/curve.png: no such file or directory",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(
    commands: Preloaded, site: Path, arguments: tuple[str, ...], code: int, expected: str
) -> None:
    called = plot(commands, site, *arguments)
    assert called.code == code
    assert called.stdout == ""
    assert called.stderr.startswith(f"error: {expected}")
    assert called.stderr.count("\n") == 1


def test_a_png_is_a_picture_of_a_certain_size(commands: Preloaded, site: Path) -> None:
    assert plot(commands, site, RUN_ID, "loss", "--png", "curve.png").stdout == "curve.png\n"
    content = (site / "curve.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1200, 675)


def test_an_svg_has_a_line_for_each_run_with_gaps_and_names_them(commands: Preloaded, site: Path) -> None:
    plot(commands, site, "cnn", RUN_ID, "-m", "loss", "-m", "acc/val_1", "--svg", "curves.svg", "--x", "time")
    root = ElementTree.fromstring((site / "curves.svg").read_text())
    paths = [element.get("style", "") for element in root.iter("{http://www.w3.org/2000/svg}path")]
    blue = [style for style in paths if re.search(r"stroke: #1f77b4; stroke-width: 1.5", style)]
    # In each of the two charts a legend and a line, of which the loss has two parts around its gap.
    assert len(blue) == 5
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"lr=0.3", "lr=0.1", "loss", "acc/val_1", "minutes"} <= set(texts)


# --- means over runs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with two learning rates, of one of which there are two that differ in the seed only, one of them shorter."""
    path = tmp_path_factory.mktemp("repeated")
    make_run(path, RUN_ID, {"lr": 0.1, "seed": 1}, [range(1, 61), range(41, 101)])
    make_run(path, OTHER_ID, {"lr": 0.1, "seed": 2}, [range(1, 51)])
    make_run(path, WAITING_ID, {"lr": 0.3, "seed": 1}, [range(1, 101)])
    return path


def test_means_over_runs_that_repeat_each_other_are_lines_between_the_least_and_the_largest_values(
    commands: Preloaded, repeated: Path
) -> None:
    called = plot(commands, repeated, "cnn", RUN_ID, OTHER_ID, "loss", "--over", "seed")
    assert (called.code, called.stderr) == (0, "")
    assert {line[2:] for line in called.stdout.rstrip().split("\n")[-2:]} == {
        "lr=0.1 (mean of 2)",
        "lr=0.3 (mean of 1)",
    }
    assert "mean loss" in called.stdout
    assert "·" in called.stdout
    plot(commands, repeated, "cnn", RUN_ID, OTHER_ID, "loss", "--over", "seed", "--svg", "means.svg")
    texts = [element.text for element in ElementTree.fromstring((repeated / "means.svg").read_text()).iter()]
    assert {"mean loss", "lr=0.1 (mean of 2)"} <= set(texts)


def test_means_as_json_and_csv_have_the_spread_at_each_step(commands: Preloaded, repeated: Path) -> None:
    words = (RUN_ID, OTHER_ID, "loss", "--over", "seed")
    [group] = json.loads(plot(commands, repeated, *words, "--json").stdout)["groups"]
    assert (sorted(group["runs"]), group["label"]) == ([RUN_ID, OTHER_ID], "cnn (mean of 2)")
    loss = group["metrics"]["loss"]
    assert (loss["step"], loss["count"]) == (list(range(1, 101)), [2] * 50 + [1] * 50)
    first, last = math.exp(-41 * 0.1 / 2), math.exp(-41 * 0.1 / 2) + 0.1  # the second attempt has added 0.1
    assert [loss[name][40] for name in ("min", "max", "mean")] == pytest.approx([first, last, (first + last) / 2])
    assert loss["mean"][71] is None
    rows = list(csv.DictReader(plot(commands, repeated, *words, "--csv").stdout.splitlines()))
    assert (len(rows), rows[40]["step"], rows[40]["count"], float(rows[40]["max"])) == (100, "41", "2", loss["max"][40])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--over", "seeed"), "none of these runs has a field 'params.seeed'"),
        (("--over", "seed", "--all"), "--all shows what single runs trained again"),
    ],
)
def test_means_that_cannot_be_drawn_are_mistakes(
    words: tuple[str, ...], message: str, commands: Preloaded, repeated: Path
) -> None:
    called = plot(commands, repeated, RUN_ID, OTHER_ID, "loss", *words)
    assert (called.code, called.stdout, called.stderr.count("\n")) == (2, "", 1)
    assert message in called.stderr
