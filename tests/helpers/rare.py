"""Tests that take long for what they add: ``scripts/test --all`` runs them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

Case = TypeVar("Case")

THOROUGH = os.environ.get("TEST_RARE") == "all"
rare = pytest.mark.skipif(not THOROUGH, reason="takes long, others prove most of it; TEST_RARE=all, or --all")


def drawn(cases: Sequence[Case], few: int) -> list[Case]:
    """All cases if rare tests run, and otherwise ``few`` of them, evenly spread."""
    return [*cases] if THOROUGH else [cases[number * len(cases) // few] for number in range(min(few, len(cases)))]
