"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.preloaded import Preloaded, preloaded


@pytest.fixture(scope="module")
def commands() -> Iterator[Preloaded]:
    with preloaded() as server:
        yield server
