"""What can be wrong with a place in a tree of files: nothing is there, another kind of thing, a link, other rights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

from helpers.sample_home import SampleHome

_NAMES = (b".new-0000000000", b".new-zzzzzzzzzz", b"step-99999999999999999999", b"step--1", b"step-50", b"7.x",
          b"a\nb.jsonl", b"\xff\xfe.jsonl", b"\x1b[31m.jsonl", b"x" * 250, b"0123456789", b"....", b"-rf",
          b"node-x.jsonl", b"99999999999999999999.0", b".trash-step-9", b".1.0-step-50", b"damaged-step-9",
          b"-1.-1", b"CON", b"1.0.0", b" ")  # fmt: skip


def every_path(root: Path) -> list[Path]:
    """All paths below a directory, in a fixed order."""
    return [Path(folder) / name for folder, folders, files in os.walk(root) for name in sorted([*folders, *files])]


def mutate_place(path: Path, home: SampleHome, random: Random) -> str:
    """Remove, replace, rename or protect what is at ``path``, or add something next to it; says what was done."""
    change = random.choice(sorted(_PLACES))
    _PLACES[change](path, home, random)
    return f"{change}: {path}"


def _remove(path: Path, home: SampleHome, _random: Random) -> None:
    # Set aside, so that the judge can tell what this has removed from what the command has.
    path.rename(home.path / "tmp" / f"removed-{len(os.listdir(home.path / 'tmp'))}")


def _directory(path: Path, home: SampleHome, random: Random) -> None:
    _remove(path, home, random)
    path.mkdir(0o700)


def _file(path: Path, home: SampleHome, random: Random) -> None:
    _remove(path, home, random)
    path.write_bytes(random.choice([b"", b"junk\n", b"{}", b"\x00" * 100]))
    path.chmod(0o600)


def _link(path: Path, home: SampleHome, random: Random) -> None:
    _remove(path, home, random)
    elsewhere = home.path / "elsewhere"
    nowhere = home.path / "nowhere"
    target = random.choice([elsewhere / "precious.txt", elsewhere, path, nowhere, "/proc/version", "..", home.runs])
    path.symlink_to(target)


def _moved_and_linked(path: Path, home: SampleHome, _random: Random) -> None:
    target = home.path / "elsewhere" / "moved"
    path.rename(target)
    path.symlink_to(target)


def _fifo(path: Path, home: SampleHome, random: Random) -> None:
    _remove(path, home, random)
    os.mkfifo(path, 0o600)


def _mode(path: Path, _home: SampleHome, random: Random) -> None:
    path.chmod(random.choice([0o000, 0o200, 0o400, 0o500, 0o644, 0o666, 0o755, 0o777, 0o1777, 0o2770]))


def _rename(path: Path, _home: SampleHome, random: Random) -> None:
    target = os.fsencode(path.parent) + b"/" + random.choice(_NAMES)
    if not os.path.lexists(target):
        os.rename(os.fsencode(path), target)


def _extra(path: Path, _home: SampleHome, random: Random) -> None:
    folder = path if path.is_dir() else path.parent
    target = os.fsencode(folder) + b"/" + random.choice(_NAMES)
    if os.path.lexists(target):
        return
    if random.random() < 0.4:
        os.mkdir(target, 0o700)
    else:
        with open(target, "wb") as file:
            file.write(b'{"t": 1.0, "kind": "created"}\n' * random.randrange(3))


def _times(path: Path, _home: SampleHome, random: Random) -> None:
    at = random.choice([0, 1, 2**31, 2**33, 4_000_000_000])
    os.utime(path, (at, at), follow_symlinks=False)


def _grown(path: Path, _home: SampleHome, random: Random) -> None:
    if path.is_file():
        with path.open("ab") as file:
            file.truncate(path.stat().st_size + random.choice([1, 4096, 40 * 2**20]))


def _hard_link(path: Path, home: SampleHome, _random: Random) -> None:
    # Caches and locks are rewritten in place.
    if path.is_file() and path.suffix != ".db" and not path.name.startswith("."):
        os.link(path, home.path / "elsewhere" / "linked")


_PLACES: dict[str, Callable[[Path, SampleHome, Random], None]] = {
    "removed": _remove,
    "a directory instead": _directory,
    "a file instead": _file,
    "a link instead": _link,
    "moved, and a link to it": _moved_and_linked,
    "a FIFO instead": _fifo,
    "its mode": _mode,
    "renamed": _rename,
    "a neighbour": _extra,
    "its times": _times,
    "zeros at its end": _grown,
    "a hard link to it": _hard_link,
}
