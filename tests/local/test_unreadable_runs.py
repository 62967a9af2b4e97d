"""Runs whose files are not what they should be, among others: only they are affected, in every command.

The commands run as processes of an account without privileges: root can read what is forbidden.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.accounts import ALICE, Person, needs_accounts, people

from slurmtrain.model.run.events.base import encode
from slurmtrain.model.run.layout import RunDir, run_id
from slurmtrain.system.process import this_process

pytestmark = needs_accounts

GONE = {**this_process().to_dict(), "start": 1}


def make_run(root: Path, number: int) -> RunDir:
    """A run that was interrupted, so that ``sync`` tries to start it again, and cannot: it has no plan."""
    run = RunDir(root / run_id(1_700_000_000_000 + number, number))
    attempt = run.attempt("j", 0)
    for folder in (run.journals, attempt.path):
        folder.mkdir(parents=True)
    started = {"submission": 1, "job_id": "j", "attempt": 1, "executor": "local", "host": GONE["host"], "requeue": {}}
    (run.journals / "submit.jsonl").write_bytes(
        encode(1.0, "created", {"name": f"run-{number}", "executor": "local"})
        + encode(2.0, "submitting", started)
        + encode(3.0, "submitted", {"submission": 1, "job_id": "j", "process": GONE})
    )
    attempt.node_journal(0).write_bytes(encode(4.0, "agent", {"host": "n0", "process": GONE, "attempt": 1}))
    attempt.metrics.write_text('{"t": 5, "step": 1, "metrics": {"loss": 2.5}}\n')
    return run


def replace_by_file(run: RunDir) -> None:
    shutil.rmtree(run.path)
    run.path.write_text("a run was here")


def replace_by_link(run: RunDir) -> None:
    shutil.rmtree(run.path)
    run.path.symlink_to(run.path.name)


def replace_attempt_by_file(run: RunDir) -> None:
    shutil.rmtree(run.attempt("j", 0).path)
    run.attempt("j", 0).path.write_text("")


def add_socket(run: RunDir) -> None:
    # In its directory: the path of a socket must be short (unix(7)).
    with contextlib.chdir(run.journals), socket.socket(socket.AF_UNIX) as server:
        server.bind("x.jsonl")


# What is done to a run, and the reason that its row gives afterwards.
ATTACKS: dict[str, tuple[Callable[[RunDir], object], str]] = {
    "fifo": (lambda run: os.mkfifo(run.journals / "x.jsonl"), "journal/x.jsonl is a FIFO"),
    "folder": (lambda run: (run.journals / "x.jsonl").mkdir(), "journal/x.jsonl is a directory"),
    "socket": (add_socket, "journal/x.jsonl is a socket"),
    "device": (
        lambda run: os.mknod(run.journals / "x.jsonl", stat.S_IFCHR | 0o600, os.makedev(1, 5)),
        "journal/x.jsonl is a device",
    ),
    "link": (lambda run: (run.journals / "x.jsonl").symlink_to("x.jsonl"), "journal/x.jsonl is a symbolic link"),
    "metrics": (
        lambda run: (run.attempt("j", 0).metrics.unlink(), os.mkfifo(run.attempt("j", 0).metrics)),
        "attempts/j.0/metrics.jsonl is a FIFO",
    ),
    "name": (
        lambda run: (run.journals / os.fsdecode(b"\xff\n.jsonl")).write_text(""), "has a name that is not UTF-8",
    ),
    "file": (replace_by_file, "journal cannot be listed: not a directory"),
    "loop": (replace_by_link, "leads through more than 40 symbolic links"),
    "attempt": (replace_attempt_by_file, "attempts/j.0 cannot be listed: not a directory"),
    "closed": (lambda run: run.path.chmod(0), "permission denied"),
    "closed journals": (lambda run: run.journals.chmod(0), "journal cannot be listed: permission denied"),
    "closed journal": (
        lambda run: (run.journals / "submit.jsonl").chmod(0), "journal/submit.jsonl cannot be read: permission denied",
    ),
    "no journals": (lambda run: shutil.rmtree(run.journals), "there is no event in journal/"),
}  # fmt: skip
READ_ONCE = ("closed journal", "no journals")


@dataclass
class Ground:
    """A runs root with a run for each attack, and one that nobody touches."""

    alice: Person
    root: Path
    good: RunDir
    bad: dict[str, RunDir]

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command as its owner. A traceback fails the test, and so does a command that hangs."""
        called = self.alice.slurmtrain("--runs", self.root, *arguments, cwd=self.alice.home)
        assert "Traceback" not in called.stderr, (arguments, called.stderr)
        return called

    def states(self) -> dict[str, tuple[str, str]]:
        """State and reason of each run, by id."""
        listed = json.loads(self.call("status", "--json").stdout)["runs"]
        return {run["id"]: (run["state"], run["reason"]) for run in listed}

    def check_states(self, *, read_before: bool = False) -> None:
        states = self.states()
        assert states[self.good.id][0] == "requeued"
        # A journal that has been read to its end need not be read again.
        for name, run in [each for each in self.bad.items() if not (read_before and each[0] in READ_ONCE)]:
            assert states[run.id][0] == "unreadable", (name, states[run.id])
            assert ATTACKS[name][1] in states[run.id][1], name

    def attack(self) -> None:
        for name, run in self.bad.items():
            ATTACKS[name][0](run)
        # What root has added must be its owner's as well: this is about files, and not about whose they are.
        self.alice.take(self.root)

    def repair(self, healthy: Path) -> None:
        """Put the files right, as in the copy ``healthy`` of the root."""
        for name, run in self.bad.items():
            if name.startswith("closed"):
                for path in (run.path, run.journals, run.journals / "submit.jsonl"):
                    path.chmod(0o700)
                continue
            run.path.unlink() if run.path.is_symlink() or run.path.is_file() else shutil.rmtree(run.path)
            shutil.copytree(healthy / run.id, run.path)
        self.alice.take(self.root)

    def snapshot(self) -> dict[str, bytes]:
        """Every regular file of the runs that cannot be read, but for their locks."""
        return {
            str(path): path.read_bytes()
            for run in self.bad.values()
            for path in run.path.glob("**/*")
            if path.is_file() and not path.is_symlink() and path != run.lock
        }


