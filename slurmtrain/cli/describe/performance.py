"""How fast runs were, as rows of a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmtrain.cli.shared import formatting
from slurmtrain.cli.shared.fit import Column

PERFORMANCE_COLUMNS = (
    Column("ID"), Column("NAME", rank=1, room=10), Column("NODES", rank=4), Column("PROCS", rank=2),
    Column("GPUS", rank=2), Column("STEPS/S", rank=1), Column("SAMPLES/S", rank=3), Column("S/EPOCH", rank=3),
    Column("TOTAL", rank=4), Column("MEMORY", rank=2), Column("UTIL", rank=3), Column("HOURS/1000", rank=4),
    Column("SPEED-UP"), Column("IDEAL", rank=1),
)  # fmt: skip
"""IDEAL: the speed-up in percent of the ideal one. HOURS/1000: GPU-hours, or process-hours, for 1000 steps."""


def performance_row(run: Mapping[str, Any]) -> tuple[str, ...]:
    """A run of ``compare --performance --json`` as cells of :data:`PERFORMANCE_COLUMNS`."""
    speedup = run["speedup"]
    return (
        run["id"],
        run["name"],
        formatting.number(run["nodes"]),
        formatting.number(run["processes"]),
        formatting.number(run["gpus"]),
        _figures(run["steps_per_second"]),
        _figures(run["samples_per_second"]),
        _figures(run["epoch_seconds"]),
        formatting.duration(run["total_seconds"]),
        "-" if run["memory_bytes"] is None else formatting.size(run["memory_bytes"]),
        _percent(run["utilization"]),
        _figures(run["hours_per_1000_steps"]),
        "-" if speedup is None else f"{speedup:.2f}",
        "-" if run["of_ideal"] is None else _percent(100 * run["of_ideal"]),
    )


def _figures(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"
