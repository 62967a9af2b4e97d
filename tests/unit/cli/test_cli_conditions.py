"""Every command in odd circumstances: it works, or says in one line why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.preloaded import Called, Preloaded
from helpers.rare import THOROUGH, drawn
from helpers.simulated_run import RUN_ID, SimulatedRun

from slurmtrain.cli import cli
from slurmtrain.model.run.layout import RunsRoot

LONG = "x" * 5000
HUGE = "9" * 400
# Its files are deleted: those of the other run are not.
DELETED = "0123456780"
UNUSUAL = "ünï-速"
# A call of each command. What would start a job fails before: this machine has no 64 GPUs.
CALLS = {
    "submit": ("submit", "gpus.yaml", "--executor", "local"),
    "render": ("render", "gpus.yaml"),
    "status": ("status", "--all"),
    # On a terminal it would stay there without the mistake.
    "top": ("top", "--interval", "0"),
    "show": ("show", RUN_ID),
    "best": ("best", RUN_ID, "--by", "loss"),
    "compare": ("compare", RUN_ID, RUN_ID),
    "diff": ("diff", RUN_ID, DELETED),
    "logs": ("logs", RUN_ID),
    "wait": ("wait", RUN_ID),
    "resume": ("resume", RUN_ID),
    "rerun": ("rerun", RUN_ID),
    "cancel": ("cancel", RUN_ID),
    "sync": ("sync",),
    "watch": ("watch", "--once"),
    "ui": ("ui", RUN_ID),
    "plot": ("plot", RUN_ID),
    "checkpoints": ("checkpoints", RUN_ID),
    "checkpoint": ("checkpoint", RUN_ID),
    "verify": ("verify", RUN_ID),
    "prune": ("prune", RUN_ID),
    "clean": ("clean", "--dry-run", "--json"),
    "tag": ("tag", RUN_ID, "good"),
    "note": ("note", RUN_ID, "fine"),
    "archive": ("archive", RUN_ID),
    "delete": ("delete", DELETED, "-y"),
    "export": ("export", RUN_ID, "--to", "x.pt"),
    "preflight": ("preflight", "--spec", "gpus.yaml", "--executor", "local"),
    "doctor": ("doctor", RUN_ID),
    "why": ("why", RUN_ID),
    "doctor spec": ("doctor", "gpus.yaml", "--executor", "local"),
    "drill": ("drill", "gpus.yaml", "--executor", "local"),
    "scale": ("scale", "gpus.yaml", "--nodes", "1,2", "--executor", "local"),
    "metrics": ("metrics",),
    # A port that browsers refuse: it ends at once.
    "serve": ("serve", "--port", "6665"),
    "report": ("report", RUN_ID, "-o", "-"),
    "cost": ("cost", RUN_ID),
    "notify": ("notify",),
    "nodes": ("nodes",),
    "nodes forgive": ("nodes", "forgive", "n1"),
    "registry": ("registry", "rebuild"),
    "completion": ("completion", "bash"),
    "schema": ("schema",),
    "help": ("--help",),
}
QUESTIONS = ("--where", "--state", "--since", "--sweep", "--node", "--sort", "--columns", "--limit")
# What a command takes besides its name, with each of its arguments odd in turn.
ODD_ARGUMENTS = [
    *[(name, text) for name in cli.places if name != "completion" for text in (LONG, "\udcff", "")],
    *[("--runs", text, "status") for text in (LONG, "\udcff", "~nobody-of-this-name/x", "~/\udcff")],
    *[("submit", "gpus.yaml", text) for text in (f"name={LONG}", f"params.{LONG}=1", f"workdir={LONG}", LONG)],
    *[("submit", f"{text}.yaml") for text in (LONG, "a/" * 3000, "gpus.yaml/x")],
    *[("doctor", f"{text}.yaml") for text in (LONG, "gpus.yaml/x")],
    *[("status", option, text) for option in QUESTIONS for text in (LONG, "", "'", "[" * 99, f"id={HUGE}", HUGE)],
    ("export", RUN_ID, "--to", f"{LONG}.pt"),
    *[("plot", RUN_ID, text) for text in (LONG, "", "'")],
    ("plot", RUN_ID, "loss", "--png", f"{LONG}.png"),
    ("export", RUN_ID, "--to", "x.pt", "--object", LONG),
    ("nodes", "forgive", f"n[1-{HUGE}]"),
    ("nodes", "forgive", "n[1-999999999]"),
    ("completion", LONG),
    (LONG,),
    (f"--{LONG}",),
]
NUMBERS = [
    *[("status", "--interval", number) for number in ("nan", "-1", "0", "x", LONG)],
    *[("watch", "--once", "--every", number) for number in ("nan", "inf", "1e308", "-1", "9")],
    *[("checkpoint", RUN_ID, "--timeout", number) for number in ("nan", "inf", "1e308", "-1", "x", HUGE)],
    *[("logs", RUN_ID, "--rank", number) for number in ("-1", HUGE, "1e3")],
    *[("logs", RUN_ID, "--attempt", number) for number in ("0", HUGE)],
    *[("why", RUN_ID, "--attempt", number) for number in ("-1", HUGE)],
    *[("verify", RUN_ID, "--step", number) for number in ("-1", HUGE)],
    *[("export", RUN_ID, "--to", "x.pt", "--step", number) for number in ("-1", HUGE)],
    *[("preflight", "--spec", "gpus.yaml", "--executor", "local", "--nodes", number) for number in ("0", "-1", HUGE)],
    *[
        ("submit", "gpus.yaml", "--executor", "local", f"{key}={number}")
        for key in ("resources.nodes", "resources.procs_per_node", "resources.time", "resources.cpus_per_proc",
                    "checkpoint.every.steps", "checkpoint.every.minutes", "requeue.max_failures")
        for number in ("-1", HUGE, "1e308", ".inf", ".nan")
    ],
]  # fmt: skip
CONDITIONS: dict[str, dict[str, Any]] = {
    "the home directory is a tilde": {"env": {"HOME": "~"}},
    "the home directory is relative": {"env": {"HOME": "home", "XDG_CONFIG_HOME": "config"}},
    "there is no home directory": {"env": {"HOME": None}},
    "no path leads to other programs": {"env": {"PATH": None}},
    "the current directory is deleted": {"deleted_cwd": True},
    "the terminal is unknown": {"env": {"TERM": None}, "stdout": "terminal"},
    "the terminal has no columns": {"env": {"COLUMNS": "0", "LINES": "0"}, "stdout": "terminal"},
    "the terminal has one column": {"env": {"COLUMNS": "1", "LINES": "1"}, "stdout": "terminal"},
    "standard output is ASCII": {"encoding": "ascii"},
    "standard error is closed": {"stderr": "closed"},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs root with a failed run to delete, and another one, whose name and reason are not ASCII."""
    path = tmp_path_factory.mktemp("conditions")
    run = SimulatedRun(RunsRoot(path / "runs").run(RUN_ID), spec={"requeue": {"enabled": False}}, executor="local")
    other = SimulatedRun(RunsRoot(path / "runs").run(DELETED), spec={"requeue": {"enabled": False}}, executor="local")
    other.created(name="deleted").submitted().started().crashed()
    run.created(name=UNUSUAL).submitted().started()
    log = run.directory.attempt(run.job, 0).rank_log(0)
    log.parent.mkdir(parents=True)
    log.write_text(f"{UNUSUAL}\n")
    run.node("end", cause="crash", reason=f"rank 0 exited with 1: {UNUSUAL}", failed_at=9.0)
    (path / "gpus.yaml").write_text("command: 'true'\nresources: {gpus_per_node: 64}\n")
    (path / "runs").chmod(0o700)
    return path


