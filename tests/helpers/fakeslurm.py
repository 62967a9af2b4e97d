"""Slurm's commands as scripts on PATH that say what they are told to say, and record how they were called."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

_SCRIPT = """\
#!{python} -IS
import json, os, sys, time
name, here = os.path.basename(sys.argv[0]), os.path.dirname(os.path.abspath(sys.argv[0]))
call = {{"name": name, "args": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}
with open(here + "/calls.jsonl", "a") as file:
    file.write(json.dumps(call) + "\\n")
with open(here + "/" + name + ".says") as file:
    says = json.load(file)
while says["until"] and not os.path.exists(says["until"]):
    time.sleep(0.01)
sys.stderr.write(says["stderr"])
sys.stdout.write(says["stdout"])
sys.stdout.flush()
if says["code"] < 0:
    os.kill(os.getpid(), -says["code"])
sys.exit(says["code"])
"""


@dataclass(frozen=True)
class Call:
    """One call of a command."""

    args: list[str]
    env: dict[str, str]
    cwd: str


class FakeSlurm:
    """A directory for PATH. Commands that were given nothing to say are not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def says(self, name: str, stdout: str = "", *, stderr: str = "", code: int = 0, until: Path | None = None) -> None:
        """What the command says from now on, and when it ends: at once, or once the file ``until`` exists."""
        reply = {"stdout": stdout, "stderr": stderr, "code": code, "until": str(until) if until else ""}
        (self.path / f"{name}.says").write_text(json.dumps(reply))
        script = self.path / name
        script.write_text(_SCRIPT.format(python=sys.executable))
        script.chmod(0o755)

    def fails(self, name: str, stderr: str) -> None:
        self.says(name, stderr=stderr, code=1)

    def calls(self, name: str) -> list[Call]:
        """Its calls so far, the first one first."""
        log = self.path / "calls.jsonl"
        if not log.exists():
            return []
        told = [json.loads(line) for line in log.read_text().split("\n")[:-1]]
        return [Call(each["args"], each["env"], each["cwd"]) for each in told if each["name"] == name]

    def on_path(self) -> str:
        """A PATH on which Slurm's commands are these alone, beside this interpreter."""
        return os.pathsep.join([str(self.path), str(Path(sys.executable).parent)])
