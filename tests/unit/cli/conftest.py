"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.preloaded import Preloaded, shared
from helpers.time_zone import time_zone


@pytest.fixture(scope="session")
def commands() -> Preloaded:
    return shared()


@pytest.fixture(autouse=True)
def utc() -> Iterator[None]:
    """Commands print local times; those of tests are the same everywhere."""
    with time_zone("UTC"):
        yield