@pytest.fixture(scope="module")
def usual(commands: Preloaded, site: Path) -> dict[tuple[str, ...], Called]:
    """How the calls end in usual circumstances."""
    return {arguments: call(commands, site, arguments) for arguments in CALLS.values()}


def call(commands: Preloaded, site: Path, arguments: tuple[str, ...], **condition: Any) -> Called:
    """Call a command in these circumstances, and check what holds in any."""
    inherited = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    env = {**inherited, "HOME": str(site), "TERM": "xterm", "SLURMTRAIN_RUNS": str(site / "runs")}
    env.update(condition.pop("env", {}))
    set_env = {name: value for name, value in env.items() if value is not None}
    called = commands.call(*arguments, cwd=site, env=set_env, **condition)
    output = called.stdout + called.stderr
    assert "Traceback" not in output, output
    assert called.code in (0, 1, 2), output
    assert called.seconds < 10
    return called


def test_the_calls_cover_all_commands() -> None:
    assert {arguments[0] for arguments in CALLS.values()} == {*cli.places, "--help"}


def calls_in(condition: dict[str, Any]) -> list[tuple[str, ...]]:
    """What is called in a condition: everything if rare tests run, and otherwise a quarter, another one for each."""
    calls = [*CALLS.values()]
    return calls if THOROUGH else calls[[*CONDITIONS.values()].index(condition) % 4 :: 4]


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
def test_circumstances_do_not_change_the_outcome(
    commands: Preloaded, site: Path, usual: dict[tuple[str, ...], Called], condition: dict[str, Any]
) -> None:
    for arguments in calls_in(condition):
        odd = call(commands, site, arguments, **condition)
        if not condition.get("deleted_cwd"):
            assert odd.code == usual[arguments].code, (arguments, odd.stdout, odd.stderr)
        elif arguments[0] not in ("completion", "schema", "top", "--help"):
            assert odd.code == 2
            assert "error: the current directory is gone" in odd.stderr


