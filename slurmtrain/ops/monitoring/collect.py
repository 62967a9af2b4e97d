"""Collecting the state of all runs: as ``status`` does, it observes, and neither starts nor ends anything."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from slurmtrain.ops.monitoring.counters import Counters
from slurmtrain.ops.monitoring.families import SUMMARY, Families, Family
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.version import __version__

# Of so many of the newest runs it is looked up what trackers lack, and of all that may still change.
_RECENT = 1000


@dataclass(frozen=True, slots=True)
class Collection:
    """What was collected, and ``notes``: what the user should know."""

    families: tuple[Family, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What ``metrics --json`` prints."""
        return {"schema": SCHEMA, "metrics": [_family_json(family) for family in self.families]}


def collect(workspace: Workspace, counters: Counters, *, per_run: bool) -> Collection:
    """Collect everything.

    Args:
        workspace: Where the runs are.
        counters: The sums of earlier collections of this process; they are brought up to date.
        per_run: Include the series of single runs that have not ended.

    Raises:
        SlurmtrainError: The runs cannot be read.
    """
    began = time.monotonic()
    families = Families()
    families["build_info"].add(1.0, version=__version__)
    observed = observe(workspace)
    index = observed.runs.index
    problem = counters.update(workspace, index)
    families.add_states(Counter((row.state, counters.place_of(run_id)) for run_id, row in index.items()))
    families.add_totals(counters.totals)
    _add_tracking(families, workspace, observed)
    _add_scheduler(families, workspace, observed)
    if per_run:
        for listed in observed.runs.fetch([run_id for run_id, row in index.items() if not row.ended]).values():
            families.add_run(listed, counters.place_of(listed.id))
    families["collection_timestamp_seconds"].add(time.time())
    families["collection_duration_seconds"].add(time.monotonic() - began)
    return Collection(tuple(families), (*observed.warnings(), *filter(None, [problem])))


def _add_tracking(families: Families, workspace: Workspace, observed: Observed) -> None:
    """Add how far trackers lag behind. It takes a lock to send something, which writes to its file."""
    index = observed.runs.index
    if not index or workspace.store.in_memory:  # what was sent is only in the file
        return
    recent = set(list(index)[-_RECENT:]) | {run_id for run_id, row in index.items() if not row.settled}
    behind = sum(listed.mirrored is False for listed in observed.runs.fetch(recent).values())
    families["tracker_unsent_runs"].add(behind)
    failing: dict[str, int] = {}
    for sent in workspace.store.sent(recent).values():
        for tracker, each in sent.items():
            failing[tracker] = failing.get(tracker, 0) + bool(each.problem)
    for tracker, count in failing.items():
        families["tracker_failing_runs"].add(count, tracker=tracker)
    with contextlib.suppress(OSError):
        families["tracker_sent_timestamp_seconds"].add(workspace.root.tracking_lock.stat().st_mtime)


def _add_scheduler(families: Families, workspace: Workspace, observed: Observed) -> None:
    if observed.problems:
        families["scheduler_up"].add(0.0)
    elif workspace.scheduler.answered_at is not None:
        families["scheduler_up"].add(1.0)


def _family_json(family: Family) -> dict[str, Any]:
    parts = ("count", "sum") if family.kind == SUMMARY else ("value",)
    return {
        "name": family.name,
        "type": family.kind,
        "help": family.help,
        "samples": [
            {"labels": dict(zip(family.labels, labels, strict=True)), **dict(zip(parts, values, strict=True))}
            for labels, values in family.samples.items()
        ],
    }
