"""What commands print of hostile journals, logs and names: nothing that a terminal would execute."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from helpers.preloaded import Preloaded
from helpers.rare import drawn
from helpers.simulated_run import RUN_ID, SimulatedRun

from slurmtrain.model.run.layout import RunsRoot

# Sets the title, clears the screen, moves up, in seven and eight bits; rings; reorders; pretends to be another line.
EVIL = "\x1b]0;pwned\x07\x1b[2J\x1b[9A\x9b2J\x85\u202egnp\u2028\nPRETENDED: \rPRETENDED [/bold] \x1bc"
# Sequences of rich itself: colours, and of progress bars, the cursor's visibility, erasing a line, one line up.
OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A|\r\n|\n|(?<=\x1b\[\?25[lh])\r|\r(?=\x1b\[|$)")
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose runs root has a run that says nothing but evil."""
    path = tmp_path_factory.mktemp("evil")
    run = SimulatedRun(RunsRoot(path / "runs").run(RUN_ID), spec={"requeue": {"enabled": False}}, executor="local")
    run.created(name=EVIL, by=EVIL, git={"commit": EVIL, "dirty": True}, overrides=[EVIL])
    run.submitted(overrides=[EVIL], host=EVIL, partition=EVIL, without=[EVIL])
    run.started(host=EVIL)
    run.node("preflight", checks=[{"check": EVIL, "status": "fail", "summary": EVIL}], failed=[EVIL])
    run.node("rendezvous", master_addr=EVIL, master_port=1, interface=EVIL)
    run.rank("saved", step=3, path=f"checkpoints/{EVIL}", bytes=1, seconds=0.1, saved_at=5.0, why=EVIL)
    attempt = run.directory.attempt(run.job, 0) if run.directory else None
    attempt.logs.mkdir(parents=True, exist_ok=True)
    attempt.rank_log(0).write_bytes(f"\x1b[32mgreen\x1b[0m {EVIL}\nCUDA out of memory {EVIL}\n".encode() + b"\xff\n")
    attempt.metrics.write_text(json.dumps({"t": 5.0, "step": 3, "metrics": {EVIL: 1.0}}) + "\n")
    run.node("end", cause="crash", reason=EVIL, failed_at=9.0,
             failures=[{"rank": 0, "host": EVIL, "exit_code": 1, "last_lines": [EVIL]}])  # fmt: skip
    run.command("no such kind " + EVIL)
    return path


def environment(site: Path, **more: str) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    return {**inherited, "HOME": str(site), "TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50",
            "SLURMTRAIN_RUNS": str(site / "runs"), **more}  # fmt: skip


CALLS = [
    ("status",),
    ("show", RUN_ID),
    ("plot", RUN_ID),
    ("plot", RUN_ID, EVIL),
    ("doctor", RUN_ID),
    ("why", RUN_ID),
    ("wait", RUN_ID),
    ("checkpoints", RUN_ID),
    ("verify", RUN_ID),
    ("prune", RUN_ID),
    ("tag", RUN_ID, EVIL),
    ("note", RUN_ID, EVIL),
    ("delete", EVIL, "-y"),
    ("cancel", RUN_ID),
    ("nodes", "--all"),
    ("sync",),
    ("show", EVIL),
    ("submit", EVIL),
    ("doctor", EVIL),
    (EVIL,),
    ("status", f"--{EVIL}"),
    ("nodes", "forgive", EVIL),
    ("render", "spec.yaml", EVIL),
    ("export", RUN_ID, "--to", EVIL),
    ("--debug", "show", EVIL),
    ("status", "--columns", "id,name,reason,tags,note"),
    ("status", "--where", f"name = '{EVIL}'"),
    ("status", "--where", EVIL),
    ("status", "--sort", EVIL),
    ("best", EVIL),
    ("best", EVIL, RUN_ID),
    ("compare", RUN_ID, EVIL),
    ("compare", RUN_ID, RUN_ID),
    ("archive", EVIL),
]


