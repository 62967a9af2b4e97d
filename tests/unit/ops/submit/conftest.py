"""What tests of submitting share: a spec, and its sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

SPEC = "name: x\ncommand: python -c pass\nresources: {nodes: 2}\nparams: {a: 1}\ntracking: {mlflow: {enabled: false}}\n"


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spec for two nodes, in the current directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.yaml"
    path.write_text(SPEC)
    return path
