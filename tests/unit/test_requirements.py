"""What pyproject.toml requires, the versions that are tested, and the hashes of their files agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = {name: PROJECT["optional-dependencies"][name] for name in ("digits", "dev", "trainers")}
LOCKS = sorted((REPOSITORY / "locks").glob("*.txt"))


def pins(path: Path) -> dict[str, str]:
    """The version of each package of a file of pins or locks, by its normalized name."""
    entries = re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in entries}


TESTED = pins(REPOSITORY / "constraints.txt")


def test_there_is_a_lock_for_the_package_and_for_each_extra_that_bootstrap_knows() -> None:
    assert {path.stem for path in LOCKS} == {"base", *EXTRAS}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_each_locked_package_has_hashes_and_its_tested_version(lock: Path) -> None:
    entries = re.split(r"\n(?=[a-z])", lock.read_text())[1:]
    assert [entry.split()[0] for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []
    assert {name: version for name, version in pins(lock).items() if TESTED.get(name) != version} == {}


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_all_that_is_required_is_locked_but_torch(extra: str) -> None:
    locked = pins(REPOSITORY / "locks" / "base.txt")
    if extra:
        locked |= pins(REPOSITORY / "locks" / f"{extra}.txt")
    required = {canonicalize_name(Requirement(text).name) for text in EXTRAS.get(extra, PROJECT["dependencies"])}
    assert required - set(locked) <= {"torch"}


def test_the_tested_versions_are_ones_that_are_allowed() -> None:
    requirements = [Requirement(text) for text in sum(EXTRAS.values(), PROJECT["dependencies"])]
    tested = {each.name: TESTED[canonicalize_name(each.name)] for each in requirements}
    assert [str(each) for each in requirements if tested[each.name] not in each.specifier] == []


def test_everything_that_users_install_has_a_lowest_version() -> None:
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for name, texts in extras.items() if name != "dev" for text in texts)]
    assert [text for text in texts if not re.match(r"[\w-]+(\[\w+\])?>=[\d.]+(,<[\d.]+)?$", text)] == []
