"""The packages of a Python, from the files that their installers left: starting that Python would take much longer."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from slurmtrain.model.environment import Package, Software
from slurmtrain.runtime.code.git import NoGit, run_git
from slurmtrain.system.owned_files import read_readable

_INSTALLED = re.compile(r"(.+)-([^-]+)\.(?:dist|egg)-info(?:\.?)")
_HASH_DIGITS = 16
_COMMIT_DIGITS = 12
_GIT_S = 5.0


def read_software(python: Path) -> Software:
    """What a Python consists of, as far as that can be read.

    Args:
        python: The interpreter, by the path that commands have.
    """
    places = package_directories(python)
    versions = {place.parent.name.removeprefix("python") for place in places}
    settings: dict[str, str] = {}
    with contextlib.suppress(OSError):  # it is no virtual environment
        lines = read_readable(python.parent.parent / "pyvenv.cfg").decode(errors="replace").splitlines()
        settings = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}
    version = settings.get("version", settings.get("version_info", "")) or ", ".join(sorted(versions))
    packages: dict[str, Package] = {}
    for place in places:
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(place)):
                if match := _INSTALLED.fullmatch(name):
                    packages[match[1].replace("_", "-")] = Package(match[2], _detail(place / name))
    return Software(str(python), version or "of an unknown version", packages)


def package_directories(python: Path) -> list[Path]:
    """The directories with the packages of a virtual environment, or of an installation, each once.

    In most environments ``lib64`` is a link to ``lib``.
    """
    places = sorted(python.parent.parent.glob("lib*/python3*/*-packages"))
    # In reverse, so that the first of several paths to a directory is the one that stays.
    return list({os.path.realpath(place): place for place in reversed(places)}.values())[::-1]


def _detail(installed: Path) -> str:
    """What tells a package from others of its version; see :class:`Package`."""
    try:
        origin: Any = {}
        with contextlib.suppress(FileNotFoundError):
            # Where an editable package is (PEP 610).
            origin = json.loads(read_readable(installed / "direct_url.json"))
        info = origin.get("dir_info") if isinstance(origin, dict) else None
        if isinstance(info, dict) and info.get("editable"):
            place = Path(unquote(urlsplit(str(origin.get("url"))).path))
            revision = revision_of(place)
            return f"editable {place}" + (f", {revision[:_COMMIT_DIGITS]}" if revision else "")
        return hashlib.sha256(read_readable(installed / "RECORD")).hexdigest()[:_HASH_DIGITS]
    except (OSError, ValueError):
        return ""  # distributions and conda leave out some of these files


def revision_of(directory: Path) -> str:
    """The commit that is checked out in a directory; empty if git does not tell."""
    with contextlib.suppress(NoGit, subprocess.TimeoutExpired):
        return run_git(directory, "rev-parse", "HEAD", timeout_s=_GIT_S).decode().strip()
    return ""


# --- packages of a repository that are installed as editable ----------------------------------------------------------

# Python imports from ``PYTHONPATH`` before it looks into site-packages, and so before directories that ``.pth`` files
# name, and before finders that are appended to ``sys.meta_path``, as setuptools does. The finders of meson-python and
# scikit-build-core are the first there, and win. This is what the modules are called that their .pth files import.
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
    for packages in sorted(path.resolve() for path in package_directories(python)):
        for path in sorted(packages.glob("*.pth")):
            for line in _text_of(path).splitlines():
                _read_line(line.strip(), packages, root, editable)
    return editable


def _read_line(line: str, packages: Path, root: Path, editable: Editable) -> None:
    """Read one line of a ``.pth`` file: a directory, or an import (site, the standard library)."""
    if not line or line.startswith("#"):
        return
    if not line.startswith(("import ", "import\t")):
        editable.add(root, (packages / line).resolve())
    elif match := _SETUPTOOLS.search(line):
        for package, place in _mapping(_text_of(packages / f"{match[1]}.py")):
            if Path(place).name.removesuffix(".py") == package:
                editable.add(root, Path(place).resolve().parent)
    elif (match := _FIRST.search(line)) and str(root) in _text_of(packages / f"{match[1]}.py"):
        name = re.sub(r"^_+|_editable(_loader)?$", "", match[1])
        editable.notes.append(
            f"the snapshot does not cover the package {name}: its editable install comes first on the path, so runs "
            f"import the current files in {root}; install it without --editable"
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


def _text_of(path: Path) -> str:
    try:
        return read_readable(path).decode(errors="replace")
    except OSError:
        return ""
