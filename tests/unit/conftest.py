"""Two and four processes for all tests of strategies: what two do costs half as much."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.ranks import Pair


@pytest.fixture(scope="session")
def four() -> Iterator[Pair]:
    ranks = Pair(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two() -> Iterator[Pair]:
    ranks = Pair(2)
    yield ranks
    ranks.close()
