"""Another local time zone for this process and those that it starts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def time_zone(name: str) -> Iterator[None]:
    """Set the local time zone, as TZ names it, and restore it."""
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("TZ", name)
            time.tzset()
            yield
    finally:
        time.tzset()
