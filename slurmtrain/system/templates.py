"""The location of files that slurmtrain fills in or reads: batch scripts, network profiles."""

from __future__ import annotations

from pathlib import Path


def directory() -> Path:
    """The directory of the templates: inside the package if it was installed from a wheel, otherwise next to it."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"
