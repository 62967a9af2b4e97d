"""What is offered when Tab is pressed, in bash and elsewhere."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from helpers.simulated_run import SimulatedRun
from helpers.site import until
from helpers.workspaces import make_workspace

from slurmtrain.cli import cli
from slurmtrain.ops.shared.observe import observe

OLD, NEW, SWEEP = "0aaaaaaaaa", "0aaaaaaaab", "0sweepswee"
# Notes how it is called, except to complete a word.
RECORDING = """#!/bin/sh
[ -n "$_SLURMTRAIN_COMPLETE" ] || [ "$1" = completion ] || exec echo "$*" >> "{site}/typed"
exec "{python}" -m slurmtrain "$@"
"""
Offers = Callable[..., list[str]]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a spec and two runs of a sweep."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    workspace = make_workspace(tmp_path / "runs")
    for run_id, name in ((OLD, "digits"), (NEW, "words")):
        run = SimulatedRun(workspace.root.run(run_id), spec={"name": name}, executor="local")
        run.created(params={"lr": 0.1}, sweep=SWEEP).submitted().started().reached(3, val_loss=0.5)
        run.command("tags", add=["good"])
    observe(workspace, ask_slurm=False)
    (tmp_path / "exp.yaml").write_text("command: python x.py\nparams: {lr: 0.1, model: {depth: 3}}\n")
    (tmp_path / "notes.txt").touch()
    return tmp_path


@pytest.fixture
def offers(site: Path) -> Offers:
    """What is offered for the last of these words, in the site."""
    assert site.is_dir()

    def complete(*words: str) -> list[str]:
        shell = BashComplete(cli, {}, "slurmtrain", "_SLURMTRAIN_COMPLETE")
        return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]

    return complete


def test_runs_are_offered_by_id_newest_first_then_by_name_and_by_sweep(offers: Offers) -> None:
    assert offers("show", "") == ["@last", NEW, OLD, "words", "digits", SWEEP]
    assert offers("show", "w") == ["words"]
    assert offers("logs", "0a") == [NEW, OLD]


def test_a_run_that_no_command_has_read_yet_is_offered_by_its_id(offers: Offers, site: Path) -> None:
    (site / "runs" / "0aaaaaaaac").mkdir()
    assert offers("show", "0a") == ["0aaaaaaaac", NEW, OLD]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("tag", NEW, "g"), ["good"]),
        (("plot", NEW, "val"), ["val_loss"]),
        (("plot", NEW, "--metric", "v"), ["val_loss"]),
        (("best", SWEEP, "--by", "val"), ["val_loss"]),
        (("compare", SWEEP, "--by", "metrics.v"), ["metrics.val_loss"]),
        (("compare", SWEEP, "--metrics", "x,v"), ["x,val_loss"]),
        (("status", "--tag", ""), ["good"]),
        (("status", "--sweep", ""), [SWEEP]),
        (("status", "--state", "completed,fa"), ["completed,failed"]),
        (("status", "--sort", "metrics.v"), ["metrics.val_loss"]),
        (("status", "--sort", "id,min:v"), ["id,min:val_loss"]),
        (("best", "--by", "max:v"), ["max:val_loss"]),
        (("status", "--columns", "id,params.l"), ["id,params.lr"]),
        (("status", "--columns", "id,usage.memory.s"), ["id,usage.memory.suffices"]),
        (("status", "--where", "job"), ["job_id"]),
        (("submit", ""), ["exp.yaml", "runs/"]),
        (("submit", "exp.yaml", "res"), ["resources."]),
        (("submit", "exp.yaml", "resources.procs"), ["resources.procs_per_node="]),
        (("submit", "exp.yaml", "params."), ["params.lr=", "params.model."]),
        (("submit", "exp.yaml", "--sweep", "params.model."), ["params.model.depth="]),
        (("submit", "exp.yaml", "slurm.parti"), ["slurm.partition="]),
        (("submit", "exp.yaml", "launcher=n"), ["launcher=node", "launcher=none"]),
        (("submit", "exp.yaml", "tracking.mlflow.enabled="), [
            "tracking.mlflow.enabled=true", "tracking.mlflow.enabled=false"]),
        (("submit", "nosuch.yaml", "param"), ["params="]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_names_are_those_of_the_runs_and_of_the_spec(
    offers: Offers, words: tuple[str, ...], expected: list[str]
) -> None:
    assert offers(*words) == expected


@pytest.mark.parametrize("content", [b"", b"no database" * 1000])
def test_what_cannot_be_read_offers_nothing_and_says_nothing(
    offers: Offers, site: Path, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    (site / "runs" / "registry.db").write_bytes(content)
    (site / "exp.yaml").write_text("params: [")
    assert offers("show", "d") == []
    assert offers("submit", "exp.yaml", "params.") == []
    (site / "slurmtrain.yaml").write_text("nonsense: [")
    assert offers("show", "d") == []
    assert capfd.readouterr() == ("", "")


def test_completing_a_run_imports_nothing_that_takes_long(site: Path) -> None:
    code = "import sys\nfrom slurmtrain.cli import main\ntry:\n    main([])\nexcept SystemExit:\n    pass\n"
    code += "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    words = {"_SLURMTRAIN_COMPLETE": "bash_complete", "COMP_WORDS": "slurmtrain show ", "COMP_CWORD": "2"}
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=site, env={**os.environ, **words}, capture_output=True, text=True
    )
    assert f"plain,{NEW}" in completed.stdout.splitlines()
    assert not {"sqlalchemy", "torch", "mlflow", "yaml", "rich", "omegaconf"} & set(completed.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "load"),
    [
        (("bash", "--norc", "--noprofile", "-i"), 'eval "$(slurmtrain completion bash)"'),
        (("zsh", "-f", "-i"), 'autoload -U compinit; compinit -D; eval "$(slurmtrain completion zsh)"'),
        (("fish", "--no-config", "-i"), "slurmtrain completion fish | source"),
    ],
    ids=["bash", "zsh", "fish"],
)
def test_a_shell_completes_runs_and_keys_and_puts_no_space_behind_what_goes_on(
    site: Path, arguments: tuple[str, ...], load: str
) -> None:
    if shutil.which(arguments[0]) is None:
        pytest.skip(f"{arguments[0]} is not installed")
    program = site / "bin" / "slurmtrain"
    program.parent.mkdir()
    program.write_text(RECORDING.format(python=sys.executable, site=site))
    program.chmod(0o755)
    pid, terminal = pty.fork()
    if pid == 0:
        path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
        os.execvpe(arguments[0], arguments, {**os.environ, "PATH": path, "TERM": "xterm"})
    try:
        # What the shell draws is read and dropped, so that it never waits for a reader.
        threading.Thread(target=drain, args=(terminal,), daemon=True).start()
        os.write(terminal, f"{load}; touch {site}/ready\n".encode())
        until((site / "ready").exists, "the shell")
        os.write(terminal, b"slurmtrain show di\t\n")
        until(lambda: read_lines(site) == ["show digits"], "the name of a run")
        os.write(terminal, b"slurmtrain submit exp.yaml params.l\t0.3 launcher=nod\t\n")
        until(lambda: read_lines(site)[1:] == ["submit exp.yaml params.lr=0.3 launcher=node"], "a key and a value")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def read_lines(site: Path) -> list[str]:
    typed = site / "typed"
    return [line.strip() for line in typed.read_text().splitlines()] if typed.exists() else []


def drain(terminal: int) -> None:
    with suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass
