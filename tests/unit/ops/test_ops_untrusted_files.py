"""What other accounts put into a runs root decides nothing: tests with real accounts, by real commands."""

from __future__ import annotations

import json
import os
import pwd
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.accounts import ALICE, BOB, TEAM, Person, needs_accounts, people
from helpers.simulated_run import RUN_ID, SimulatedRun

from slurmtrain.model.run.layout import RunDir
from slurmtrain.system.owned_files import _is_private_group

pytestmark = needs_accounts
OTHER_ID = "0123456788"


@pytest.fixture
def ground() -> Iterator[tuple[Path, Person, Person]]:
    """A directory that everybody can enter, Alice, and Bob, who attacks her."""
    with people(ALICE, BOB) as (place, (alice, bob)):
        yield place, alice, bob


def crafted_run(root: Path, run_id: str = RUN_ID) -> RunDir:
    """A run that was created, but whose job was never started: what a killed submission leaves, and 'sync' starts."""
    directory = RunDir(root / run_id)
    spec = {"name": "innocent", "command": "touch /dev/null", "tracking": {"mlflow": {"enabled": False}}}
    SimulatedRun(directory, spec=spec, executor="local").created()
    plan = json.loads(directory.plan.read_text())
    directory.plan.write_text(json.dumps({**plan, "workdir": str(root.parent), "python": sys.executable}))
    return directory


def finished_run(root: Path, run_id: str) -> None:
    """A run of this machine that has completed."""
    SimulatedRun(RunDir(root / run_id), spec={}, executor="local").created().submitted().started().ended("completed")


def run_of_bob_beside_one_of_alice(root: Path, alice: Person, bob: Person) -> RunDir:
    """A crafted run that belongs to Bob, in Alice's own root, where she has a completed one."""
    root.mkdir()
    finished_run(root, OTHER_ID)
    run = crafted_run(root)
    alice.take(root, 0o700)
    bob.take(run.path)
    return run


def assert_untouched(run: RunDir) -> None:
    """Assert that no command has acted on a run."""
    assert sorted(path.name for path in run.path.iterdir()) == ["attempts", "checkpoints", "journal", "plan.json"]
    assert [path.name for path in run.journals.iterdir()] == ["submit.jsonl"]


@pytest.mark.parametrize(
    ("mode", "writers"), [(0o1777, "everyone (mode 1777)"), (0o2770, f"the group {TEAM} (mode 2770)")]
)
def test_no_command_acts_in_a_root_that_others_can_write_to(
    ground: tuple[Path, Person, Person], mode: int, writers: str
) -> None:
    place, alice, bob = ground
    root = alice.make_directory(place / "runs", mode, gid=TEAM)
    run = crafted_run(root)
    bob.take(run.path)
    for command in (["sync", "--json"], ["watch", "--once"], ["wait", RUN_ID], ["resume", RUN_ID], ["cancel", RUN_ID]):
        result = alice.slurmtrain("--runs", root, *command, cwd=place)
        assert result.returncode == 2, (command, result)
        assert f"the runs root {root} can be written by {writers}" in result.stderr
        assert "chmod" in result.stderr
        assert "docs/sharing.md" in result.stderr
    assert_untouched(run)
    assert sorted(path.name for path in root.iterdir()) == [RUN_ID]


def test_a_root_of_somebody_else_is_refused(ground: tuple[Path, Person, Person]) -> None:
    place, alice, bob = ground
    bob.make_directory(place / "runs", 0o755)
    result = alice.slurmtrain("status", cwd=place)
    assert result.returncode == 2
    assert f"the runs root {place}/runs belongs to the account {BOB}" in result.stderr
    assert "--runs" in result.stderr


