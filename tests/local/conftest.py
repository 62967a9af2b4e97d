"""Runs for real, through submitit's local executor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.site import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A fresh runs root; whatever still runs in it at the end is ended."""
    place = Site(tmp_path)
    yield place
    place.end_all()
