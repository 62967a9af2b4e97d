"""What systemd and cron are told, read back as they read it."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import PlaceError, UserError
from slurmtrain.ops.watch_install import (
    Watched,
    argument,
    cron_line,
    is_long,
    literal,
    quoted,
    schedule,
    unit_text,
    watched,
    write_unit,
)

PLAIN = st.text(st.characters(exclude_categories=("Cc", "Cs")))
ODD = "a b % \"q\" 'p' $HOME ${x} \\n ü;#"


def one(**more: Any) -> Watched:
    facts: dict[str, Any] = {
        "runs": Path("/data/project/runs"),
        "workdir": Path("/home/me/project"),
        "python": "/opt/venv/bin/python",
        "variables": {"PATH": "/usr/bin"},
        "every": 60.0,
    }
    return Watched(**{**facts, **more})


def unquoted(word: str, *, command: bool) -> str:
    """A word in double quotes as systemd reads it: escapes first, then specifiers, then, in a command, variables."""
    assert word[0] == word[-1] == '"'
    inside = word[1:-1]
    assert not re.search(r'(?<!\\)(?:\\\\)*"', inside), "the quotes end before the word does"
    text = re.sub(r"\\(.)", r"\1", inside)
    assert not re.search(r"%[^%]", text.replace("%%", "")), "a specifier is left"
    text = text.replace("%%", "%")
    return text.replace("$$", "$") if command else text


# --- systemd ----------------------------------------------------------------------------------------------------------


@given(PLAIN)
def test_systemd_reads_a_quoted_word_as_it_was(text: str) -> None:
    assert unquoted(quoted(text), command=False) == text
    assert unquoted(argument(text), command=True) == text


@pytest.mark.parametrize("filter_", [quoted, argument, literal])
@pytest.mark.parametrize("text", ["/a\nExecStart=/bin/sh", "/a\x00", "/a\x7f", "/\udcff"])
def test_what_no_unit_can_hold_is_refused(filter_: Any, text: str) -> None:
    with pytest.raises(UserError, match="rename that directory"):
        filter_(text)


@pytest.mark.parametrize("text", ["/a ", "/a\\"])
def test_a_directory_whose_name_systemd_would_cut_or_go_on_behind_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="rename that directory"):
        literal(text)


def test_a_python_that_systemd_would_not_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="quotes or backslashes"):
        unit_text(one(python="/it's/python"), tmp_path)


def test_the_unit_starts_a_watch_of_these_runs(tmp_path: Path) -> None:
    lines = unit_text(one(workdir=Path("/w 1"), every=90.0, variables={"A": "1 $2 3%"}), tmp_path).splitlines()
    assert "WorkingDirectory=/w 1" in lines
    assert 'Environment="A=1 $2 3%%"' in lines
    assert f"EnvironmentFile=-{tmp_path}" in lines
    command = '"/opt/venv/bin/python" -P -m slurmtrain --runs "/data/project/runs" watch --every 90'
    assert f"ExecStart={command}" in lines
    assert "KillMode=process" in lines, "a stop would end local runs"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("python", [sys.executable, "/no such % $x/python"])
def test_systemd_takes_the_unit(tmp_path: Path, python: str) -> None:
    place = tmp_path / "run time"
    place.mkdir(mode=0o700)
    unit = tmp_path / "watch.service"
    odd = one(runs=tmp_path / ODD, workdir=tmp_path / ODD, python=python, variables={"A": ODD})
    unit.write_text(unit_text(odd, tmp_path / ODD))
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(unit)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(place)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "initialize manager" in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr}")
    said = [line for line in done.stderr.splitlines() if "watch.service" in line]
    if python == sys.executable:
        assert (done.returncode, said) == (0, [])
    else:
        assert f"Command {python} is not executable" in done.stderr


def test_the_unit_is_written_once_for_its_owner_alone(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    unit = write_unit(one(), environ)
    assert unit.path.parent == tmp_path / "systemd" / "user"
    assert re.fullmatch(r"slurmtrain-watch-project-runs-[0-9a-f]{6}\.service", unit.path.name)
    assert stat.S_IMODE(unit.path.stat().st_mode) == 0o600
    assert unit.commands == (
        "systemctl --user daemon-reload",
        f"systemctl --user enable --now {unit.path.name}",
        "loginctl enable-linger",
    )
    before = unit.path.stat()
    again = write_unit(one(), environ)
    assert (again.changed, again.commands, again.path.stat().st_ino) == (False, unit.commands, before.st_ino)
    changed = write_unit(one(every=30.0), environ)
    assert changed.changed
    assert f"systemctl --user restart {unit.path.name}" in changed.commands
    assert [path.name for path in unit.path.parent.iterdir()] == [unit.path.name]


def test_the_users_configuration_is_at_home_unless_a_variable_says_otherwise(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": "relative"}
    assert write_unit(one(), home).path.parent == tmp_path / ".config" / "systemd" / "user"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "systemd").write_text("")
    with pytest.raises(PlaceError, match="systemd"):
        write_unit(one(), {"XDG_CONFIG_HOME": str(tmp_path)})


def test_each_runs_root_has_a_name_of_its_own_that_systemd_takes() -> None:
    names = [one(runs=Path(path)).name for path in ("/a/runs", "/b/runs", "/c/a/runs", "/", f"/{ODD}", f"/{'x' * 300}")]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}", name) for name in names)


# --- variables --------------------------------------------------------------------------------------------------------


def test_variables_that_python_and_slurm_need_are_kept_and_no_password() -> None:
    environ = {
        "PATH": "/usr/bin",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURM_JOB_ID": "7",
        "LD_LIBRARY_PATH": "",
        "PYTHONPATH": "/a\nb",
        "SLURMTRAIN_REGISTRY": "/scratch/registry.db",
        "SLURMTRAIN_RUNS": "/elsewhere",
        "SLURMTRAIN_MLFLOW_URI": "https://me:hunter2@tracking",
        "MY_TOKEN": "hunter2",
    }
    found = watched(Path("/runs"), 60.0, workdir=Path("/w"), environ=environ)
    assert found.variables == {name: environ[name] for name in ("PATH", "SLURM_CONF", "SLURMTRAIN_REGISTRY")}
    assert found.python == sys.executable
    plain = {**environ, "SLURMTRAIN_MLFLOW_URI": "https://tracking"}
    kept = watched(Path("/runs"), 60.0, workdir=Path("/w"), environ=plain).variables
    assert kept["SLURMTRAIN_MLFLOW_URI"] == "https://tracking"


# --- cron -------------------------------------------------------------------------------------------------------------


def test_the_shell_that_cron_starts_sees_every_word_as_it_is(tmp_path: Path) -> None:
    odd = tmp_path / ODD.replace("\\", "")
    odd.mkdir()
    python = odd / "python"
    python.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@" "$FIRST" "$SLURM_CONF"\n')
    python.chmod(0o755)
    variables = {"FIRST": "1 % $HOME 'x'", "SLURM_CONF": "/a\\b"}
    line = cron_line(one(runs=odd / "runs", workdir=odd, python=str(python), variables=variables))
    assert line.startswith("* * * * * cd ")
    assert not re.search(r"(?<!\\)%", line)
    command = line.removeprefix("* * * * * ").replace("\\%", "%")
    done = subprocess.run(["/bin/sh", "-c", command], env={}, capture_output=True, text=True, check=True)
    given_to = ["-P", "-m", "slurmtrain", "--runs", str(odd / "runs"), "watch", "--once", "--every", "60"]
    assert done.stdout.splitlines() == [str(odd), *given_to, variables["FIRST"], ""]


@pytest.mark.parametrize("path", ["/a\\%b", "/a\nb", "/\udcff"])
def test_what_a_crontab_cannot_hold_is_refused(path: str) -> None:
    for wanted in (one(runs=Path(path)), one(workdir=Path(path)), one(python=path)):
        with pytest.raises(UserError):
            cron_line(wanted)


@pytest.mark.parametrize(
    ("every", "fields"),
    [(10, "*"), (60, "*"), (89, "*"), (120, "*/2"), (300, "*/5"), (3540, "*/59"), (3600, "0"), (1e6, "0")],
)
def test_cron_is_told_as_many_minutes_as_it_knows(every: float, fields: str) -> None:
    assert schedule(every) == f"{fields} * * * *"


def test_a_line_that_some_crons_would_cut_is_noticed() -> None:
    assert not is_long(cron_line(one()))
    assert is_long(cron_line(replace(one(), variables={"PATH": "/x" * 600})))
