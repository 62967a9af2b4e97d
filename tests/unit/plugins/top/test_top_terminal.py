"""The page on a real pseudo-terminal: what is on the screen, what reaches the terminal, and what is left of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.rare import drawn
from helpers.sample_home import SampleHome, copy_home, make_home
from helpers.simulated_run import RUN_ID, SimulatedRun
from helpers.terminal import on_terminal

from slurmtrain.model.run.layout import RunsRoot

# Sets the title, clears the screen, moves up, in seven and eight bits; rings; reorders; resets the terminal.
EVIL = "\x1b]0;pwned\x07\x1b[2J\x1b[9A\x9b2J\x85\u202egnp\u2028\n[/bold] [red]実験 \x1bc"
EXECUTED = ("\x1b]", "\x07", "\x1b[9A", "\x9b", "\x85", "\u202e", "\u2028", "\x1bc")
COLOUR = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")
# What puts a terminal back: no mouse, no pasting in brackets, the first screen, a cursor.
RESTORED = (b"\x1b[?1000l", b"\x1b[?2004l", b"\x1b[?1049l", b"\x1b[?25h")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleHome:
    return make_home(tmp_path_factory.mktemp("top") / "home")


@pytest.fixture
def home(sample: SampleHome, tmp_path: Path) -> SampleHome:
    return copy_home(sample, tmp_path / "home")


def test_a_person_reads_runs_logs_and_help_at_80_columns(home: SampleHome) -> None:
    with on_terminal("top", "--interval", "0.5", cwd=home.project, env=home.environ()) as terminal:
        terminal.wait_for("Slurm ")
        # A screen reaches a terminal in pieces, the parts of one in any order: each is waited for.
        terminal.wait_for(lambda _: terminal.lines[0].startswith("1 created  1 pending  1 running"))
        assert "jobs of higher" in terminal.line_with("pending     pending")
        terminal.wait_for(lambda _: terminal.lines[-1].startswith("? help  q quit  l logs"))
        terminal.press("/", *"crash", "enter")
        terminal.wait_for("1 shown: crash")
        terminal.wait_for("ValueError: bad batch")
        terminal.press("l")
        terminal.wait_for("logs of crashed")
        terminal.wait_for('File "train.py"')
        terminal.press("t")
        terminal.wait_for("[1/rank 1]")
        terminal.press("q", "s")
        terminal.wait_for("attempt 1  failed (crash)")
        terminal.press("q", "?")
        terminal.wait_for("save now, as 'slurmtrain checkpoint'")
        terminal.press("q", "r")
        terminal.wait_for("Resume crashed")
        terminal.press("n")
        terminal.wait_for(lambda text: "Resume crashed" not in text)
        terminal.resize(60, 20)
        terminal.wait_for(lambda text: "no room for PROGRESS" in text and "q quit" in terminal.lines[19])
        terminal.press(*"/created")
        terminal.wait_for("1 shown: created")
        terminal.press("enter")
        terminal.wait_for(lambda _: not terminal.lines[-2])
        terminal.press("c")
        terminal.wait_for("Cancel created")
        terminal.press("y")
        terminal.wait_for(lambda text: re.search("created +cancelled", text) is not None)
        terminal.press("ctrl+c")
        assert terminal.wait_for_end() == 0
    assert home.started() == []


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A directory whose runs root has a run that says nothing but evil."""
    run = SimulatedRun(RunsRoot(tmp_path / "runs").run(RUN_ID), spec={"requeue": {"enabled": False}}, executor="local")
    run.created(name=EVIL).submitted(host=EVIL).started(host=EVIL)
    attempt = run.directory.attempt(run.job, 0)
    attempt.logs.mkdir(parents=True)
    attempt.rank_log(0).write_bytes(f"\x1b[32mgreen\x1b[0m {EVIL}\n".encode() + b"\xff\nlast line\n")
    run.node("end", cause="crash", reason=EVIL, failed_at=9.0, failures=[{"rank": 0, "last_lines": [EVIL]}])
    return tmp_path


def test_nothing_of_names_reasons_and_logs_is_executed_by_the_terminal(evil: Path) -> None:
    with on_terminal("--runs", "runs", "top", cwd=evil) as terminal:
        terminal.wait_for("last line")
        terminal.resize(160, 40)
        terminal.wait_for(lambda _: len(terminal.lines[39]) > 80)
        terminal.press("l")
        terminal.wait_for("logs of")
        terminal.press("q", "s")
        terminal.wait_for("attempt 1")
        terminal.press("q", "c")
        terminal.wait_for("Cancel")
        terminal.press("y")
        terminal.wait_for("is failed")
        terminal.press("q")
        assert terminal.wait_for_end() == 0
    # textual itself sets the shape of the mouse's pointer.
    drawn = re.sub(r"\x1b\]22;[a-z]+\x07", "", terminal.raw.decode())
    assert [text for text in EXECUTED if text in drawn] == []
    assert "実験" in drawn
    assert COLOUR.search(terminal.raw), "there would be none with NO_COLOR"


