"""Plug-ins: parts that most users never touch, found through entry points, so that the core does not import them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurmtrain.errors import NotAvailable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

STRATEGIES = "slurmtrain.strategies"
"""The group of how models are distributed, besides whole replicas: meshes, communication hooks, mixed hardware."""
GROWTH = "slurmtrain.growth"
"""The group of how a run gets more nodes while it runs."""


def declared(group: str) -> list[EntryPoint]:
    """The entry points of a ``group``, of all packages; several may have the same name."""
    # Imported here: it takes longer than all else that a submission has to know of plug-ins.
    from importlib.metadata import entry_points

    return list(entry_points(group=group))


def load_plugin(group: str, name: str) -> Any:
    """What the entry point with this ``name`` in a ``group`` refers to. Raises NotAvailable if there is none."""
    for point in declared(group):
        if point.name == name:
            return point.load()
    raise NotAvailable(
        f"there is no plug-in {name!r} ({group}), which comes with slurmtrain: it was installed in another version; "
        "install it again ('pip install --force-reinstall slurmtrain', or 'pip install -e .' in its sources)"
    )
