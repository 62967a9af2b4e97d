"""What tests of the verbs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.config import Config
from slurmtrain.ops.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty runs root of its own."""
    runs = tmp_path / "runs"
    return Workspace(Config(runs=runs, executor=None, registry=runs / "registry.db", mlflow_uri=None))