@pytest.fixture
def ground() -> Iterator[Ground]:
    with people(ALICE) as (place, [alice]):
        root = place / "runs"
        good = make_run(root, 0)
        bad = {name: make_run(root, number) for number, name in enumerate(ATTACKS, 1)}
        # Neither is the name of a run.
        (root / "a\nb").mkdir()
        (root / os.fsdecode(b"\xff\xfe")).mkdir()
        alice.take(root, 0o700)
        shutil.copytree(root, place / "healthy")
        yield Ground(alice, root, good, bad)


def test_runs_that_cannot_be_read_are_shown_as_such_and_stop_no_command(ground: Ground) -> None:
    ground.attack()
    before = ground.snapshot()
    ground.check_states()
    for command in (["sync"], ["watch", "--once"], ["registry", "rebuild"], ["nodes"]):
        called = ground.call(*command)
        if command[0] in ("sync", "watch"):
            # It has tried to act on the one that can be read, and on no other.
            lines = [line for line in (called.stdout + called.stderr).splitlines() if "cannot be started again" in line]
            assert lines != []
            assert all(ground.good.id in line for line in lines)
        ground.check_states()
    assert ground.snapshot() == before


def test_a_run_that_was_read_before_is_unreadable_until_its_files_are_right_again(ground: Ground) -> None:
    assert {state for state, _ in ground.states().values()} == {"requeued"}
    ground.attack()
    ground.check_states(read_before=True)
    [run] = json.loads(ground.call("status", ground.bad["fifo"].id, "--json").stdout)["runs"]
    assert (run["name"], run["step"], run["attempt"], run["executor"]) == ("run-1", 1, 1, "local")
    # What is known of its attempt leads to logs that cannot be looked at.
    assert "error: " not in ground.call("doctor", ground.bad["closed"].id).stderr
    ground.repair(ground.root.parent / "healthy")
    assert {state for state, _ in ground.states().values()} == {"requeued"}


@pytest.mark.parametrize("name", ["fifo", "closed"])
def test_nothing_is_done_with_a_run_that_cannot_be_read(ground: Ground, name: str) -> None:
    ground.attack()
    run, before = ground.bad[name], ground.snapshot()
    for command in (["resume"], ["resume", "--from-start"], ["prune"], ["checkpoints"], ["verify"], ["logs"]):
        called = ground.call(*command, run.id)
        assert called.returncode == 2, command
        assert run.id in called.stderr
        assert ATTACKS[name][1] in called.stderr
    called = ground.call("cancel", run.id, "--json")
    assert called.returncode == 1
    assert [(each["id"], each["state"]) for each in json.loads(called.stdout)["runs"]] == [(run.id, "unreadable")]
    shown = ground.call("show", run.id)
    assert "unreadable\nwhy         journal" in shown.stdout
    assert ATTACKS[name][1] in ground.call("doctor", run.id).stdout
    assert ground.snapshot() == before