@pytest.mark.parametrize("number", drawn((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), 1))
def test_a_signal_ends_the_page_and_restores_the_terminal(home: SampleHome, number: signal.Signals) -> None:
    with on_terminal("top", cwd=home.project, env=home.environ()) as terminal:
        terminal.wait_for("Slurm ")
        terminal.process.send_signal(number)
        assert terminal.wait_for_end() == 128 + number
        assert [sequence for sequence in RESTORED if sequence not in terminal.raw[-600:]] == []


def test_settings_of_the_terminal_are_those_from_before_and_no_color_is_respected(
    home: SampleHome, tmp_path: Path
) -> None:
    # A shell keeps the terminal open while the page runs, and says what it is like before and afterwards.
    script = f"stty -a > {tmp_path}/before; {sys.executable} -m slurmtrain top; stty -a > {tmp_path}/after"
    environ = {**home.environ(), "NO_COLOR": "1"}
    with on_terminal("-c", script, cwd=home.project, env=environ, command=("sh",)) as terminal:
        terminal.wait_for("Slurm ")
        terminal.press("q")
        terminal.wait_for_end()
    assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()
    assert COLOUR.findall(terminal.raw) == []


def test_the_page_ends_when_its_window_is_closed(home: SampleHome) -> None:
    with on_terminal("top", cwd=home.project, env=home.environ()) as terminal:
        terminal.wait_for("Slurm ")
        terminal.close()
        assert terminal.process.wait(30) != 0


def without_terminal(home: SampleHome, **streams: int) -> tuple[int, str]:
    command = [sys.executable, "-m", "slurmtrain", "top"]
    environment = {**os.environ, **home.environ()}
    ended = subprocess.run(
        command, cwd=home.project, env=environment, stderr=subprocess.PIPE, text=True, check=False, **streams
    )  # fmt: skip
    return ended.returncode, ended.stderr


def test_without_a_terminal_it_says_what_works_there(home: SampleHome) -> None:
    code, errors = without_terminal(home, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    assert code == 2
    assert "needs a terminal" in errors
    assert "'slurmtrain status --watch'" in errors
    assert "--json" in errors


def test_what_breaks_while_it_runs_is_shown_and_the_page_goes_on(home: SampleHome) -> None:
    def has_problem(text: str) -> bool:
        """Whether it is shown, wrapped anywhere: paths of tests are as long as they are."""
        return text.replace(" ", "") in "".join(terminal.lines[1:7]).replace(" ", "")

    with on_terminal("top", "--interval", "0.5", cwd=home.project, env=home.environ()) as terminal:
        terminal.wait_for("Slurm ")
        terminal.wait_for(lambda _: terminal.lines[2].startswith("ID"))
        [registry] = home.project.rglob("registry.db")
        # Not emptied before: what sees an empty file begins to make a registry in it, and empties it again on failure.
        with registry.open("r+b") as file:
            file.write(b"broken" * 1000)
        terminal.wait_for(lambda _: has_problem(f"the registry {registry} was damaged"))
        terminal.wait_for("pending     pending")
        # Its content is not kept for certain: a connection of another thread that still has the file open may take the
        # new file's journal, which SQLite finds by its name, for one of the old file, and undo what it says there.
        assert registry.with_name("registry.db.damaged").exists()
        home.runs.rename(home.runs.with_name("moved"))
        home.runs.write_text("a file")
        terminal.wait_for(lambda _: has_problem("cannot read the runs root"))
        terminal.press("j", "?")
        terminal.wait_for("this help")
        terminal.press("q", "q")
        assert terminal.wait_for_end() == 0


def test_leaving_waits_for_an_action_and_ctrl_c_leaves_it_to_sync(home: SampleHome) -> None:
    scancel = home.slurm / "scancel"
    scancel.write_text(f"#!/bin/sh\nwhile [ ! -e {home.slurm}/answers ]; do sleep 0.05; done\n")
    with on_terminal("top", "--interval", "0.5", cwd=home.project, env=home.environ()) as terminal:
        terminal.wait_for("pending     pending")
        terminal.press("j", "j", "c")
        terminal.wait_for("Cancel pending")
        terminal.press("y")
        terminal.wait_for("cancelling run")
        terminal.press("q")
        terminal.wait_for("still cancelling run")
        terminal.press("ctrl+c")
        assert terminal.wait_for_end() == 130
    (home.slurm / "answers").touch()
