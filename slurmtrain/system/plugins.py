"""Plug-ins: parts that most users never touch, found through entry points, so that the core does not import them."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from slurmtrain.errors import NotAvailable

STRATEGIES = "slurmtrain.strategies"
"""The group of how models are distributed, besides whole replicas: meshes, communication hooks, mixed hardware."""
GROWTH = "slurmtrain.growth"
"""The group of how a run gets more nodes while it runs."""


def load_plugin(group: str, name: str) -> Any:
    """What the entry point with this ``name`` in a ``group`` refers to. Raises NotAvailable if there is none."""
    for entry_point in entry_points(group=group, name=name):
        return entry_point.load()
    raise NotAvailable(
        f"there is no plug-in {name!r} ({group}), which comes with slurmtrain: it was installed in another version; "
        "install it again ('pip install --force-reinstall slurmtrain', or 'pip install -e .' in its sources)"
    )
