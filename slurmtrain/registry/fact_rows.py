"""Rows of the facts from which runs are built: events, progress, garbage, and findings against nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slurmtrain.model.preflight.node_ledger import LedgerEntry
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.journal import Garbage, read_event
from slurmtrain.model.run.progress import Progress
from slurmtrain.registry import schema
from slurmtrain.registry.rows import RowFormat

LEDGER = RowFormat(schema.ledger, LedgerEntry)
PROGRESS = RowFormat(schema.progress, Progress, "run_id", "attempt_key")
GARBAGE = RowFormat(schema.garbage, Garbage, "run_id")


def event_of(row: Mapping[str, Any]) -> AnyEvent | None:
    """An event from its row, whose data is the line of the journal, or what an earlier version kept of it."""
    record = {**json.loads(row["data"]), "t": row["time"], "kind": row["kind"]}
    return read_event(record, row["source"], row["offset"])
