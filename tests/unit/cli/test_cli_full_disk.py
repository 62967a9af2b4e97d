"""Commands on a real file system that is full, or nearly so: nothing is lost, no run is left unmentioned.

By default some commands meet one amount of free space each; TEST_RARE=all TEST_KILLS=all has everything.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
from helpers.disturbed_commands import DisturbedHome, disturbed_copy
from helpers.forked_commands import import_everything
from helpers.full_disk import SmallDisk, small_disk
from helpers.rare import drawn
from helpers.sample_home import SampleHome, id_of, make_home

KIB = 1024
# Free KiB, or with a minus sign how many files can be created, less one: -1 means none.
LEVELS = (0, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256, 512, 1024, -1, -4)
FEW = ((0, False), (24, True))
COMMANDS = (
    ("submit", "spec.yaml"),
    ("submit", "spec.yaml", "--executor", "slurm"),
    ("sync",),
    ("watch", "--once"),
    ("status", "--all"),
    ("show", id_of("crashed")),
    ("cancel", id_of("gone")),
    ("cancel", id_of("pending")),
    ("resume", id_of("crashed")),
    ("prune", id_of("crashed")),
    ("delete", id_of("crashed"), "-y"),
    ("delete", id_of("completed"), "--forget", "-y"),
    ("tag", id_of("crashed"), "good"),
    ("export", id_of("completed"), "--to", "model.pt"),
    ("registry", "rebuild"),
    ("checkpoint", id_of("elsewhere"), "--no-wait"),
    ("nodes", "forgive", "n1"),
)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    with small_disk(tmp_path_factory.mktemp("disk") / "small", "24m", inodes=2000) as mounted:
        yield mounted


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleHome:
    import_everything()
    return make_home(tmp_path_factory.mktemp("sample") / "home")


@pytest.mark.parametrize("command", drawn(COMMANDS, 4), ids=" ".join)
def test_a_full_disk_loses_nothing_and_leaves_no_run_unmentioned(
    sample: SampleHome, disk: SmallDisk, command: tuple[str, ...]
) -> None:
    for number, (level, has_registry) in enumerate(levels(COMMANDS.index(command))):
        # A directory for each case: processes of the case before, which are named for theirs, may take a while to end.
        home = disk.path / f"home-{COMMANDS.index(command)}-{number}"
        with disturbed_copy(sample, home) as disturbed:
            if has_registry:
                disturbed.call("status")
            with filled(disk, level):
                ended = disturbed.call(*command)
            printed = (ended.output + ended.errors).decode()
            assert [run_id for run_id in disturbed.new_runs() if run_id not in printed] == [], (level, printed)
            if command[0] in ("status", "show", "delete"):
                assert ended.code == 0, (level, printed)
            disturbed.settle()
            disturbed.check(command)
            check_again(disturbed, command)


def levels(command: int) -> list[tuple[int, bool]]:
    """The levels for a command, each with or without a registry that another command has filled before."""
    if os.environ.get("TEST_KILLS") == "all":
        return [(level, has_registry) for level in LEVELS for has_registry in (True, False)]
    return [FEW[command % len(FEW)]]


def check_again(disturbed: DisturbedHome, command: tuple[str, ...]) -> None:
    """With space again, the same command works, unless there is nothing left to do."""
    codes = {"submit": {0}, "sync": {0}, "watch": {0}, "status": {0}, "show": {0}, "prune": {0}, "registry": {0}}
    ended = disturbed.call(*command)
    assert ended.code in codes.get(command[0], {0, 2}), ended.errors.decode()
    disturbed.check(command)


@contextlib.contextmanager
def filled(disk: SmallDisk, level: int) -> Iterator[None]:
    """Leave this much space, and all of it again."""
    if level < 0:
        disk.leave_files(-level - 1)
    else:
        disk.leave(level * KIB)
    try:
        yield
    finally:
        disk.free()
