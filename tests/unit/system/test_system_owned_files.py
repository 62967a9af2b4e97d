"""What counts as trusted: whose it is, who can write to it, and that it is a regular file."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.accounts import ALICE, BOB, CAROL, TEAM, give, needs_accounts

from slurmtrain.errors import PathError, UntrustedPath
from slurmtrain.system import owned_files
from slurmtrain.system.owned_files import (
    check_owned,
    follow_links,
    open_checked,
    open_directory,
    open_regular,
    read_checked,
)

# The group of everybody in a place.
INSTITUTE = 61_101


def _status(mode: int, uid: int = ALICE, gid: int = ALICE) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))


@pytest.fixture
def private_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alice has a private group; Bob's primary group has her in it; Carol's is that of everybody in her institute."""
    groups = {ALICE: ALICE, BOB: BOB, CAROL: INSTITUTE}
    accounts = {uid: SimpleNamespace(pw_uid=uid, pw_gid=gid, pw_name=f"u{uid}") for uid, gid in groups.items()}
    members = {ALICE: [], BOB: [f"u{ALICE}"], TEAM: [f"u{ALICE}", f"u{BOB}"], INSTITUTE: []}
    names = {gid: f"u{gid}" for gid in (ALICE, BOB)} | {gid: f"g{gid}" for gid in (TEAM, INSTITUTE)}
    monkeypatch.setattr("pwd.getpwuid", accounts.__getitem__)
    # As with a directory service that does not list its accounts: Carol's colleagues are not there.
    monkeypatch.setattr("pwd.getpwall", lambda: list(accounts.values()))
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_mem=members[gid], gr_name=names[gid]))
    owned_files._is_private_group.cache_clear()
    yield
    owned_files._is_private_group.cache_clear()


def test_my_files_and_roots_are_trusted(private_groups: None) -> None:
    check_owned(_status(0o600), "f", owner=ALICE)
    check_owned(_status(0o644, uid=0, gid=0), "f", owner=ALICE)
    check_owned(_status(0o664), "f", owner=ALICE)  # her private group


@pytest.mark.parametrize(
    ("status", "words"),
    [
        pytest.param(_status(0o600, uid=BOB), f"f belongs to u{BOB}, neither to u{ALICE} nor to root", id="another's"),
        pytest.param(_status(0o666), "f can be written by everyone (mode 0666)", id="everyone"),
        pytest.param(_status(0o1777), "everyone (mode 1777)", id="sticky"),
        pytest.param(_status(0o660, gid=TEAM), f"by the group g{TEAM} (mode 0660)", id="a team's group"),
        pytest.param(_status(0o660, gid=BOB), f"the group u{BOB}", id="another's private group"),
        pytest.param(_status(0o600, uid=65534), "root's with root_squash", id="nobody's"),
    ],
)
def test_what_somebody_else_owns_or_can_write_to_is_not_trusted(
    status: os.stat_result, words: str, private_groups: None
) -> None:
    with pytest.raises(UntrustedPath) as caught:
        check_owned(status, "f", owner=ALICE)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("owner", "group", "name"),
    [(BOB, BOB, f"u{BOB}"), (CAROL, INSTITUTE, f"g{INSTITUTE}")],
    ids=["with another member", "of many accounts"],
)
def test_a_primary_group_of_others_is_not_private(owner: int, group: int, name: str, private_groups: None) -> None:
    with pytest.raises(UntrustedPath, match=f"the group {name}"):
        check_owned(_status(0o664, uid=owner, gid=group), "f", owner=owner)


def test_the_message_says_how_to_make_ones_own_file_trusted(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.touch()
    path.chmod(0o666)
    with pytest.raises(UntrustedPath, match=f"chmod go-w {path}"):
        open_regular(path)


def test_a_link_is_not_followed_to_a_file(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(UntrustedPath, match="is a symbolic link"):
            open_regular(link, flags)
    assert victim.read_text() == "precious"
    victim.unlink()
    with pytest.raises(UntrustedPath):
        open_regular(link, os.O_WRONLY | os.O_CREAT)
    assert not victim.exists()


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_CREAT])
def test_what_is_no_file_is_refused_without_waiting_and_leaves_no_descriptor_open(tmp_path: Path, flags: int) -> None:
    os.mkfifo(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UntrustedPath, match="is a FIFO"):
        open_regular(tmp_path / "fifo", flags)
    with pytest.raises(UntrustedPath, match="is a directory"):
        open_regular(tmp_path, flags & ~os.O_CREAT)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none", flags & ~os.O_CREAT)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_created_file_is_private(tmp_path: Path) -> None:
    os.close(open_regular(tmp_path / "f", os.O_WRONLY | os.O_CREAT))
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600


def test_a_file_is_opened_in_the_directory_that_was_checked(tmp_path: Path) -> None:
    place = tmp_path / "d"
    place.mkdir()
    (place / "f").write_text("the first")
    directory = open_directory(place)
    place.rename(tmp_path / "moved")
    place.mkdir()
    (place / "f").write_text("the second")
    with os.fdopen(open_regular(place / "f", directory=directory)) as file:
        assert file.read() == "the first"
    os.close(directory)


def test_my_own_link_to_a_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_bytes(b"content")
    (tmp_path / "link").symlink_to("d")
    assert read_checked(tmp_path / "link/f") == b"content"


def test_links_are_resolved_like_the_kernel_does(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "x").symlink_to("a/b")
    (tmp_path / "y").symlink_to("x/../z")
    assert follow_links(tmp_path / "y") == (tmp_path / "a/z").resolve()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PathError, match="more than 40 symbolic links"):
        follow_links(tmp_path / "loop")


@needs_accounts
def test_a_link_of_somebody_else_to_my_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to("d")
    give(tmp_path / "link", BOB)
    with pytest.raises(UntrustedPath, match=f"link belongs to the account {BOB}"):
        open_directory(tmp_path / "link")


@needs_accounts
def test_a_hard_link_to_somebody_elses_file_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.touch()
    give(theirs, BOB)
    os.link(theirs, tmp_path / "lock")
    with pytest.raises(UntrustedPath, match=f"belongs to the account {BOB}"):
        open_regular(tmp_path / "lock", os.O_RDWR | os.O_CREAT)


@needs_accounts
def test_a_file_is_not_created_in_a_directory_of_somebody_else(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    give(theirs, BOB, 0o777)
    with pytest.raises(UntrustedPath, match=f"theirs belongs to the account {BOB}"):
        open_checked(theirs / "lock", os.O_RDWR | os.O_CREAT)
    assert not (theirs / "lock").exists()


def test_an_access_control_list_undoes_a_private_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private_groups: None
) -> None:
    monkeypatch.setattr("os.getxattr", lambda *_: b"\x02\x00\x00\x00")
    with pytest.raises(UntrustedPath, match="accounts in its access control list"):
        check_owned(_status(0o660), tmp_path, owner=ALICE)
