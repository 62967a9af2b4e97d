"""Where the files are that slurmtrain fills in or reads: batch prologue, network profiles."""

from __future__ import annotations

from pathlib import Path


def directory() -> Path:
    """The templates: inside the package where it was installed from a wheel, else beside it."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"
