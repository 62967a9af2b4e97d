"""Packages of a repository that are installed as editable: which ones a snapshot can precede on the import path.

Python imports from ``PYTHONPATH`` before it looks into site-packages, and so before directories that ``.pth`` files
name, and before finders that are appended to ``sys.meta_path``, as setuptools does. The finders of meson-python and
scikit-build-core are the first there, and win.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slurmtrain.system.owned_files import read_readable

# What the modules are called that .pth files of these tools import.
_FIRST = re.compile(r"import\s+(_\w+_editable_loader|_\w+_editable)\b")
_SETUPTOOLS = re.compile(r"import\s+(__editable___\w+_finder)\b")
_MAPPING = re.compile(r"^MAPPING(?:\s*:[^=]+)?\s*=\s*(\{.*\})\s*$", re.MULTILINE)


@dataclass(slots=True)
class Editable:
    """Editable installs of a repository's packages.

    ``import_roots``: the directories, relative to the repository, that must precede them. ``notes``: on packages that
    cannot be preceded.
    """

    import_roots: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, root: Path, directory: Path) -> None:
        """Add a directory from which packages are imported, if it is in the repository ``root``."""
        if directory.is_relative_to(root):
            relative = str(directory.relative_to(root))
            if relative not in self.import_roots:
                self.import_roots.append(relative)


def find_editable(python: Path, root: Path) -> Editable:
    """The editable installs in an environment that import from a repository.

    Args:
        python: The environment's interpreter, by the path that the command has.
        root: The repository.
    """
    editable = Editable()
    # By names: starting that Python would take longer than all else.
    # lib64 is often a link to lib.
    for packages in sorted({path.resolve() for path in python.parent.parent.glob("lib*/python3*/*-packages")}):
        for path in sorted(packages.glob("*.pth")):
            for line in _text(path).splitlines():
                _read_line(line.strip(), packages, root, editable)
    return editable


def _read_line(line: str, packages: Path, root: Path, editable: Editable) -> None:
    """Read one line of a ``.pth`` file: a directory, or an import (site, the standard library)."""
    if not line or line.startswith("#"):
        return
    if not line.startswith(("import ", "import\t")):
        editable.add(root, (packages / line).resolve())
    elif match := _SETUPTOOLS.search(line):
        for package, place in _mapping(_text(packages / f"{match[1]}.py")):
            if Path(place).name.removesuffix(".py") == package:
                editable.add(root, Path(place).resolve().parent)
    elif (match := _FIRST.search(line)) and str(root) in _text(packages / f"{match[1]}.py"):
        name = re.sub(r"^_+|_editable(_loader)?$", "", match[1])
        editable.notes.append(
            f"the snapshot does not hold for the package {name}: its editable install precedes every path, so that "
            f"runs import it from {root} as it is by then; install it without --editable"
        )


def _mapping(finder: str) -> Iterator[tuple[str, str]]:
    """The packages that a finder of setuptools maps to directories."""
    match = _MAPPING.search(finder)
    if match is None:
        return
    try:
        mapping = ast.literal_eval(match[1])
    except (ValueError, SyntaxError):
        return
    yield from ((str(package), str(place)) for package, place in mapping.items())


def _text(path: Path) -> str:
    try:
        return read_readable(path).decode(errors="replace")
    except OSError:
        return ""
