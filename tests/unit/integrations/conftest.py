"""What tests of integrations share: this process as the only rank of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.one_rank import OneRank, one_rank


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneRank]:
    """Its attempt, and what it reports."""
    with one_rank(tmp_path, monkeypatch) as alone:
        yield alone
