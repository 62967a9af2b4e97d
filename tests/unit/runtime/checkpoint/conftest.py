"""What tests of checkpoints share: two processes that are ranks, and checkpoints that they have saved."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.ranks import Pair
from helpers.small_model import save_two


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Two processes that are the ranks of one world, for all tests: starting them takes seconds."""
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture(scope="session")
def four() -> Iterator[Pair]:
    """Four such processes, for the few tests that need more than two ranks."""
    four = Pair(4)
    yield four
    four.close()


@pytest.fixture(scope="session")
def saved_by_two(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of two ranks at steps 1 and 2."""
    root = tmp_path_factory.mktemp("run")
    pair.run(save_two, root)
    return root


@pytest.fixture
def run(saved_by_two: Path, tmp_path: Path) -> Path:
    """A copy of it that may be damaged."""
    copied = tmp_path / "run"
    shutil.copytree(saved_by_two, copied)
    return copied