def test_a_run_of_another_account_in_my_root_decides_nothing_and_mine_go_on(
    ground: tuple[Path, Person, Person],
) -> None:
    place, alice, bob = ground
    run = run_of_bob_beside_one_of_alice(place / "runs", alice, bob)
    synced = alice.slurmtrain("sync", "--json", cwd=place)
    assert json.loads(synced.stdout)["started"] == []
    assert f"{run.path} belongs to the account {BOB}" in synced.stderr
    status = json.loads(alice.slurmtrain("status", "--json", cwd=place).stdout)
    states = {each["id"]: each["state"] for each in status["runs"]}
    assert states == {RUN_ID: "unreadable", OTHER_ID: "completed"}
    for command in ("wait", "resume", "cancel"):
        result = alice.slurmtrain(command, RUN_ID, cwd=place)
        assert result.returncode in (1, 2), (command, result)
        assert f"belongs to the account {BOB}" in result.stderr, (command, result)
    assert_untouched(run)


def test_a_run_that_was_known_before_it_became_somebody_elses_is_not_started(
    ground: tuple[Path, Person, Person],
) -> None:
    place, alice, bob = ground
    root = place / "runs"
    root.mkdir()
    run = crafted_run(root)
    alice.take(root, 0o700)
    assert json.loads(alice.slurmtrain("status", "--json", cwd=place).stdout)["runs"][0]["state"] == "created"
    bob.take(run.path)
    synced = alice.slurmtrain("sync", "--json", cwd=place)
    assert json.loads(synced.stdout)["started"] == []
    assert_untouched(run)


def test_rebuild_reads_nothing_of_another_account(ground: tuple[Path, Person, Person]) -> None:
    place, alice, bob = ground
    run_of_bob_beside_one_of_alice(place / "runs", alice, bob)
    rebuilt = alice.slurmtrain("registry", "rebuild", cwd=place)
    assert rebuilt.returncode == 0, rebuilt
    assert f"belongs to the account {BOB}" in rebuilt.stderr


@pytest.mark.parametrize(
    ("name", "kind", "command"),
    [
        (".watch.lock", "link", ["watch", "--once"]),
        (".watch.lock", "hard link", ["watch", "--once"]),
        (".watch.lock", "fifo", ["watch", "--once"]),
        (".mlflow.lock", "link", ["sync"]),
        ("mlflow.db", "link", ["sync"]),
        ("mlflow.db", "hard link", ["sync"]),
        ("registry.db", "link", ["sync"]),
        ("registry.db", "fifo", ["sync"]),
    ],
)
def test_a_lock_or_a_store_that_is_not_a_file_of_mine_is_refused(
    ground: tuple[Path, Person, Person], name: str, kind: str, command: list[str]
) -> None:
    place, alice, bob = ground
    root = place / "runs"
    root.mkdir()
    SimulatedRun(RunDir(root / RUN_ID), spec={"tracking": {"mlflow": {"enabled": True}}}, executor="local").submitted(
        process={"host": "elsewhere", "boot": "b", "pid": 5, "start": 9}
    ).started()
    victim = place / "precious"
    victim.write_text("precious")
    bob.take(victim, 0o666)
    planted = root / name
    if kind == "fifo":
        os.mkfifo(planted)
    elif kind == "link":
        planted.symlink_to(victim)
    else:
        os.link(victim, planted)
    alice.take(root, 0o700)
    bob.take(victim)
    result = alice.slurmtrain(*command, cwd=place)
    assert victim.read_text() == "precious"
    assert str(planted) in result.stderr, result
    assert "Traceback" not in result.stderr
    # The registry is a projection: without it, commands read the run directories.
    assert result.returncode == 0 if name == "registry.db" else result.returncode in (1, 2)


def test_my_own_link_to_a_root_elsewhere_goes_on_working(ground: tuple[Path, Person, Person]) -> None:
    place, alice, bob = ground
    elsewhere = place / "scratch"
    elsewhere.mkdir()
    finished_run(elsewhere, OTHER_ID)
    alice.take(elsewhere, 0o700)
    (alice.home / "runs").symlink_to(elsewhere)
    alice.take(alice.home)
    assert json.loads(alice.slurmtrain("status", "--json", cwd=alice.home).stdout)["runs"][0]["id"] == OTHER_ID
    bob.take(alice.home / "runs")
    refused = alice.slurmtrain("status", "--json", cwd=alice.home)
    assert (refused.returncode, f"runs belongs to the account {BOB}" in refused.stderr) == (2, True)


