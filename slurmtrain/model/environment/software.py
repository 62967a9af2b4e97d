"""The Python that runs execute in, and its packages, as a text with a line for each."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurmtrain.model.environment.changes import Changes, changes_between

_FIRST = re.compile(r"# (?P<python>.*), Python (?P<version>.*)")
_LINE = re.compile(r"(?P<name>[^=\s]+)==(?P<version>\S+)(?:  # (?P<detail>.*))?")


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package.

    ``version``: its version. ``detail``: the beginning of the hash of the list of its files, which has their hashes; of
    an editable one its directory, and the revision there; empty if it is not known.
    """

    version: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Software:
    """An interpreter, by its path, its version, and its packages by name."""

    python: str
    version: str
    packages: Mapping[str, Package]

    def to_text(self) -> str:
        """All of it, a package per line, in the syntax of pip's requirements."""
        lines = [f"# {self.python}, Python {self.version}"]
        for name, package in sorted(self.packages.items(), key=lambda item: item[0].lower()):
            lines.append(f"{name}=={package.version}" + (f"  # {package.detail}" if package.detail else ""))
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    def from_text(cls, text: str) -> Software:
        """Read what :meth:`to_text` returned, also in a version that kept no details."""
        first, *lines = text.splitlines() or [""]
        head = _FIRST.fullmatch(first)
        matches = [match for line in lines if (match := _LINE.fullmatch(line))]
        packages = {match["name"]: Package(match["version"], match["detail"] or "") for match in matches}
        return cls(head["python"] if head else "", head["version"] if head else "", packages)

    @property
    def hash(self) -> str:
        """The beginning of a hash of :meth:`to_text`, by which nodes find out whether theirs is kept already."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()[:16]


def package_changes(earlier: Software, later: Software) -> Changes:
    """The packages that differ; details count only where both are known.

    Args:
        earlier: An environment.
        later: Another one.
    """
    names = [name for name, package in earlier.packages.items() if _is_rebuilt(package, later.packages.get(name))]
    return changes_between(_texts(earlier, names), _texts(later, names))


def _is_rebuilt(package: Package, other: Package | None) -> bool:
    """Whether two packages of one version differ in their files."""
    if other is None or package.version != other.version:
        return False
    return bool(package.detail and other.detail) and package.detail != other.detail


def _texts(software: Software, detailed: list[str]) -> dict[str, str]:
    return {
        name: f"{package.version} ({package.detail})" if name in detailed else package.version
        for name, package in software.packages.items()
    }
