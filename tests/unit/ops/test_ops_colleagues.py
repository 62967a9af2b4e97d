"""A runs root that a group shares: three accounts, with real files and real commands."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from helpers.accounts import ALICE, BOB, CAROL, TEAM, Person, needs_accounts, people
from helpers.simulated_run import RUN_ID, SimulatedRun

from slurmtrain.model.run.layout import RunDir

pytestmark = needs_accounts
SPEC = """name: hello
command: python -c 'print(1)'
tracking: {mlflow: {enabled: false}}
"""


class Team:
    """Three people who share a runs root."""

    def __init__(self, ground: Path, members: list[Person]) -> None:
        self.ground = ground
        self.root = ground / "team"
        self.root.mkdir()
        os.chown(self.root, 0, TEAM)
        self.root.chmod(0o3770)
        self.alice, self.bob, self.carol = members

    def slurmtrain(self, person: Person, *arguments: str, umask: int = 0o022) -> CompletedProcess[str]:
        """Run a command of slurmtrain as a member."""
        variables = {"SLURMTRAIN_RUNS": str(self.root), "SLURMTRAIN_SHARED": "group"}
        return person.slurmtrain(*arguments, cwd=person.home, umask=umask, env=variables)

    def own_root(self, person: Person, mode: int = 0o2750) -> Path:
        """The directory of a member, which need not exist."""
        own = self.root / str(person.uid)
        return own if own.exists() else person.make_directory(own, mode, gid=TEAM)

    def add_run(self, person: Person, run_id: str = RUN_ID, name: str = "simulated") -> RunDir:
        """A run that has completed, readable for the group."""
        run = RunDir(self.own_root(person) / run_id)
        SimulatedRun(run, spec={"name": name}).submitted().started().reached(7).ended("completed")
        for place in (run.path, *run.path.rglob("*")):
            os.chown(place, person.uid, TEAM)
            place.chmod(0o2750 if place.is_dir() else 0o640)
        return run


@pytest.fixture
def team() -> Iterator[Team]:
    """Three people who share a runs root."""
    with people(ALICE, BOB, CAROL) as (ground, members):
        yield Team(ground, members)


def files_of(root: Path) -> dict[str, tuple[int, int, int]]:
    """Modification time (ns), mode and size of everything below a directory."""
    return {
        str(path.relative_to(root)): (status.st_mtime_ns, status.st_mode, status.st_size)
        for path in sorted(root.rglob("*"))
        if (status := path.lstat())
    }


def test_everybody_sees_all_runs_and_only_their_owner_acts_on_them(team: Team) -> None:
    (team.alice.home / "exp.yaml").write_text(SPEC)
    team.alice.take(team.alice.home)
    # The strictest umask that is in use: the group can read what is created in spite of it.
    submitting = ("submit", "exp.yaml", "--executor", "local", "--wait", "--json")
    submitted = team.slurmtrain(team.alice, *submitting, umask=0o077)
    run_id = json.loads(submitted.stdout)["runs"][0]["id"]
    team.add_run(team.bob)
    before = files_of(team.root)

    for person in (team.bob, team.carol):
        listed = team.slurmtrain(person, "status", "--all", "--json")
        assert (listed.returncode, listed.stderr) == (0, "")
        shown = {(run["user"], run["id"], run["state"]) for run in json.loads(listed.stdout)["runs"]}
        assert shown == {(str(ALICE), run_id, "completed"), (str(BOB), RUN_ID, "completed")}
    table = team.slurmtrain(team.carol, "status", "--all").stdout.splitlines()
    assert [line.split()[:4] for line in table] == [
        ["USER", "ID", "NAME", "STATE"],
        [str(ALICE), run_id, "hello", "completed"],
        [str(BOB), RUN_ID, "simulated", "completed"],
    ]

    for command in ("resume", "cancel", "prune", "wait"):
        refused = team.slurmtrain(team.bob, command, run_id)
        assert refused.returncode == 2, refused
        assert f"it belongs to {ALICE}" in refused.stderr
    after = files_of(team.root)
    assert not (team.root / str(CAROL)).exists()
    # Bob's own commands keep their registry in his directory.
    for files in (before, after):
        for name in [name for name in files if name == str(BOB) or name.startswith(f"{BOB}/")]:
            del files[name]
    assert after == before


def test_costs_of_the_others_are_counted_by_user_if_they_are_asked_for(team: Team) -> None:
    team.add_run(team.alice, "0123456780")
    team.add_run(team.bob, "0123456781")
    team.add_run(team.bob, "0123456782")
    own = json.loads(team.slurmtrain(team.bob, "cost", "--json").stdout)
    assert [(run["id"], run["user"]) for run in own["runs"]] == [(f"012345678{n}", str(BOB)) for n in (1, 2)]
    every = json.loads(team.slurmtrain(team.bob, "cost", "--all", "--json").stdout)
    by_user = {each["user"]: each["node_hours"] for each in every["by"]["user"]}
    # All are alike.
    assert by_user[str(BOB)] == pytest.approx(2 * by_user[str(ALICE)])
    assert sum(by_user.values()) == pytest.approx(every["total"]["node_hours"])
    assert every["total"]["node_hours"] > own["total"]["node_hours"] > 0


def test_the_group_can_read_what_shows_a_run_and_nothing_else(team: Team) -> None:
    (team.alice.home / "exp.yaml").write_text(SPEC)
    team.alice.take(team.alice.home)
    team.slurmtrain(team.alice, "submit", "exp.yaml", "--executor", "local", "--wait", umask=0o022)
    own = team.root / str(ALICE)
    modes = {path: (stat.S_IMODE(path.lstat().st_mode), path.lstat().st_gid) for path in (own, *own.rglob("*"))}
    assert {gid for _, gid in modes.values()} == {TEAM}
    assert not [path for path, (mode, _) in modes.items() if mode & 0o027]
    hidden = {"checkpoints", "logs", "submitit"}
    for path, (mode, _) in modes.items():
        is_hidden = bool(hidden & set(path.parts)) or path.suffix in (".db", ".lock", ".log") or path.name == ".lock"
        readable = 0o2750 if path.is_dir() else 0o640
        assert (mode == readable) != is_hidden, (path, oct(mode))


def test_words_of_a_colleague_are_shown_and_nothing_else(team: Team) -> None:
    team.own_root(team.alice)
    secret = team.alice.home / "secret.jsonl"
    secret.write_text('{"t": 1.0, "kind": "created", "name": "secret", "executor": "local"}\n')
    team.alice.take(secret, 0o600)
    team.add_run(team.bob, "0123456780", name="honest")
    linked = team.add_run(team.bob, "0123456781", name="linked")
    (linked.journals / "more.jsonl").symlink_to(secret)
    fifo = team.add_run(team.bob, "0123456782", name="fifo")
    os.mkfifo(fifo.journals / "more.jsonl")
    hard = team.add_run(team.bob, "0123456783", name="hard")
    os.link(secret, hard.journals / "more.jsonl")
    (team.own_root(team.bob) / "0123456784").symlink_to(team.alice.home)
    writable = team.add_run(team.bob, "0123456785", name="writable")
    writable.path.chmod(0o2770)
    team.bob.make_directory(team.root / str(CAROL), 0o2750, gid=TEAM)
    before = files_of(team.root)

    listed = team.slurmtrain(team.alice, "status", "--all", "--json")
    assert listed.returncode == 0, listed
    assert [run["name"] for run in json.loads(listed.stdout)["runs"]] == ["honest"]
    for run_id in ("0123456781", "0123456782", "0123456783", "0123456784", "0123456785"):
        assert f"run {run_id} of {BOB} cannot be read" in listed.stderr
    assert f"{team.root}/{CAROL} is not shown: it belongs to {BOB}" in listed.stderr
    assert "secret" not in listed.stdout
    synced = team.slurmtrain(team.alice, "sync", "--json")
    assert json.loads(synced.stdout)["runs"] == 0
    assert {name: seen for name, seen in files_of(team.root).items() if name.startswith(str(BOB))} == {
        name: seen for name, seen in before.items() if name.startswith(str(BOB))
    }


def test_a_colleague_who_shows_nothing_hides_nobody_else(team: Team) -> None:
    team.own_root(team.bob, 0o700)
    team.add_run(team.alice)
    listed = team.slurmtrain(team.carol, "status", "--all", "--json")
    assert listed.returncode == 0, listed
    assert [run["user"] for run in json.loads(listed.stdout)["runs"]] == [str(ALICE)]
    assert f"the runs of {BOB} cannot be read: permission denied" in listed.stderr


def test_a_directory_that_somebody_else_made_in_my_name_is_refused(team: Team) -> None:
    team.bob.make_directory(team.root / str(ALICE), 0o2770, gid=TEAM)
    (team.alice.home / "exp.yaml").write_text(SPEC)
    team.alice.take(team.alice.home)
    for arguments in (("submit", "exp.yaml", "--executor", "local"), ("sync",), ("status",)):
        refused = team.slurmtrain(team.alice, *arguments)
        assert refused.returncode == 2, refused
        assert f"{team.root}/{ALICE} belongs to the account {BOB}" in refused.stderr
    assert not list((team.root / str(ALICE)).iterdir())


def test_a_shared_root_that_does_not_exist_is_not_created(team: Team) -> None:
    (team.alice.home / "exp.yaml").write_text(SPEC)
    team.alice.take(team.alice.home)
    team.root.rmdir()
    refused = team.slurmtrain(team.alice, "submit", "exp.yaml", "--executor", "local")
    assert refused.returncode == 2, refused
    assert "docs/sharing.md says how to create it" in refused.stderr


def test_the_id_of_a_run_of_somebody_else_is_said_to_be_theirs_by_commands_of_all_kinds(team: Team) -> None:
    team.add_run(team.alice)
    team.add_run(team.bob, "6aaaaaaaaa", "mine")
    for command in (("show",), ("logs",), ("status",), ("compare",), ("cancel",), ("resume",), ("delete", "-y")):
        refused = team.slurmtrain(team.bob, *command, RUN_ID)
        whose = f"error: run '{RUN_ID}' is not yours: it belongs to {team.alice.uid}"
        assert (refused.returncode, refused.stderr.splitlines()[-1]) == (2, whose), command
