"""What all tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.hookimpl(tryfirst=True)  # the plugin that groups them looks at the marks in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run side by side keep together by file, and all those of the cluster by the cluster."""
    for item in items:
        group = "cluster" if "cluster" in item.path.parts else item.path.name
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def _a_clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No configuration of the person who runs the tests, and this interpreter as the ``python`` of commands."""
    for name in list(os.environ):
        if name.startswith(("SLURMTRAIN_", "MLFLOW_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