@pytest.mark.parametrize("stdout", ["/dev/full", "closed"])
def test_output_that_cannot_be_written_is_an_error_of_one_line(
    commands: Preloaded, site: Path, usual: dict[tuple[str, ...], Called], stdout: str
) -> None:
    # Of the two, each other command by default.
    for arguments in [*CALLS.values()] if THOROUGH else [*CALLS.values()][stdout == "closed" :: 2]:
        odd = call(commands, site, arguments, stdout=stdout)
        if not usual[arguments].stdout:
            assert odd.code == usual[arguments].code
            continue
        assert odd.code == 1, arguments
        [error] = [line for line in odd.stderr.splitlines() if line.startswith("error: ")]
        # click itself prints help and completion.
        assert "cannot write to standard output: " in error or arguments == ("--help",)


def test_an_id_that_cannot_be_printed_is_in_the_error(commands: Preloaded, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("command: 'true'\ntracking: {mlflow: {enabled: false}}\n")
    called = call(
        commands, tmp_path, ("submit", "spec.yaml", "--executor", "local"), stdout="/dev/full",
        env={"SLURMTRAIN_RUNS": str(tmp_path / "runs")},
    )  # fmt: skip
    [run] = [path.name for path in (tmp_path / "runs").iterdir() if (path / "plan.json").exists()]
    assert called.code == 1
    assert f"error: {run}: submitted, but cannot write to standard output" in called.stderr
    call(commands, tmp_path, ("wait", run), env={"SLURMTRAIN_RUNS": str(tmp_path / "runs")})


def test_odd_arguments_are_errors_of_one_line(commands: Preloaded, site: Path) -> None:
    for arguments in drawn([*ODD_ARGUMENTS, *NUMBERS], 80):
        assert len(call(commands, site, arguments).stderr.splitlines()) <= 12, arguments


def test_numbers_that_are_none_are_refused(commands: Preloaded, site: Path) -> None:
    for number in ("nan", "-1", "x"):
        called = call(commands, site, ("checkpoint", RUN_ID, "--timeout", number))
        assert called.code == 2
        assert "Invalid value for '--timeout'" in called.stderr


@pytest.mark.parametrize(
    ("shell", "env", "code"),
    [
        ("{command} show {run} >&-", {}, 1),
        ("{command} show {run} 2>&-", {}, 0),
        ("{command} show {run} <&- >&- 2>&-", {}, 1),
        ("{command} show {run} > /dev/full", {}, 1),
        ("{command} show {run}", {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}, 0),
        ("{command} show {run}", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, 0),
    ],
)
def test_a_shell_can_close_streams_and_choose_encodings(site: Path, shell: str, env: dict[str, str], code: int) -> None:
    completed = subprocess.run(
        ["bash", "-c", shell.format(command=f"{sys.executable} -m slurmtrain", run=RUN_ID)],
        cwd=site,
        env={**os.environ, "SLURMTRAIN_RUNS": str(site / "runs"), **env},
        capture_output=True,
    )
    assert completed.returncode == code
    assert len(completed.stderr.splitlines()) <= 1