@pytest.mark.parametrize(
    ("where", "call"),
    [*(("terminal", call) for call in CALLS), *(("pipe", call) for call in drawn(CALLS, 8))],
    ids=lambda value: value if isinstance(value, str) else ascii(" ".join(value))[:40],
)
def test_nothing_that_a_terminal_executes_is_printed(
    commands: Preloaded, site: Path, where: str, call: tuple[str, ...]
) -> None:
    called = commands.call(*call, cwd=site, env=environment(site), stdout=where)
    output = called.stdout + called.stderr
    assert output
    assert UNSAFE.findall(OWN.sub("", output) if where == "terminal" else output) == []
    assert not any(line.strip().startswith("PRETENDED") for line in re.split(r"[\r\n]+", output))


def test_a_long_message_is_wrapped_between_words_on_a_terminal_only(commands: Preloaded, site: Path) -> None:
    call = ("show", "a run that nobody has ever submitted and whose name is long enough to need several lines")
    drawn = commands.call(*call, cwd=site, env=environment(site, COLUMNS="40"), stdout="terminal").stdout
    piped = commands.call(*call, cwd=site, env=environment(site, COLUMNS="40")).stderr
    error = next(line for line in piped.splitlines() if line.startswith("error: "))
    lines = drawn[drawn.index("error: ") :].splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 40
    assert " ".join(line.strip() for line in lines) == error


def test_completion_offers_no_name_that_would_control_the_terminal(commands: Preloaded, site: Path) -> None:
    words = {"_SLURMTRAIN_COMPLETE": "bash_complete", "COMP_WORDS": "slurmtrain show ", "COMP_CWORD": "2"}
    called = commands.call(cwd=site, env=environment(site, **words))
    assert called.stdout.splitlines() == ["plain,@last", f"plain,{RUN_ID}"]


def test_completion_offers_no_name_that_a_shell_would_run_or_take_for_an_option(
    commands: Preloaded, tmp_path: Path
) -> None:
    names = ("lr-0.1_b=2", "x;touch${IFS}pwned", "$(pwned)", "`pwned`", "a b", "a\tb", "--all", "q'", "*", "~", "x&",
             "x\nplain\n;y\nz")  # fmt: skip
    for number, name in enumerate(names):
        run = SimulatedRun(RunsRoot(tmp_path / "runs").run(f"{number:010}"), spec={})
        run.created(name=name)
    assert commands.call("status", cwd=tmp_path, env=environment(tmp_path)).code == 0
    words = {"_SLURMTRAIN_COMPLETE": "bash_complete", "COMP_WORDS": "slurmtrain show ", "COMP_CWORD": "2"}
    offered = commands.call(cwd=tmp_path, env=environment(tmp_path, **words)).stdout.splitlines()
    assert [word for word in offered if not word.startswith("plain,0")] == ["plain,@last", "plain,lr-0.1_b=2"]
    # zsh gets three lines for each: a kind, a word, and what is said of it, here the name of the run.
    lines = commands.call(
        cwd=tmp_path, env=environment(tmp_path, **{**words, "_SLURMTRAIN_COMPLETE": "zsh_complete"})
    ).stdout.splitlines()
    assert set(lines[::3]) == {"plain"}


def test_a_live_table_is_as_safe(commands: Preloaded, site: Path) -> None:
    called = commands.call(
        "status", "--watch", cwd=site, env=environment(site), stdout="terminal", interrupt_after=RUN_ID
    )
    assert called.code == 130
    assert UNSAFE.findall(OWN.sub("", called.stdout)) == []


def test_logs_keep_colours_on_a_terminal_and_every_byte_elsewhere(commands: Preloaded, site: Path) -> None:
    drawn = commands.call("logs", RUN_ID, cwd=site, env=environment(site), stdout="terminal").stdout
    assert "\x1b[32mgreen\x1b[0m" in drawn
    assert UNSAFE.findall(OWN.sub("", drawn)) == []
    piped = commands.call("logs", RUN_ID, "--rank", "0", cwd=site, env=environment(site)).stdout
    log = next(site.glob("runs/*/attempts/*/logs/rank-0.log"))
    assert piped.encode(errors="surrogateescape") == log.read_bytes()
