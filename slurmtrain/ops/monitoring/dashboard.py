"""The dashboard for Grafana that comes with slurmtrain."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.templates import directory


def dashboard_path() -> Path:
    """Where it is."""
    return directory() / "grafana" / "slurmtrain.json"


def read_dashboard() -> str:
    """Its JSON, which Grafana imports. Raises PathError."""
    try:
        return dashboard_path().read_text().rstrip("\n")
    except OSError as error:
        raise PathError(f"cannot read {dashboard_path()}: {describe_os_error(error)}") from error