def test_a_directory_above_the_root_may_belong_to_a_group(ground: tuple[Path, Person, Person]) -> None:
    place, alice, bob = ground
    project = bob.make_directory(place / "project", 0o2770, gid=TEAM)
    alice.make_directory(project / "alice", 0o2750, gid=TEAM)
    result = alice.slurmtrain("status", "--json", cwd=project / "alice")
    runs = project / "alice" / "runs"
    assert (result.returncode, result.stderr) == (0, f"no runs in {runs}; 'slurmtrain submit' starts one\n")


def test_with_the_umask_002_a_root_of_my_own_private_group_is_fine(ground: tuple[Path, Person, Person]) -> None:
    place, _, _ = ground
    accounts = [each for each in pwd.getpwall() if each.pw_uid and _is_private_group(each.pw_gid, each.pw_uid)]
    if not accounts:
        pytest.skip("no account of this machine has a group of its own")
    person = Person(accounts[0].pw_uid, place / "home")
    for path in (person.home, person.home / "runs"):
        person.make_directory(path, 0o775, gid=accounts[0].pw_gid)
    (person.home / "slurmtrain.yaml").touch()
    person.take(person.home / "slurmtrain.yaml", 0o664, gid=accounts[0].pw_gid)
    assert person.slurmtrain("status", cwd=person.home).returncode == 0
    person.take(person.home / "runs", 0o775, gid=TEAM)
    assert person.slurmtrain("status", cwd=person.home).returncode == 2


# --- configuration ----------------------------------------------------------------------------------------------------


def test_a_configuration_that_somebody_put_into_a_directory_above_is_not_read(
    ground: tuple[Path, Person, Person],
) -> None:
    place, alice, bob = ground
    project = bob.make_directory(place / "project", 0o1777)
    theirs = project / "slurmtrain.yaml"
    theirs.write_text(f"runs: {bob.home}\nmlflow_uri: http://127.0.0.1:1\n")
    bob.take(theirs, 0o644)
    work = alice.make_directory(project / "alice")
    result = alice.slurmtrain("status", cwd=work)
    assert result.returncode == 0, result
    assert result.stderr.count(str(theirs)) == 1
    assert f"{theirs} belongs to the account {BOB}" in result.stderr
    assert "it is ignored" in result.stderr
    assert f"no runs in {work}/runs" in result.stderr


@pytest.mark.parametrize("make", ["theirs", "their link", "everyone's", "the team's"])
def test_a_configuration_in_the_current_directory_that_cannot_be_trusted_is_an_error(
    ground: tuple[Path, Person, Person], make: str
) -> None:
    place, alice, bob = ground
    work = alice.make_directory(place / "work")
    file = work / "slurmtrain.yaml"
    if make == "their link":
        (alice.home / "mine.yaml").write_text("executor: local\n")
        file.symlink_to(alice.home / "mine.yaml")
    else:
        file.write_text("executor: local\n")
    owner = bob if "their" in make else alice
    owner.take(file, gid=TEAM if make == "the team's" else None)
    if owner is alice:
        file.chmod(0o666 if make == "everyone's" else 0o664)
    # Also above the current one.
    below = alice.make_directory(work / "below") if make == "the team's" else work
    result = alice.slurmtrain("status", cwd=below)
    assert result.returncode == 2
    assert (f"chmod go-w {file}" if make == "the team's" else str(file)) in result.stderr


def test_a_link_to_my_own_configuration_is_followed(ground: tuple[Path, Person, Person]) -> None:
    place, alice, _ = ground
    config = alice.home / ".config/slurmtrain"
    config.mkdir(parents=True)
    (alice.home / "dotfiles.yaml").write_text("runs: ~/elsewhere\n")
    (config / "slurmtrain.yaml").symlink_to(alice.home / "dotfiles.yaml")
    alice.take(alice.home)
    assert f"no runs in {alice.home}/elsewhere" in alice.slurmtrain("status", cwd=place).stderr
