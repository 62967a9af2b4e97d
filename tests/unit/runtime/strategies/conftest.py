"""Four processes for all tests of strategies: they take seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.ranks import Pair


@pytest.fixture(scope="session")
def four() -> Iterator[Pair]:
    ranks = Pair(4)
    yield ranks
    ranks.close()
