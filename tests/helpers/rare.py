"""Tests that take long for what they add: ``scripts/test --thorough`` runs them."""

from __future__ import annotations

import os

import pytest

THOROUGH = os.environ.get("TEST_RARE") == "all"
rare = pytest.mark.skipif(not THOROUGH, reason="takes long, others prove most of it; TEST_RARE=all, or --thorough")
